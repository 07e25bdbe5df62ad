"""How long one call takes while nothing else happens: a utility's round trip, a request to its first output."""

from __future__ import annotations

import itertools
import time

from anyengine import EngineClient, SamplingParams
from benchmarks.baseline import BaselineClient

_ONE_TOKEN = SamplingParams(max_tokens=1)
_names = itertools.count()


async def utility(client: EngineClient, samples: int) -> list[float]:
    """Round trips of ``echo``, in microseconds."""
    taken: list[float] = []
    for number in range(samples):
        started = time.perf_counter()
        answer = await client.call_utility("echo", number)
        taken.append((time.perf_counter() - started) * 1e6)
        assert answer == number
    return taken


async def utility_of_baseline(client: BaselineClient, samples: int) -> list[float]:
    """As :func:`utility`, of the rival."""
    taken: list[float] = []
    for number in range(samples):
        started = time.perf_counter()
        answer = await client.call_utility("echo", number)
        taken.append((time.perf_counter() - started) * 1e6)
        assert answer == number
    return taken


async def first_output(client: EngineClient, samples: int) -> list[float]:
    """From ``open_request`` to the first output, in microseconds."""
    taken: list[float] = []
    for number in range(samples):
        started = time.perf_counter()
        async with client.open_request([number], _ONE_TOKEN) as request:
            output = await anext(request)
            taken.append((time.perf_counter() - started) * 1e6)
            assert output.token_ids == [number + 1]
    return taken


async def first_output_of_baseline(client: BaselineClient, samples: int) -> list[float]:
    """As :func:`first_output`, of the rival."""
    taken: list[float] = []
    for number in range(samples):
        started = time.perf_counter()
        collector = await client.open_stream(f"first-{next(_names)}", [number], 1)
        (output,) = await collector.get()
        taken.append((time.perf_counter() - started) * 1e6)
        assert output.new_token_ids == [number + 1]
    return taken
