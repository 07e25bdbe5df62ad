"""Whole engines with a small model: ``AsyncLLM``, and our client with vLLM's engine behind it.

What a token costs differs by a tenth between two processes of the same engine, from their start to their end. So there
are several pairs, one after the other; in a pair one engine is busy at a time and the other waits.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.contest import Contestant, column, medians
from benchmarks.report import Figure
from benchmarks.suites import Scale
from benchmarks.vllm.suites import RIVAL

_CONCURRENCIES = (1, 4, 16)
"""Requests at a time; the last is as many as the engine runs at once."""

_ROUNDS = 2
"""For each pair."""

Results = dict[Any, dict[str, list[Any]]]
"""By what was measured, and by contestant."""


def model(scale: Scale) -> list[Figure]:
    """Tokens per second, first tokens, gaps, CPU time; cancellation, death, start and stop."""
    results: Results = collections.defaultdict(lambda: collections.defaultdict(list))
    for number in range(2 if scale.few else 6):
        with ExitStack() as stack:
            names = ("ours", "vllm") if number % 2 == 0 else ("vllm", "ours")
            pair = [stack.enter_context(_start(name, results)) for name in names]
            _measure(pair, number, results)
    return [
        *(figure for concurrency in _CONCURRENCIES for figure in _streaming(concurrency, results[concurrency])),
        Figure("model: cancel to the next request's token", "ms", results["cancel"], digits=0, rival=RIVAL),
        Figure("model: SIGKILL to the last of 16 streams", "ms", results["kill"], digits=0, rival=RIVAL),
        Figure("model: start, from a new interpreter", "s", results["start"], rival=RIVAL),
        Figure("model: stop", "ms", results["stop"], digits=0, rival=RIVAL),
    ]


def _start(name: str, results: Results) -> Contestant:
    started = time.perf_counter()
    contestant = Contestant(name, "asyncio", "benchmarks.vllm.model_worker")
    results["start"][contestant.key].append(time.perf_counter() - started)
    return contestant


def _measure(pair: Sequence[Contestant], number: int, results: Results) -> None:
    """The rounds of one pair, of which every other ends by a kill."""
    most = _CONCURRENCIES[-1]
    for concurrency in _CONCURRENCIES:
        for contestant in pair:  # what is done for the first time takes longer
            contestant.run("generate", concurrency=concurrency, seed=concurrency)
        for turn in range(_ROUNDS):
            seed = 1000 * (number * _ROUNDS + turn + 1) + concurrency
            for contestant in pair if turn % 2 == 0 else reversed(pair):
                figures = contestant.run("generate", concurrency=concurrency, seed=seed)
                results[concurrency][contestant.key].append(figures)
    for turn in range(_ROUNDS):
        for contestant in pair if turn % 2 == 0 else reversed(pair):
            results["cancel"][contestant.key].append(contestant.run("cancel", concurrency=most, seed=turn))
    for contestant in pair:
        if number % 2:
            results["kill"][contestant.key].append(contestant.run("kill", concurrency=most, seed=_ROUNDS))
            contestant.run("stop")
        else:
            results["stop"][contestant.key].append(contestant.run("stop"))


def _streaming(concurrency: int, slices: dict[str, list[Any]]) -> list[Figure]:
    """:raises AssertionError: if the same prompt got different tokens, where no other prompt shared its steps"""
    ours, theirs = column(slices, "tokens").values()
    if concurrency == 1 and ours != theirs:
        raise AssertionError("the two engines gave different tokens for the same prompt")
    label = f"model, {concurrency} at a time"
    rate = Figure(f"{label}: tokens", "1/s", column(slices, "tokens_per_s"), True, rival=RIVAL)
    return [
        rate.against_rival(1.0),
        Figure(f"{label}: first token", "ms", medians(column(slices, "firsts")), rival=RIVAL),
        Figure(f"{label}: gap between tokens", "ms", medians(column(slices, "gaps")), rival=RIVAL),
        Figure(f"{label}: client CPU per token", "us", column(slices, "cpu_us"), digits=0, rival=RIVAL),
        Figure(f"{label}: engine CPU per token", "ms", column(slices, "engine_cpu_ms"), rival=RIVAL),
    ]
