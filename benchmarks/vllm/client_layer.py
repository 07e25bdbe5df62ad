"""What both clients are asked to do, besides what :mod:`benchmarks.throughput` and :mod:`benchmarks.latency` have.

Both hand out whole steps here (``get_output``), so that a layer is compared with a layer; a request is sent, an output
taken, a tensor sent, the engine killed, started and stopped. Each function of ours has its twin for the rival.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import anyio
import torch

from anyengine import EngineClient, EngineDeadError, EngineSpec, SamplingParams, open_engine_client
from benchmarks.churn import Churn, check_last, streams_of
from benchmarks.stamps import age
from benchmarks.throughput import SPREAD

if TYPE_CHECKING:  # the process in which anyengine is measured does not load vLLM
    from benchmarks.vllm.rival import AsyncRival, StreamingRival

HELD = EngineSpec("benchmarks.engines:HeldEngine", {"vocab_size": 2**31})
_ONE_TOKEN = SamplingParams(max_tokens=1)
_names = itertools.count()


# ---- a request to its first output ----


async def first_output(client: EngineClient, samples: int) -> list[float]:
    """Microseconds from ``add_request`` to what ``get_output`` returns."""
    taken: list[float] = []
    for number in range(samples):
        started = time.perf_counter()
        await client.add_request([number], _ONE_TOKEN)
        outputs = await client.get_output()
        taken.append((time.perf_counter() - started) * 1e6)
        assert list(outputs.token_ids) == [number + 1]
    return taken


async def first_output_of_rival(client: AsyncRival, samples: int) -> list[float]:
    """As :func:`first_output`."""
    taken: list[float] = []
    for number in range(samples):
        started = time.perf_counter()
        await client.add_request(f"first-{next(_names)}", [number], 1)
        (output,) = (await client.get_output()).outputs
        taken.append((time.perf_counter() - started) * 1e6)
        assert output.new_token_ids == [number + 1]
    return taken


# ---- steps at a pace ----


async def paced(client: EngineClient, rows: int, rate: float, steps: int) -> dict[str, Any]:
    """``rate`` steps a second, as engines make them: each step's delay in us, and the client's CPU time for a step.

    The delay is that from the end of the engine's step to the application. A last step, in which all requests end at
    once, is taken and not measured: in a served batch they end one by one.
    """
    await client.call_utility("hold")
    params = SamplingParams(max_tokens=steps + 1)
    for row in range(rows):
        await client.add_request([row * SPREAD], params)
    delays: list[float] = []
    gc.collect()
    cpu = time.process_time()
    await client.call_utility("release", 1 / rate)
    for step in range(1, steps + 1):
        outputs = await client.get_output()
        delays.append(age(outputs.token_ids[0]))
        if len(outputs.handles) != rows or (rows > 1 and outputs.token_ids[-1] != (rows - 1) * SPREAD + step):
            raise AssertionError(f"step {step} of {steps} has {len(outputs.handles)} rows, {outputs.token_ids[-1]}")
    cpu = time.process_time() - cpu
    outputs = await client.get_output()
    if set(outputs.details) != set(range(rows)):
        raise AssertionError(f"{len(outputs.details)} of {rows} requests ended")
    return {"delays": delays, "cpu_us": cpu / steps * 1e6}


async def paced_of_rival(client: AsyncRival, rows: int, rate: float, steps: int) -> dict[str, Any]:
    """As :func:`paced`."""
    await client.call_utility("hold")
    for row in range(rows):
        await client.add_request(f"paced-{next(_names)}", [row * SPREAD], steps + 1)
    delays: list[float] = []
    gc.collect()
    cpu = time.process_time()
    await client.call_utility("release", 1 / rate)
    for step in range(1, steps + 1):
        outputs = (await client.get_output()).outputs
        delays.append(age(outputs[0].new_token_ids[0]))
        if len(outputs) != rows or (rows > 1 and outputs[-1].new_token_ids[-1] != (rows - 1) * SPREAD + step):
            raise AssertionError(f"step {step} of {steps} has {len(outputs)} rows, {outputs[-1].new_token_ids[-1]}")
    cpu = time.process_time() - cpu
    outputs = (await client.get_output()).outputs
    if sum(output.finish_reason is not None for output in outputs) != rows:
        raise AssertionError(f"not all of {rows} requests ended")
    return {"delays": delays, "cpu_us": cpu / steps * 1e6}


# ---- requests that come and go ----


async def churn_streams_of_rival(rival: StreamingRival, rows: int, rate: float, steps: int) -> dict[str, float]:
    """As :func:`benchmarks.churn.streams`."""

    async def read(churn: Churn) -> None:
        while not churn.over:
            token, (first, length) = -1, churn.next()
            outputs = rival.stream(f"churn-{next(_names)}", [first], length)
            churn.begun()
            async for output in outputs:
                tokens = output.outputs[0].token_ids
                churn.seen += len(tokens)
                token = tokens[-1]
            check_last(token, first, length)

    return await streams_of(rival.call_utility, rival.process.pid, read, rows, rate, steps)


# ---- tensors ----


def _embeds(mebibytes: int, last: int) -> torch.Tensor:
    tensor = torch.ones((mebibytes, 2**18), dtype=torch.float32)
    tensor[-1, -1] = last
    return tensor


async def prompt_embeds(client: EngineClient, mebibytes: int, samples: int) -> list[float]:
    """Rates in GB/s, until the output is there that the engine computed from the tensor's last element."""
    rates: list[float] = []
    for number in range(samples):
        embeds = _embeds(mebibytes, number)
        started = time.perf_counter()
        await client.add_request(None, _ONE_TOKEN, prompt_embeds=embeds)
        outputs = await client.get_output()
        rates.append(embeds.nbytes / (time.perf_counter() - started) / 1e9)
        assert list(outputs.token_ids) == [number + 1]
    return rates


