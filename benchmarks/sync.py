"""The sync client: whole steps, and requests one after the other and many at a time, beside its rival.

Both are driven by the main thread of a worker process, as a script would. The workload of whole steps is that of
:mod:`benchmarks.throughput`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from anyengine import SamplingParams, SyncEngineClient, open_sync_engine_client
from anyengine.types import EngineSpec
from benchmarks.contest import Contestant, column, take_turns
from benchmarks.report import RIVAL, Figure
from benchmarks.sync_baseline import SyncBaselineClient
from benchmarks.throughput import CHECK_EVERY, SPREAD

ENGINE = EngineSpec("benchmarks.engines:HeldEngine", {"vocab_size": 2**31})
CONTESTANTS = ("sync", "sync_baseline")

CONCURRENCY = 256
"""Requests that are under way at a time, when many are."""

TOKENS = 16
"""Tokens of each request."""

_STEPS = {1: 8000, 64: 4000, 256: 2000}
_REQUESTS = {"one_by_one": 500, "many": 5000}
_names = itertools.count()


# ---- ours ----


def whole_steps(client: SyncEngineClient, rows: int, steps: int) -> dict[str, float]:
    """``get_output`` of anyengine."""
    client.call_utility("hold")
    params = SamplingParams(max_tokens=steps)
    for row in range(rows):
        client.add_request([row * SPREAD], params)
    kept: list[tuple[int, Sequence[int]]] = []
    seen = step = 0
    last = (rows - 1) * SPREAD
    stopwatch = Stopwatch()
    client.call_utility("release")
    while seen < rows * steps:
        outputs = client.get_output()
        step += 1
        seen += len(outputs.handles)
        if outputs.token_ids[-1] != last + step:
            raise AssertionError(f"step {step} ends with token {outputs.token_ids[-1]}")
        if step % CHECK_EVERY == 0:
            kept.append((step, outputs.token_ids))
    figures = stopwatch.figures("outputs", seen)
    for number, tokens in kept:
        _check_step(number, tokens, rows)
    if step != steps or set(outputs.details) != set(range(rows)):
        raise AssertionError(f"{len(outputs.details)} of {rows} requests ended in step {step}")
    return figures


def one_by_one(client: SyncEngineClient, requests: int) -> dict[str, float]:
    """``generate`` of anyengine."""
    params = SamplingParams(max_tokens=TOKENS)
    stopwatch = Stopwatch()
    for number in range(requests):
        if client.generate([number], params).token_ids[-1] != number + TOKENS:
            raise AssertionError(f"request {number} has the wrong tokens")
    return stopwatch.figures("requests", requests)


def many(client: SyncEngineClient, requests: int) -> dict[str, float]:
    """``generate_many`` of anyengine."""
    params = SamplingParams(max_tokens=TOKENS)
    prompts = ([number] for number in range(requests))
    seen = 0
    stopwatch = Stopwatch()
    for index, completion in client.generate_many(prompts, params, max_concurrency=CONCURRENCY):
        if isinstance(completion, Exception) or completion.token_ids[-1] != index + TOKENS:
            raise AssertionError(f"request {index} has the wrong tokens")
        seen += 1
    if seen != requests:
        raise AssertionError(f"{seen} of {requests} requests ended")
    return stopwatch.figures("requests", requests)


# ---- the rival ----


def whole_steps_of_baseline(client: SyncBaselineClient, rows: int, steps: int) -> dict[str, float]:
    """``get_output`` of the rival."""
    client.call_utility("hold")
    for row in range(rows):
        client.add_request(f"{next(_names)}", [row * SPREAD], steps)
    kept: list[tuple[int, Any]] = []
    seen = step = 0
    last = (rows - 1) * SPREAD
    stopwatch = Stopwatch()
    client.call_utility("release")
    while seen < rows * steps:
        outputs = client.get_output().outputs
        step += 1
        seen += len(outputs)
        if outputs[-1].new_token_ids[-1] != last + step:
            raise AssertionError(f"step {step} ends with token {outputs[-1].new_token_ids[-1]}")
        if step % CHECK_EVERY == 0:
            kept.append((step, outputs))
    figures = stopwatch.figures("outputs", seen)
    for number, earlier in kept:
        _check_step(number, [token for output in earlier for token in output.new_token_ids], rows)
    if step != steps or sum(output.finish_reason is not None for output in outputs) != rows:
        raise AssertionError(f"not all of {rows} requests ended in step {step}")
    return figures


def one_by_one_of_baseline(client: SyncBaselineClient, requests: int) -> dict[str, float]:
    """One request after the other, its outputs collected from whole steps."""
    stopwatch = Stopwatch()
    for number in range(requests):
        client.add_request(f"{next(_names)}", [number], TOKENS)
        tokens: list[int] = []
        ended = False
        while not ended:
            (output,) = client.get_output().outputs
            tokens += output.new_token_ids
            ended = output.finish_reason is not None
        if tokens[-1] != number + TOKENS:
            raise AssertionError(f"request {number} has the wrong tokens")
    return stopwatch.figures("requests", requests)


def many_of_baseline(client: SyncBaselineClient, requests: int) -> dict[str, float]:
    """Many requests at a time, their outputs dealt out from whole steps."""
    running: dict[str, tuple[int, list[int]]] = {}
    numbers = iter(range(requests))
    seen = 0
    stopwatch = Stopwatch()
    while seen < requests:
        for number in itertools.islice(numbers, CONCURRENCY - len(running)):
            request_id = f"{next(_names)}"
            running[request_id] = number, []
            client.add_request(request_id, [number], TOKENS)
        for output in client.get_output().outputs:
            running[output.request_id][1].extend(output.new_token_ids)
            if output.finish_reason is not None:
                number, tokens = running.pop(output.request_id)
                if tokens[-1] != number + TOKENS:
                    raise AssertionError(f"request {number} has the wrong tokens")
                seen += 1
    return stopwatch.figures("requests", requests)


def _check_step(step: int, tokens: Sequence[int], rows: int) -> None:
    if list(tokens) != [row * SPREAD + step for row in range(rows)]:
        raise AssertionError(f"step {step} brought the wrong tokens")


# ---- the worker and the suite ----


class Stopwatch:
    """Time and this process's CPU time from its making to :meth:`figures`."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._started = time.perf_counter()

    def figures(self, what: str, count: int) -> dict[str, float]:
        """Rates for ``count`` of ``what``."""
        seconds = time.perf_counter() - self._started
        cpu = time.process_time() - self._cpu
        return {f"{what}_per_s": count / seconds, "cpu_us": cpu / count * 1e6}


