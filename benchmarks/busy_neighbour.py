"""``python -m benchmarks.busy_neighbour``: ``TransformersEngine`` on all cores, alone and beside one busy process.

Two engines take turns: ours with its own choice of threads, and one that is given a thread for each core.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import anyio

from anyengine import EngineClient, EngineSpec, SamplingParams, open_engine_client
from anyengine.engines.transformers.cores import usable_cores
from benchmarks.report import OURS, Figure, print_table

FIXED = "all threads/asyncio"
_ENGINE = "anyengine.engines.transformers:TransformersEngine"
_PARAMS = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
_PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """A process that uses a core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def tokens_per_second(client: EngineClient, requests: int, settle: float, seconds: float) -> float:
    """Tokens per second of ``requests`` requests at once, from one output to another at least ``seconds`` later.

    :param settle: seconds for which the engine runs before
    """
    count, came = 0, anyio.Event()

    async def read() -> None:
        nonlocal count, came
        async with client.open_request(_PROMPT, _PARAMS) as request:
            async for output in request:
                count += len(output.token_ids)
                came.set()
                came = anyio.Event()

    async with anyio.create_task_group() as group:
        for _ in range(requests):
            group.start_soon(read)
        await anyio.sleep(settle)
        await came.wait()
        before, started = count, time.perf_counter()
        await anyio.sleep(seconds)
        await came.wait()
        rate = (count - before) / (time.perf_counter() - started)
        group.cancel_scope.cancel()
    return rate


async def measure(model: str, rounds: int, settle: float, seconds: float) -> list[Figure]:
    """Run both engines in turns."""
    taken: dict[tuple[str, int], dict[str, list[float]]] = {}
    adapted = EngineSpec(_ENGINE, {"model": model, "device": "cpu"})
    fixed = EngineSpec(_ENGINE, {**adapted.arguments, "num_threads": usable_cores()})
    async with open_engine_client(fixed) as other, open_engine_client(adapted) as ours:
        for _ in range(rounds):
            for where, neighbour in (("alone", contextlib.nullcontext), ("beside a busy process", busy_process)):
                with neighbour():
                    for requests in (1, 16):
                        samples = taken.setdefault((where, requests), {OURS: [], FIXED: []})
                        for key, client in ((FIXED, other), (OURS, ours)):
                            samples[key].append(await tokens_per_second(client, requests, settle, seconds))
    figures = [
        Figure(f"{where}, {requests} request{'s'[: requests > 1]}", "tokens/s", samples, True, rival=FIXED)
        for (where, requests), samples in taken.items()
    ]
    for figure in figures:
        figure.against_rival(0.95 if figure.name.startswith("alone") else 10.0)
    return figures


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy_neighbour", description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each figure of a round")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds that an engine runs before each figure")
    arguments = parser.parse_args()
    figures = anyio.run(measure, arguments.model, arguments.rounds, arguments.settle, arguments.seconds)
    print_table(figures, [OURS, FIXED], f"TransformersEngine, model {arguments.model}, on {usable_cores()} cores")


if __name__ == "__main__":
    main()
