"""A large tensor in a request: the time from the call to the output that the engine computed from its last element."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import numpy

from anyengine import EngineClient, SamplingParams
from anyengine.client import staging
from benchmarks.baseline import BaselineClient
from benchmarks.watch import Watch

_ONE_TOKEN = SamplingParams(max_tokens=1)
_names = itertools.count()


def _embeds(mebibytes: int, last: int) -> numpy.ndarray:
    array = numpy.ones((mebibytes, 2**18), dtype=numpy.float32)
    array[-1, -1] = last
    return array


async def prompt_embeds(client: EngineClient, mebibytes: int, samples: int) -> list[float]:
    """Rates in GB/s."""
    return [await _rate(client, _embeds(mebibytes, number), number) for number in range(samples)]


async def prompt_embeds_in_frames(client: EngineClient, mebibytes: int, samples: int) -> list[float]:
    """As :func:`prompt_embeds`, with the lane closed to arrays of any size."""
    limit, staging.LANE_LIMIT = staging.LANE_LIMIT, sys.maxsize
    try:
        return await prompt_embeds(client, mebibytes, samples)
    finally:
        staging.LANE_LIMIT = limit


async def prompt_embeds_in_shared_storage(client: EngineClient, mebibytes: int, samples: int) -> list[float]:
    """As :func:`prompt_embeds`, of tensors that torch has in shared memory."""
    import torch

    tensors = [torch.from_numpy(_embeds(mebibytes, number)).share_memory_() for number in range(samples)]
    return [await _rate(client, tensor, number) for number, tensor in enumerate(tensors)]


async def longest_pause(client: EngineClient, mebibytes: int, samples: int) -> float:
    """The longest pause of the event loop in milliseconds while tensors are arguments of utility calls."""
    arrays = [_embeds(mebibytes, number) for number in range(samples)]
    async with Watch(client.health().pid) as watch:
        for array in arrays:
            await client.call_utility("take", array)
    return watch.pause * 1e3


async def _rate(client: EngineClient, embeds: Any, number: int) -> float:
    started = time.perf_counter()
    completion = await client.generate(None, _ONE_TOKEN, prompt_embeds=embeds)
    seconds = time.perf_counter() - started
    assert completion.token_ids == [number + 1]
    return embeds.nbytes / seconds / 1e9


async def prompt_embeds_of_baseline(client: BaselineClient, mebibytes: int, samples: int) -> list[float]:
    """As :func:`prompt_embeds`, of the rival."""
    rates: list[float] = []
    for number in range(samples):
        embeds = _embeds(mebibytes, number)
        started = time.perf_counter()
        collector = await client.open_stream(f"embeds-{next(_names)}", None, 1, embeds)
        (output,) = await collector.get()
        rates.append(embeds.nbytes / (time.perf_counter() - started) / 1e9)
        assert output.new_token_ids == [number + 1]
    return rates