def serve(contestant: str, backend: str) -> None:
    """Run commands as :mod:`benchmarks.worker` does, in the main thread and without an event loop of its own."""
    if contestant == "sync":
        commands: dict[str, Callable[..., Any]] = {"whole_steps": whole_steps, "one_by_one": one_by_one, "many": many}
        with open_sync_engine_client(ENGINE, backend=backend) as client:  # type: ignore[arg-type]
            serve_commands(commands, client, client.health().pid)
    else:
        commands = {
            "whole_steps": whole_steps_of_baseline,
            "one_by_one": one_by_one_of_baseline,
            "many": many_of_baseline,
        }
        with SyncBaselineClient() as rival:
            serve_commands(commands, rival, rival.process.pid)


def serve_commands(commands: dict[str, Callable[..., Any]], client: object, pid: int) -> None:
    """Run commands, as :mod:`benchmarks.worker` does, until there are no more."""
    print(json.dumps([os.getpid(), pid]), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(commands[name](client, **arguments)), flush=True)


def measure(backends: Sequence[str], rounds: int, work: float) -> list[Figure]:
    """The figures; each stands in the column of the async client of the same event loop, the rival's in asyncio's."""
    with ExitStack() as stack:
        contestants = [stack.enter_context(Contestant("sync", backend)) for backend in backends if backend != "uvloop"]
        if any(contestant.backend == "asyncio" for contestant in contestants):
            contestants.append(stack.enter_context(Contestant("sync_baseline", "asyncio")))
        return compare(contestants, rounds, work)


def compare(contestants: Sequence[Contestant], rounds: int, work: float, rival: str = RIVAL) -> list[Figure]:
    """The figures of contestants that run already."""
    figures: list[Figure] = []
    for rows, steps in _STEPS.items():
        results = _named(take_turns(contestants, rounds, "whole_steps", rows=rows, steps=int(steps * work)))
        label = f"sync client, whole steps of {rows}"
        rate = Figure(f"{label}: outputs_per_s", "1/s", column(results, "outputs_per_s"), True, 0, rival)
        figures.append(rate.against_rival(2.0) if rows == 256 else rate)
        cpu = column(results, "cpu_us")
        figures.append(Figure(f"{label}: client CPU per output", "us", cpu, digits=2, rival=rival))
    for command, requests in _REQUESTS.items():
        results = _named(take_turns(contestants, rounds, command, requests=int(requests * work)))
        label = f"sync client, requests {'one by one' if command == 'one_by_one' else f'{CONCURRENCY} at a time'}"
        rate = Figure(f"{label}: requests_per_s", "1/s", column(results, "requests_per_s"), True, 0, rival)
        figures += [rate, Figure(f"{label}: client CPU", "us", column(results, "cpu_us"), digits=0, rival=rival)]
    return figures


def _named(results: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        key.replace("sync_baseline/", "baseline/").replace("sync/", "ours/"): figures
        for key, figures in results.items()
    }
