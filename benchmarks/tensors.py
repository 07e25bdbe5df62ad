"""A large tensor in a request: the time from the call to the output that the engine computed from its last element."""

from __future__ import annotations

import itertools
import time

import numpy

from anyengine import EngineClient, SamplingParams
from benchmarks.baseline import BaselineClient

_ONE_TOKEN = SamplingParams(max_tokens=1)
_names = itertools.count()


def _embeds(mebibytes: int, last: int) -> numpy.ndarray:
    array = numpy.ones((mebibytes, 2**18), dtype=numpy.float32)
    array[-1, -1] = last
    return array


async def prompt_embeds(client: EngineClient, mebibytes: int, samples: int) -> list[float]:
    """Rates in GB/s."""
    rates: list[float] = []
    for number in range(samples):
        embeds = _embeds(mebibytes, number)
        started = time.perf_counter()
        completion = await client.generate(None, _ONE_TOKEN, prompt_embeds=embeds)
        rates.append(embeds.nbytes / (time.perf_counter() - started) / 1e9)
        assert completion.token_ids == [number + 1]
    return rates


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
