"""The beginning and the end of an engine, and what a client costs that does nothing or holds many requests."""

from __future__ import annotations

import gc
import os
import signal
import time
import tracemalloc
from pathlib import Path

import anyio

from anyengine import EngineClient, EngineDeadError, EngineSpec, SamplingParams, open_engine_client
from benchmarks.throughput import Countdown
from benchmarks.watch import Watch

HELD = EngineSpec("benchmarks.engines:HeldEngine", {"vocab_size": 2**31})
SCRIPTED = EngineSpec("anyengine.engines.scripted:ScriptedEngine")


async def open_and_close() -> dict[str, float]:
    """Milliseconds that entering and leaving the block of a scripted engine take."""
    started = time.perf_counter()
    async with open_engine_client(SCRIPTED):
        opened = time.perf_counter()
        await anyio.sleep(0.05)
        leaving = time.perf_counter()
    closed = time.perf_counter()
    return {"open_ms": (opened - started) * 1e3, "close_ms": (closed - leaving) * 1e3}


async def death(waiters: int, watched: bool = False) -> dict[str, float]:
    """Milliseconds from SIGKILL to the moment at which the last of ``waiters`` tasks has its error.

    Half of them iterate over streams, half wait for utility calls; the error has left the request's block. If it is
    ``watched``, the loop's pauses meanwhile, too.
    """
    told: list[float] = []
    async with open_engine_client(HELD) as client:
        await client.call_utility("hold")
        ready, done = Countdown(waiters), Countdown(waiters)

        async def stream(row: int) -> None:
            try:
                async with client.open_request([row], SamplingParams(max_tokens=10)) as request:
                    ready.one()
                    await anext(request)
            except EngineDeadError:
                told.append(time.perf_counter())
                done.one()

        async def call() -> None:
            try:
                ready.one()
                await client.call_utility("never")
            except EngineDeadError:
                told.append(time.perf_counter())
                done.one()

        async with anyio.create_task_group() as group:
            for row in range(waiters // 2):
                group.start_soon(stream, row)
                group.start_soon(call)
            await ready.done.wait()
            await client.call_utility("echo", 0)
            watch = Watch(client.health().pid, looks=watched)
            async with watch:
                killed = time.perf_counter()
                os.kill(client.health().pid, signal.SIGKILL)
                await done.done.wait()
    return {"told_ms": (max(told) - killed) * 1e3, **watch.pauses()}


async def memory(client: EngineClient, requests: int) -> dict[str, float]:
    """Bytes per live request: growth of this process (RSS), and what Python allocated (tracemalloc).

    Each request has an id and sampling parameters of its own, has been entered, and waits for its first output.
    """
    await client.call_utility("hold")
    figures: dict[str, float] = {}
    for name in ("rss", "traced"):
        if name == "traced":
            tracemalloc.start()
        blocks = [
            client.open_request([1, 2, 3], SamplingParams(max_tokens=8), request_id=f"{name}-{number}")
            for number in range(100)
        ]
        for block in blocks:
            await block.__aenter__()
        await client.call_utility("echo", 0)
        gc.collect()
        before = _resident() if name == "rss" else tracemalloc.get_traced_memory()[0]
        for number in range(requests):
            block = client.open_request([1, 2, 3], SamplingParams(max_tokens=8), request_id=f"{name}-live-{number}")
            await block.__aenter__()
            blocks.append(block)
        await client.call_utility("echo", 0)
        gc.collect()
        after = _resident() if name == "rss" else tracemalloc.get_traced_memory()[0]
        figures[f"{name}_bytes"] = (after - before) / requests
        assert client.statistics().live_requests == len(blocks)
        if name == "traced":
            tracemalloc.stop()
        for block in blocks:
            await block.__aexit__(None, None, None)
    return figures


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