async def prompt_embeds_of_rival(client: AsyncRival, mebibytes: int, samples: int) -> list[float]:
    """As :func:`prompt_embeds`."""
    rates: list[float] = []
    for number in range(samples):
        embeds = _embeds(mebibytes, number)
        started = time.perf_counter()
        await client.add_request(f"embeds-{next(_names)}", None, 1, embeds)
        (output,) = (await client.get_output()).outputs
        rates.append(embeds.nbytes / (time.perf_counter() - started) / 1e9)
        assert output.new_token_ids == [number + 1]
    return rates


# ---- beginnings and ends ----


async def lifecycle() -> dict[str, float]:
    """Milliseconds to start a model-less engine, to stop it, and from SIGKILL to the error in ``get_output``."""
    started = time.perf_counter()
    async with open_engine_client(HELD) as client:
        opened = time.perf_counter()
        await client.call_utility("echo", 0)
        await anyio.sleep(0.05)
        leaving = time.perf_counter()
    closed = time.perf_counter()
    async with open_engine_client(HELD) as client:
        await client.call_utility("hold")
        await client.add_request([1], SamplingParams(max_tokens=10))
        async with anyio.create_task_group() as group:
            group.start_soon(_kill, client.health().pid)
            try:
                await client.get_output()
            except EngineDeadError:
                told = time.monotonic()
    return {
        "start_ms": (opened - started) * 1e3,
        "stop_ms": (closed - leaving) * 1e3,
        "death_ms": (told - _killed_at) * 1e3,
    }


async def lifecycle_of_rival() -> dict[str, float]:
    """As :func:`lifecycle`."""
    from benchmarks.vllm.rival import AsyncRival, RivalDeadError

    started = time.perf_counter()
    client = AsyncRival()
    opened = time.perf_counter()
    await client.call_utility("echo", 0)
    await anyio.sleep(0.05)
    leaving = time.perf_counter()
    client.shutdown()
    closed = time.perf_counter()
    client = AsyncRival()
    await client.call_utility("hold")
    await client.add_request("killed", [1], 10)
    async with anyio.create_task_group() as group:
        group.start_soon(_kill, client.process.pid)
        try:
            await client.get_output()
        except RivalDeadError:
            told = time.monotonic()
    client.shutdown()
    return {
        "start_ms": (opened - started) * 1e3,
        "stop_ms": (closed - leaving) * 1e3,
        "death_ms": (told - _killed_at) * 1e3,
    }


_killed_at = 0.0


async def _kill(pid: int) -> None:
    global _killed_at
    await anyio.sleep(0.05)
    _killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
