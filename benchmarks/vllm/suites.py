"""The figures of the client layer, by suite, and what is asked of them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks import sync
from benchmarks.contest import Contestant, column, medians, take_turns
from benchmarks.report import Figure
from benchmarks.suites import CHURN_PACES, Scale, churn_figures, churn_steps_at

RIVAL = "vllm/asyncio"
WORKER = "benchmarks.vllm.worker"

_LATENCY_SAMPLES = 300
_STEPS = {1: 8000, 64: 4000, 256: 2000}
_AT_LEAST = {1: 2.0, 256: 8.0}
_PACES = {1: 500.0, 64: 200.0, 256: 100.0}
"""Rows of a step, and steps per second."""


def whole_steps(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Outputs per second from the command to the last delivery, CPU time per output, the loop's longest pause."""
    figures: list[Figure] = []
    for rows, steps in _STEPS.items():
        results = take_turns(contestants, scale.rounds, "whole_steps", rows=rows, steps=int(steps * scale.work))
        label = f"whole steps of {rows}"
        rate = Figure(f"{label}: outputs", "1/s", column(results, "outputs_per_s"), True, 0, RIVAL)
        figures.append(rate.against_rival(_AT_LEAST[rows]) if rows in _AT_LEAST else rate)
        cpu = column(results, "cpu_us_per_output")
        figures.append(Figure(f"{label}: client CPU per output", "us", cpu, digits=2, rival=RIVAL))
        engine = column(results, "engine_cpu_us_per_output")
        figures.append(Figure(f"{label}: engine CPU per output", "us", engine, digits=2, rival=RIVAL))
        pause = column(results, "pause_ms")
        figures.append(Figure(f"{label}: longest pause of the loop", "ms", pause, rival=RIVAL))
    return figures


def latency(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Round trips, one at a time."""
    figures: list[Figure] = []
    for command, label in (("utility", "utility round trip"), ("first_output", "add to first output")):
        slices = take_turns(contestants, scale.latency_rounds, command, samples=_LATENCY_SAMPLES)
        p50, p99 = _percentiles(label, slices)
        figures += [p50.against_rival(0.6) if command == "utility" else p50, p99]
    return figures


def paced(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Steps at the pace of an engine: how late they reach the application, and what they cost it.

    The bare loop beside the rivals is what any reader of a ZeroMQ socket on asyncio costs.
    """
    figures: list[Figure] = []
    with Contestant("bare", "asyncio", WORKER) as bare:
        for rows, rate in _PACES.items():
            steps = max(int(rate * scale.work), 40)
            results = take_turns([*contestants, bare], scale.rounds, "paced", rows=rows, rate=rate, steps=steps)
            label = f"steps of {rows} at {rate:g} Hz"
            figures += _percentiles(f"{label}: delay", column(results, "delays"))
            cpu = Figure(f"{label}: client CPU per step", "us", column(results, "cpu_us"), digits=0, rival=RIVAL)
            figures += [cpu, _beyond(bare.key, cpu).against_rival(0.5)]
    return figures


def churn(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Requests that come and go: whole steps beside ``AsyncMPClient``, streams beside ``AsyncLLM.generate``."""
    figures: list[Figure] = []
    ours = [contestant for contestant in contestants if contestant.name == "ours"]
    with Contestant("async_llm", "asyncio", WORKER) as streaming:
        for command, what, who, rival in (
            ("churn_steps", "steps", contestants, RIVAL),
            ("churn_streams", "streams", [*ours, streaming], streaming.key),
        ):
            for rows, rate in CHURN_PACES.items():
                steps = churn_steps_at(rate, scale)
                results = take_turns(who, scale.rounds, command, rows=rows, rate=rate, steps=steps)
                figures += churn_figures(f"churn, {rows} at {rate:g} Hz, {what}", results, rival)
    return figures


def _beyond(floor: str, figure: Figure) -> Figure:
    """What the contestants take in each round beyond what ``floor`` takes."""
    least = figure.rounds[floor]
    rounds = {
        key: [sample - less for sample, less in zip(samples, least, strict=True)]
        for key, samples in figure.rounds.items()
        if key != floor
    }
    name = f"{figure.name}, beyond the bare loop"
    return Figure(name, figure.unit, rounds, digits=figure.digits, rival=figure.rival)


def tensors(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Bytes per second of a tensor in a request."""
    slices = take_turns(contestants, scale.rounds, "prompt_embeds", mebibytes=64, samples=3)
    rates = {key: [rate for slice_ in parts for rate in slice_] for key, parts in slices.items()}
    return [Figure("64 MiB tensor in a request", "GB/s", rates, True, 2, RIVAL).against_rival(3.0)]


def lifecycle(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Start and stop with an engine without a model, and its sudden death."""
    results = take_turns(contestants, scale.rounds, "lifecycle")
    return [
        Figure("start an engine without a model", "ms", column(results, "start_ms"), digits=0, rival=RIVAL),
        Figure("stop it", "ms", column(results, "stop_ms"), rival=RIVAL),
        Figure("SIGKILL to the error of get_output", "ms", column(results, "death_ms"), rival=RIVAL),
    ]


def sync_client(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """``SyncMPClient`` and ours, in processes of their own."""
    backends = [contestant.backend for contestant in contestants if contestant.name == "ours"]
    with ExitStack() as stack:
        rivals = [
            stack.enter_context(Contestant(name, backend, "benchmarks.vllm.sync_worker"))
            for name, backend in [("ours", backend) for backend in backends if backend != "uvloop"]
            + [("vllm", "asyncio")]
        ]
        return sync.compare(rivals, scale.rounds, scale.work, RIVAL)


def _percentiles(label: str, slices: dict[str, list[list[float]]]) -> tuple[Figure, Figure]:
    """The medians of slices that took turns; the 99th percentile is that of all samples, for a slice has too few."""
    tail = {
        key: [statistics.quantiles(itertools.chain.from_iterable(parts), n=100)[98]] for key, parts in slices.items()
    }
    return (
        Figure(f"{label}: p50", "us", medians(slices), digits=0, rival=RIVAL),
        Figure(f"{label}: p99", "us", tail, digits=0, rival=RIVAL),
    )


CLIENT_LAYER: dict[str, Callable[[Sequence[Contestant], Scale], list[Figure]]] = {
    "whole_steps": whole_steps,
    "latency": latency,
    "paced": paced,
    "churn": churn,
    "tensors": tensors,
    "lifecycle": lifecycle,
    "sync_client": sync_client,
}
"""These are run by contestants that have an engine without a model."""
