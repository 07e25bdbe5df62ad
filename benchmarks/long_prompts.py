"""``python -m benchmarks.long_prompts``: what prompts of a million tokens keep from everybody else.

While one comes, a timer of the same event loop looks how late it is, and another request is read that gets a token
each millisecond. Prompts of one token take turns with the long ones.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from anyengine import EngineClient, EngineSpec, SamplingParams, open_engine_client
from benchmarks.report import Figure, print_table
from benchmarks.watch import Watch

SHORT = "one token"
_VOCABULARY = 200_000
_ENGINE = EngineSpec("anyengine.engines.scripted:ScriptedEngine", {"vocab_size": _VOCABULARY, "step_delay": 0.001})


def prompts_of(tokens: int) -> Mapping[str, Any]:
    """The prompts that are compared, each of ``tokens`` tokens but the first."""
    numbers = [number % _VOCABULARY for number in range(tokens)]
    prompts: dict[str, Any] = {SHORT: [1], "list": numbers, "array": array("I", numbers)}
    if importlib.util.find_spec("numpy"):
        import numpy

        prompts["numpy"] = numpy.array(numbers)
    if importlib.util.find_spec("torch"):
        import torch

        prompts["torch"] = torch.tensor(numbers)
    return prompts


class Neighbour:
    """Reads the outputs of a request that goes on; ``gap`` is the longest time in seconds between two of them."""

    gap = 0.0

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.reads = anyio.Event()

    async def run(self) -> None:
        """Read until cancelled."""
        async with self._client.open_request([1], SamplingParams(max_tokens=10**6)) as request:
            before = time.perf_counter()
            async for _ in request:
                now = time.perf_counter()
                self.gap, before = max(self.gap, now - before), now
                self.reads.set()


async def measure(client: EngineClient, prompt: Any) -> dict[str, float]:
    """One prompt's first token, and what came late meanwhile, in milliseconds."""
    neighbour = Neighbour(client)
    watch = Watch(client.health().pid)
    async with anyio.create_task_group() as group:
        group.start_soon(neighbour.run)
        await neighbour.reads.wait()
        async with watch:
            neighbour.gap = 0.0
            await client.generate(prompt, SamplingParams(max_tokens=1))
            await anyio.sleep(0.02)  # a neighbour's gap ends with its next output
        group.cancel_scope.cancel()
    return {**watch.pauses(), "gap_ms": neighbour.gap * 1e3, "first_token_ms": watch.seconds * 1e3 - 20}


async def run(tokens: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Each prompt's figures, round by round."""
    prompts = prompts_of(tokens)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in prompts}
    async with open_engine_client(_ENGINE) as client:
        for _ in range(rounds):
            for name, prompt in prompts.items():
                results[name].append(await measure(client, prompt))
    return results


def main() -> None:
    """Measure, and print a table for each event loop."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_prompts", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backends", default="asyncio,trio", help="event loops, separated by commas")
    arguments = parser.parse_args()
    labels = {
        "pause_ms": "longest pause of the loop",
        "late_ms": "latest timer of the loop",
        "gap_ms": "longest wait for a neighbour's output",
        "first_token_ms": "first token",
    }
    for backend in arguments.backends.split(","):
        measured: Callable[[], Any] = functools.partial(anyio.run, run, arguments.tokens, arguments.rounds)
        results: dict[str, list[dict[str, float]]] = measured(backend=backend)
        figures = [
            Figure(label, "ms", {name: [one[key] for one in rounds] for name, rounds in results.items()}, rival=SHORT)
            for key, label in labels.items()
        ]
        print_table(figures, list(results), f"a prompt of {arguments.tokens:,} tokens on {backend}")


if __name__ == "__main__":
    main()
