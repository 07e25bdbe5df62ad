"""Every way to run an event loop: AnyIO's, trio's, asyncio's and uvloop's own entry points."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import trio
import uvloop

from anyengine import EngineDeadError, SamplingParams, open_engine_client
from anyengine.testing import scripted_spec

pytestmark = pytest.mark.usefixtures("leaves_nothing")

RUNNERS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "anyio on asyncio": lambda main: anyio.run(main),
    "anyio on uvloop": lambda main: anyio.run(main, backend_options={"use_uvloop": True}),
    "anyio on trio": lambda main: anyio.run(main, backend="trio"),
    "asyncio": lambda main: asyncio.run(main()),
    "asyncio, debug": lambda main: asyncio.run(main(), debug=True),
    "uvloop": lambda main: uvloop.run(main()),
    "trio": lambda main: trio.run(main),
}


async def trio_within() -> None:
    """As a cell of a notebook does, which is a task of asyncio."""
    trio.run(serve_a_little)


async def serve_a_little() -> None:
    async with open_engine_client(scripted_spec()) as client:
        assert (await client.generate([1], SamplingParams(max_tokens=3))).token_ids == [2, 3, 4]
        assert await client.call_utility("echo", 1) == 1


def test_trio_in_a_task_of_asyncio() -> None:
    asyncio.run(trio_within())


@pytest.mark.parametrize("runner", RUNNERS)
def test_streams_calls_cancellation_and_death(runner: str) -> None:
    told: list[str] = []

    async def main() -> None:
        async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
            async with client.open_request([1], SamplingParams(max_tokens=20)) as request:
                assert [token async for output in request for token in output.token_ids] == list(range(2, 22))
            assert await client.call_utility("echo", "hello", timeout=5) == "hello"
            with anyio.move_on_after(0.05) as scope:
                await client.generate([1], SamplingParams(max_tokens=10**6))
            assert scope.cancelled_caught
            assert client.statistics().live_requests == client.statistics().aborting_requests == 0
            async with client.open_request([1], SamplingParams(max_tokens=10**6)) as request:
                await anext(request)
                os.kill(client.health().pid, signal.SIGKILL)
                try:
                    async for _ in request:
                        pass
                except EngineDeadError as error:
                    told.append(str(error))

    for _ in range(2):  # two loops, one after the other
        RUNNERS[runner](main)
    assert len(told) == 2
    assert all("SIGKILL" in text for text in told)
