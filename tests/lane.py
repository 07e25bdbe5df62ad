"""What the tests of the lane use: tensors that go by it, and looks at who has them."""

from __future__ import annotations

import numpy
from tests.client.lane_engine import figures
from tests.helpers import until

from anyengine import EngineClient, SamplingParams
from anyengine.process.lane import Lane

SIZE = 2**20
"""Bytes that go by the lane."""

ONE_TOKEN = SamplingParams(max_tokens=1)


def large(number: int, size: int = SIZE) -> numpy.ndarray:
    """An array of this size, different for each number."""
    return numpy.random.default_rng(number).integers(0, 2**62, (4, size // 32))


def lane_of(client: EngineClient) -> Lane:
    lane = client._session.link.lane
    assert lane is not None
    return lane


def passed(client: EngineClient) -> int:
    """How many tensors have gone by the lane."""
    return lane_of(client)._sent


def lent(client: EngineClient) -> int:
    """How many blocks the engine has of those that are to come back."""
    pool = lane_of(client).pool
    with pool._lock:
        pool._sort()
    return len(pool._lent)


async def is_free(client: EngineClient) -> None:
    """Return when the engine has no tensor any more, and the client none that it could not use again."""
    engine = client.health().pid
    await until(lambda: figures(engine)["tensor_mappings"] == figures(engine)["tensor_descriptors"] == 0)
    await until(lambda: lent(client) == 0)
