"""What vLLM itself answers: run in a process of its own, whose memory is then free for the engine.

    python reference.py LLM|AsyncLLM < requests.json > answers.json

In: ``{"arguments": {...}, "requests": [[prompt, sampling parameters], ...]}``, where a prompt is token ids, or a text
and the numbers of the images in it. Out: the token ids of each answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run_reference(kind: str, arguments: dict[str, Any], requests: Sequence[tuple[list[Any], dict[str, Any]]]) -> Any:
    """The answers of ``kind`` of engine, by vLLM's own client."""
    from tests.vllm import setups

    environ = os.environ | setups.environment("uni" if kind == "LLM" else "mp")
    given = json.dumps({"arguments": arguments, "requests": requests})
    done = subprocess.run(
        [sys.executable, __file__, kind], input=given, env=environ, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


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

    async def answer(number: int, prompt: list[Any], params: dict[str, Any]) -> list[int]:
        tokens: list[int] = []
        sampling = SamplingParams(**params, detokenize=False)
        async for output in llm.generate(_prompt(prompt), sampling, str(number)):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    try:
        return await asyncio.gather(*(answer(number, *request) for number, request in enumerate(requests)))
    finally:
        llm.shutdown()


def _main() -> None:
    given = json.load(sys.stdin)
    answers = _with_llm(**given) if sys.argv[1] == "LLM" else asyncio.run(_with_async_llm(**given))
    print()
    print(json.dumps(answers))


if __name__ == "__main__":
    _main()
