"""The figures, by suite: which commands the contestants run, and what is asked of the results."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks import inproc, sync
from benchmarks.contest import Contestant, column, take_turns
from benchmarks.report import RIVAL, Figure
from benchmarks.watch import cpu_seconds

BARE = "pass"
IMPORT = "import anyengine; anyengine.open_engine_client"
HEAVY = f"{IMPORT}; import sys; print(len({{'torch', 'transformers', 'numpy'}} & {{*sys.modules}}))"


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured. ``work`` scales the number of steps, ``idle`` is in seconds.

    ``few`` spares what takes long and changes little: memory on one event loop only, and fewer deaths.
    """

    rounds: int
    work: float
    latency_rounds: int
    idle: float
    few: bool = False


FULL = Scale(rounds=7, work=1.0, latency_rounds=12, idle=10.0)
QUICK = Scale(rounds=5, work=0.15, latency_rounds=7, idle=2.0, few=True)

_LATENCY_SAMPLES = 300
_STEPS = {
    ("whole_steps", 1): 8000,
    ("whole_steps", 64): 4000,
    ("whole_steps", 256): 2000,
    ("streams", 1): 8000,
    ("streams", 64): 2000,
    ("streams", 256): 800,
}


def throughput(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Outputs per second, CPU time per output, and the longest pause of the event loop meanwhile."""
    figures: list[Figure] = []
    for (command, rows), steps in _STEPS.items():
        results = take_turns(contestants, scale.rounds, command, rows=rows, steps=int(steps * scale.work))
        label = f"{'whole steps' if command == 'whole_steps' else 'streams'} of {rows}"
        rate = Figure(f"{label}: outputs_per_s", "1/s", column(results, "outputs_per_s"), True, 0)
        if command == "whole_steps" and rows in (1, 256):
            rate.against_rival(1.2 if rows == 1 else 5.0)
        figures.append(rate.trio_close())
        client = column(results, "cpu_us_per_output")
        figures.append(Figure(f"{label}: client CPU per output", "us", client, digits=2))
        engine = column(results, "engine_cpu_us_per_output")
        figures.append(Figure(f"{label}: engine CPU per output", "us", engine, digits=2))
        pause = Figure(f"{label}: longest pause of the loop", "ms", column(results, "pause_ms"), digits=1)
        figures.append(pause.at_most(10.0))
    return figures


CHURN_PACES = {256: 100.0, 64: 200.0}
"""Rows of a step, and steps per second."""

_CHURN_SECONDS = 0.8


def churn_figures(
    label: str, results: dict[str, list[dict[str, float]]], rival: str = RIVAL
) -> tuple[Figure, Figure, Figure]:
    """Client CPU per output and the loop's longest pauses, of requests that come and go."""
    return (
        Figure(f"{label}: client CPU per output", "us", column(results, "cpu_us_per_output"), digits=2, rival=rival),
        Figure(f"{label}: longest pause of the loop", "ms", column(results, "pause_ms"), rival=rival).at_most(10.0),
        Figure(f"{label}: a timer late by", "ms", column(results, "late_ms"), rival=rival),
    )


def churn_steps_at(rate: float, scale: Scale) -> int:
    """For how many steps churn is measured."""
    return max(int(rate * _CHURN_SECONDS * scale.work), 20)


def churn(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Requests that come and go at the pace of an engine."""
    figures: list[Figure] = []
    for command, what in (("churn_steps", "steps"), ("churn_streams", "streams")):
        for rows, rate in CHURN_PACES.items():
            steps = churn_steps_at(rate, scale)
            results = take_turns(contestants, scale.rounds, command, rows=rows, rate=rate, steps=steps)
            figures += churn_figures(f"churn, {rows} at {rate:g} Hz, {what}", results)
    return figures


def bursts(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """The loop's longest pause when many requests begin or end at one moment; of ours alone."""
    ours = [contestant for contestant in contestants if contestant.name == "ours"]
    results = take_turns(ours, scale.rounds, "bursts", rows=256)
    labels = {
        "open": "256 streams opened at once",
        "end": "256 streams ended by one step",
        "replace": "256 streams ended and replaced",
        "abort": "256 streams aborted at once",
    }
    parts = {
        label: {key: [slice_[name] for slice_ in slices] for key, slices in results.items()}
        for name, label in labels.items()
    }
    parts["a death told to 1,000 waiters"] = take_turns(
        ours, 3 if scale.few else scale.rounds, "death", waiters=1000, watched=True
    )
    return [
        figure
        for label, part in parts.items()
        for figure in (
            Figure(f"{label}: longest pause of the loop", "ms", column(part, "pause_ms")).at_most(10.0),
            Figure(f"{label}: a timer late by", "ms", column(part, "late_ms")),
        )
    ]


def latency(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Round trips; each sample of a figure is a percentile of one slice, and slices take turns."""
    figures: list[Figure] = []
    for command, label in (("utility", "utility round trip"), ("first_output", "add to first output")):
        results = take_turns(contestants, scale.latency_rounds, command, samples=_LATENCY_SAMPLES)
        middle = {key: [statistics.median(part) for part in slices] for key, slices in results.items()}
        p50 = Figure(f"{label}: p50", "us", middle, digits=0)
        figures.append((p50.against_rival(0.7) if command == "utility" else p50).trio_close())
        # Of all samples together: one slice has three beyond its own 99th percentile.
        tail = {
            key: [statistics.quantiles(itertools.chain.from_iterable(slices), n=100)[98]]
            for key, slices in results.items()
        }
        figures.append(Figure(f"{label}: p99", "us", tail, digits=0))
    return figures


def tensors(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Bytes per second of a tensor in a request: by the lane, in frames, and without a copy; ours in all three ways."""

    def rates(who: Sequence[Contestant], command: str) -> dict[str, list[float]]:
        results = take_turns(who, scale.rounds, command, mebibytes=64, samples=6)
        return {key: [rate for slice_ in slices for rate in slice_] for key, slices in results.items()}

    ours = [contestant for contestant in contestants if contestant.name == "ours"]
    lane = Figure("64 MiB tensor in a request", "GB/s", rates(contestants, "prompt_embeds"), True, 2)
    frames = Figure("the same in frames", "GB/s", rates(ours, "prompt_embeds_in_frames"), True, 2)
    shared = rates(ours, "prompt_embeds_in_shared_storage")
    pauses = take_turns(ours, scale.rounds, "longest_pause", mebibytes=64, samples=2)
    return [
        lane.against_rival(3.0).trio_close(),
        frames.trio_close(),
        Figure("the same in torch's shared memory", "GB/s", shared, True, 1),
        Figure("64 MiB in a utility call: longest pause of the loop", "ms", pauses).at_most(10.0),
    ]


def in_process(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """What stepping an engine through the in-process client adds to stepping it directly; of this process alone."""
    figures: list[Figure] = []
    for rows, logprobs, label in ((1, None, "1 request"), (256, None, "256 requests"), (256, 0, "256 rows of details")):
        steps = int(4000 * scale.work)
        added = [inproc.overhead(rows, steps, logprobs=logprobs) for _ in range(scale.rounds)]
        figures.append(
            Figure(f"in-process client: added to a step of {label}", "us", {"ours/asyncio": added}, digits=2)
        )
        figures[-1].at_most(20.0)
    return figures


def sync_client(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """The sync client beside its rival, which has no event loop; their processes are their own."""
    backends = [contestant.backend for contestant in contestants if contestant.name == "ours"]
    return sync.measure(backends, scale.rounds, scale.work)


def lifecycle(contestants: Sequence[Contestant], scale: Scale) -> list[Figure]:
    """Death, opening and closing, idling, memory; of ours alone."""
    ours = [contestant for contestant in contestants if contestant.name == "ours"]
    deaths = take_turns(ours, 3 if scale.few else scale.rounds, "death", waiters=1000)
    opening = take_turns(ours, scale.rounds, "open_and_close")
    return [
        Figure("SIGKILL to the last of 1,000 waiters", "ms", column(deaths, "told_ms")).at_most(50.0),
        Figure("open a scripted engine", "ms", column(opening, "open_ms"), digits=0).at_most(500.0),
        Figure("close it", "ms", column(opening, "close_ms"), digits=0).at_most(200.0),
        *_idle(ours, scale.idle),
        *_memory(ours[:1] if scale.few else ours),
        _imports(scale),
    ]


def _idle(ours: Sequence[Contestant], seconds: float) -> list[Figure]:
    before = {contestant.key: [cpu_seconds(pid) for pid in contestant.pids] for contestant in ours}
    started = time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - started
    after = {contestant.key: [cpu_seconds(pid) for pid in contestant.pids] for contestant in ours}
    figures: list[Figure] = []
    for index, name in enumerate(("client", "engine")):
        used = {key: [(after[key][index] - before[key][index]) / elapsed * 100] for key in before}
        figures.append(Figure(f"CPU of the idle {name}, {seconds:g} s", "%", used, digits=2).at_most(1.0))
    return figures


def _memory(ours: Sequence[Contestant]) -> list[Figure]:
    results: dict[str, list[dict[str, float]]] = {}
    for contestant in ours:
        # A process of its own: memory that earlier figures gave back would be taken first, and grow nothing.
        with Contestant("ours", contestant.backend) as fresh:
            results[contestant.key] = [fresh.run("memory", requests=10_000)]
    return [
        Figure("memory per live request at 10,000: RSS", "B", column(results, "rss_bytes"), digits=0).at_most(4096),
        Figure("memory per live request: tracemalloc", "B", column(results, "traced_bytes"), digits=0).at_most(4096),
    ]


def _imports(scale: Scale) -> Figure:
    taken = [_wall(IMPORT) - _wall(BARE) for _ in range(scale.rounds)]
    loaded = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True).stdout.strip()
    if loaded != "0":
        raise AssertionError("importing anyengine loads torch, transformers or numpy")
    return Figure("import anyengine with the client", "ms", {"ours/asyncio": taken}, digits=0).at_most(300.0)


def _wall(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - started) * 1e3


SUITES: dict[str, Callable[[Sequence[Contestant], Scale], list[Figure]]] = {
    "in_process": in_process,
    "sync_client": sync_client,
    "lifecycle": lifecycle,
    "latency": latency,
    "tensors": tensors,
    "churn": churn,
    "bursts": bursts,
    "throughput": throughput,
}
