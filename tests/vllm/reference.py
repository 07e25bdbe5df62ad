"""What vLLM itself answers: run in a process of its own, whose memory is then free for the engine.

    python reference.py LLM|AsyncLLM < requests.json > answers.json

In: ``{"arguments": {...}, "requests": [[prompt, sampling parameters], ...]}``, where a prompt is token ids, or a text
and the numbers of the images in it. Out: the token ids of each answer. With ``data_parallel_size`` the ranks take
turns, and what has a temperature but no seed is answered first, one by one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def reference(
    kind: str, arguments: dict[str, Any], requests: Sequence[tuple[list[Any], dict[str, Any]]]
) -> Generator[Callable[[], Any]]:
    """Have vLLM's own client answer with ``kind`` of engine; what is yielded waits for the answers."""
    from tests.vllm import setups

    environ = os.environ | setups.environment("uni" if kind == "LLM" else "mp")
    root = str(Path(__file__).parents[2])  # for the images
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as shown:
        json.dump({"arguments": arguments, "requests": requests}, given)
        given.seek(0)
        with subprocess.Popen([sys.executable, __file__, kind], stdin=given, stdout=shown, env=environ) as process:

            def answers() -> Any:
                assert process.wait(timeout=200) == 0
                shown.seek(0)
                return json.loads(shown.read().splitlines()[-1])

            try:
                yield answers
            finally:
                process.kill()


def run_reference(kind: str, arguments: dict[str, Any], requests: Sequence[tuple[list[Any], dict[str, Any]]]) -> Any:
    """The answers of ``kind`` of engine, by vLLM's own client."""
    with reference(kind, arguments, requests) as answers:
        return answers()


def _prompt(prompt: list[Any]) -> Any:
    if prompt and isinstance(prompt[0], str):
        from tests.vllm.image_model import prompt_of

        text, images = prompt
        return prompt_of(text, images) if images else {"prompt": text}
    return {"prompt_token_ids": prompt}


def _with_llm(arguments: dict[str, Any], requests: list[Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    outputs = llm.generate(
        [_prompt(prompt) for prompt, _ in requests],
        [SamplingParams(**params, detokenize=False) for _, params in requests],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


async def _with_async_llm(arguments: dict[str, Any], requests: list[Any]) -> list[list[int]]:
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import AsyncEngineArgs, SamplingParams

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    ranks = arguments.get("data_parallel_size", 1)
    answers: list[list[int]] = [[] for _ in requests]

    async def answer(number: int) -> None:
        prompt, params = requests[number]
        rank = number % ranks if ranks > 1 else None
        sampling = SamplingParams(**params, detokenize=False)
        async for output in llm.generate(_prompt(prompt), sampling, str(number), data_parallel_rank=rank):
            answers[number] = list(output.outputs[0].token_ids)

    unseeded = [number for number, (_, params) in enumerate(requests) if params["temperature"] and "seed" not in params]
    try:
        for number in unseeded:
            await answer(number)
        await asyncio.gather(*(answer(number) for number in range(len(requests)) if number not in unseeded))
        return answers
    finally:
        llm.shutdown()


def _main() -> None:
    given = json.load(sys.stdin)
    answers = _with_llm(**given) if sys.argv[1] == "LLM" else asyncio.run(_with_async_llm(**given))
    print()
    print(json.dumps(answers))


if __name__ == "__main__":
    _main()
