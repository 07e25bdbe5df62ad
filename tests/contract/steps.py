"""What the tests of every kind do: wait, look whether anything is left, read a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers import until

from anyengine import EngineClient, RequestOutput, SamplingParams

FOREVER = SamplingParams(max_tokens=10_000_000)
ONE = SamplingParams(max_tokens=1)


async def eventually(condition: Callable[[], object]) -> None:
    """Return when ``condition()`` is true. The limit is for busy machines: no promise is measured by it."""
    await until(condition, 30)


def nothing_is_left(client: EngineClient) -> bool:
    """Whether nothing of any request or call is left in a table, on this side and as the engine last said on its."""
    found = client.statistics()
    return not any(
        (
            found.live_requests,
            found.aborting_requests,
            found.pending_calls,
            found.unread_outputs,
            found.waiting_requests,
            found.tracked_buffers,
            *found.engine.values(),
        )
    )


def nothing_waits(client: EngineClient) -> bool:
    """Whether this side's tables are empty; the last figures of an engine that is gone stay as they were."""
    found = client.statistics()
    return not (found.live_requests or found.aborting_requests or found.pending_calls or found.waiting_requests)


async def is_quiet(client: EngineClient) -> bool:
    """Whether the engine makes no step; the rows of one would come before the answer of a later call."""
    counts: list[int] = []
    for _ in range(2):
        for number in range(10):
            await client.call_utility("echo", number)
        counts.append(client.health().steps)
    return counts[0] == counts[1]


async def read(request: Any) -> list[RequestOutput]:
    """Every output of a request to its end."""
    return [output async for output in request]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    """Their tokens."""
    return [token for output in outputs for token in output.token_ids]


async def work_on(client: EngineClient, start: int = 0) -> None:
    """The engine serves: a request runs to its end."""
    assert (await client.generate([start], SamplingParams(max_tokens=3))).token_ids == [start + 1, start + 2, start + 3]
