"""One contestant with the model in a process of its own: ``AsyncLLM``, or our client with vLLM's engine behind it.

Both take token ids and stream token ids, one task per request; nobody turns them into text.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol

from anyengine import EngineClient, EngineDeadError, EngineSpec, SamplingParams, open_engine_client
from anyengine.engines.transformers.checkpoint import default_model
from benchmarks.throughput import Countdown
from benchmarks.vllm.settings import ENGINE_ARGUMENTS, SETTINGS
from benchmarks.watch import cpu_seconds
from benchmarks.worker import answer, keep_stdout_for_answers, next_command

os.environ.update(SETTINGS)

PROMPT_TOKENS = 32
TOKENS = 32
LONG = 900
"""Tokens of a request that is not to end by itself."""


class Contestant(Protocol):
    """What the commands need of a client."""

    dead_error: type[Exception]

    def stream(
        self, prompt: list[int], max_tokens: int
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[Sequence[int]]]:
        """A greedy request that does not stop at an end-of-text token, iterating over tokens as they come."""
        ...

    def pids(self) -> list[int]:
        """The engine's processes, its own first."""
        ...


class Ours:
    """anyengine."""

    dead_error = EngineDeadError

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    @contextlib.asynccontextmanager
    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncGenerator[AsyncIterator[Sequence[int]]]:
        """A request."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        async with self._client.open_request(prompt, params) as request:
            yield (output.token_ids async for output in request)

    def pids(self) -> list[int]:
        """The engine's processes."""
        return [self._client.health().pid]


class Theirs:
    """``AsyncLLM``."""

    def __init__(self, llm: Any) -> None:
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as TheirSamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError as TheirDeadError

        self.dead_error = TheirDeadError
        self._llm = llm
        self._names = itertools.count()
        self._params = TheirSamplingParams
        self._delta = RequestOutputKind.DELTA

    @contextlib.asynccontextmanager
    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncGenerator[AsyncIterator[Sequence[int]]]:
        """A request."""
        params = self._params(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        outputs = self._llm.generate({"prompt_token_ids": prompt}, params, f"{next(self._names)}")
        async with contextlib.aclosing(outputs):
            yield (output.outputs[0].token_ids async for output in outputs)

    def pids(self) -> list[int]:
        """The engine's processes."""
        return [process.pid for process in self._llm.engine_core.resources.engine_manager.processes]


# ---- commands ----


async def generate(contestant: Contestant, concurrency: int, seed: int) -> dict[str, Any]:
    """``concurrency`` requests at once, from the call to the last token: rate, CPU time, first tokens, gaps, tokens."""
    prompts = _prompts(concurrency, seed)
    firsts: list[float] = []
    gaps: list[float] = []
    tokens: list[list[int]] = [[] for _ in prompts]
    gc.collect()

    async def read(row: int) -> None:
        async with contestant.stream(prompts[row], TOKENS) as outputs:
            before = started
            async for new in outputs:
                now = time.perf_counter()
                if tokens[row]:
                    gaps.append((now - before) * 1e3)
                else:
                    firsts.append((now - before) * 1e3)
                tokens[row] += new
                before = now

    engine = contestant.pids()[0]
    cpu, engine_cpu = time.process_time(), cpu_seconds(engine)
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for row in range(concurrency):
            group.create_task(read(row))
    seconds = time.perf_counter() - started
    cpu, engine_cpu = time.process_time() - cpu, cpu_seconds(engine) - engine_cpu
    if any(len(row) != TOKENS for row in tokens):
        raise AssertionError(f"requests got {[len(row) for row in tokens]} tokens")
    count = concurrency * TOKENS
    return {
        "tokens_per_s": count / seconds,
        "cpu_us": cpu / count * 1e6,
        "engine_cpu_ms": engine_cpu / count * 1e3,
        "firsts": firsts,
        "gaps": gaps,
        "tokens": tokens,
    }


async def cancel(contestant: Contestant, concurrency: int, seed: int) -> float:
    """Milliseconds from the cancellation of one of as many requests as run at once to the first token of the next."""
    prompts = _prompts(concurrency + 1, seed)
    running = Countdown(concurrency)

    async def read(row: int) -> None:
        async with contestant.stream(prompts[row], LONG) as outputs:
            await anext(outputs)
            running.one()
            async for _ in outputs:
                pass

    async def wait_for_slot() -> float:
        async with contestant.stream(prompts[-1], LONG) as outputs:
            await anext(outputs)
            return time.perf_counter()

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read(row)) for row in range(concurrency)]
        await running.done.wait()
        waiting = group.create_task(wait_for_slot())
        await asyncio.sleep(random.Random(seed).uniform(0.2, 0.4))
        assert not waiting.done()
        cancelled = time.perf_counter()
        readers[0].cancel()  # as servers do it; vLLM's clients know no other way
        first = await waiting
        for reader in readers:
            reader.cancel()
    return (first - cancelled) * 1e3


async def kill(contestant: Contestant, concurrency: int, seed: int) -> float:
    """Milliseconds from SIGKILL to the moment at which the last of ``concurrency`` streams has its error."""
    prompts = _prompts(concurrency, seed)
    running = Countdown(concurrency)
    told: list[float] = []

    async def read(row: int) -> None:
        try:
            async with contestant.stream(prompts[row], LONG) as outputs:
                await anext(outputs)
                running.one()
                async for _ in outputs:
                    pass
        except contestant.dead_error:
            told.append(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for row in range(concurrency):
            group.create_task(read(row))
        await running.done.wait()
        killed = time.perf_counter()
        os.kill(contestant.pids()[0], signal.SIGKILL)
    assert len(told) == concurrency
    return (max(told) - killed) * 1e3


def _prompts(count: int, seed: int) -> list[list[int]]:
    """The same for both, and new with each seed: nothing of a prompt is in a prefix cache."""
    source = random.Random(seed)
    return [[source.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


_COMMANDS = {"generate": generate, "cancel": cancel, "kill": kill}


# ---- serving ----


async def serve_ours() -> None:
    """Run commands against anyengine."""
    spec = EngineSpec("anyengine.engines.vllm:VllmEngine", {"model": "default", **ENGINE_ARGUMENTS})
    async with open_engine_client(spec) as client:
        contestant = Ours(client)
        answer([os.getpid(), *contestant.pids()])
        await _serve(contestant)
        leaving = time.perf_counter()
    answer((time.perf_counter() - leaving) * 1e3)


async def serve_theirs() -> None:
    """Run commands against ``AsyncLLM``."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model = str(default_model(lambda stage, fraction=None: None))
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **ENGINE_ARGUMENTS))
    contestant = Theirs(llm)
    answer([os.getpid(), *contestant.pids()])
    await _serve(contestant)
    leaving = time.perf_counter()
    llm.shutdown()
    answer((time.perf_counter() - leaving) * 1e3)
    del contestant, llm  # its destructor does not work any more when the interpreter ends


async def _serve(contestant: Contestant) -> None:
    """Until there is nothing more to do than to stop the engine, which may be dead."""
    gc.freeze()  # what was loaded is not looked through again and again, as in vLLM's own server
    while (command := await next_command()) is not None:
        name, arguments = command
        if name == "stop":
            return
        answer(await _COMMANDS[name](contestant, **arguments))


if __name__ == "__main__":
    keep_stdout_for_answers()
    asyncio.run(serve_ours() if sys.argv[1] == "ours" else serve_theirs())
