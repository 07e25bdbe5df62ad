"""Every await can be cancelled, before it waits, while it waits and as it ends, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint
from tests.contract.clients import Opener, needs
from tests.contract.steps import FOREVER, ONE, eventually, nothing_is_left, nothing_waits, work_on

from anyengine import EngineClient, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing"), needs("cancel", "options")]

TURNS = (0, 1, 2, 3, 4, 6, 9, 14, 30, None)
"""Turns of the loop after which the await is cancelled; with None it waits for something by then."""


async def stream(client: EngineClient) -> None:
    async with client.open_request([0], FOREVER) as request:
        async for _ in request:
            pass


async def slow_reader(client: EngineClient) -> None:
    async with client.open_request([0], FOREVER, request_id="slow") as request:
        await anext(request)
        await anyio.sleep_forever()


async def completion(client: EngineClient) -> None:
    async with client.open_request([0], FOREVER) as request:
        await request.completion()


async def generate(client: EngineClient) -> None:
    await client.generate([0], FOREVER, request_id="mine")


async def short(client: EngineClient) -> None:
    while True:
        await client.generate([0], ONE, request_id="mine")


async def add(client: EngineClient) -> None:
    while True:
        handle = await client.add_request([0] * 100_000, FOREVER)
        with anyio.CancelScope(shield=True):
            await client.abort_requests([handle])


async def get_output(client: EngineClient) -> None:
    while True:
        await client.get_output()


async def abort(client: EngineClient) -> None:
    while True:
        await client.abort_requests([12345])


async def call(client: EngineClient) -> None:
    while True:
        await client.call_utility("echo", b"x" * 1000)


async def slow_call(client: EngineClient) -> None:
    await client.call_utility("sleep_for", 0.03, timeout=60)


async def pause(client: EngineClient) -> None:
    async with client.open_request([0], FOREVER) as request:
        await anext(request)
        await client.pause_scheduler("wait")


async def held(client: EngineClient) -> None:
    await client.pause_scheduler()
    await client.generate([0], ONE)


async def turn(client: EngineClient) -> None:
    async with client.open_request([0], FOREVER), client.open_request([0], FOREVER):
        await client.generate([0], ONE)


async def wait_dead(client: EngineClient) -> None:
    await client.wait_dead()


AWAITS: list[Callable[[EngineClient], Awaitable[None]]] = [
    stream,
    slow_reader,
    completion,
    generate,
    short,
    add,
    get_output,
    abort,
    call,
    slow_call,
    pause,
    held,
    turn,
    wait_dead,
]


@pytest.mark.parametrize("wait", AWAITS, ids=lambda wait: wait.__name__)
async def test_nothing_is_left_of_an_await_that_was_cancelled(
    wait: Callable[[EngineClient], Awaitable[None]], open_client: Opener
) -> None:
    async with open_client({"step_delay": 0.0005}, max_requests=2, when_full="wait") as client:
        for turns in TURNS:
            with anyio.fail_after(30):
                async with anyio.create_task_group() as group:
                    group.start_soon(wait, client)
                    if turns is None:
                        await anyio.sleep(0.02)
                    for _ in range(turns or 0):
                        await checkpoint()
                    group.cancel_scope.cancel()
                assert client.statistics().live_requests == client.statistics().pending_calls == 0
                await client.resume_scheduler()
        await eventually(lambda: nothing_is_left(client))
        await work_on(client)


async def test_an_await_that_is_cancelled_beforehand_sends_nothing(open_client: Opener) -> None:
    async with open_client({"step_delay": 0.0005}, max_requests=2) as client:
        before = await client.add_request([0], ONE)
        for wait in AWAITS:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await wait(client)
            assert scope.cancelled_caught, wait.__name__
        assert await client.add_request([0], ONE) == before + 1
        assert not await client.is_scheduler_paused()


async def test_a_cancelled_reader_takes_nothing_from_the_next(open_client: Opener) -> None:
    """No step is lost, however often ``get_output`` is cancelled."""
    tokens: list[int] = []
    cancelled = 0
    async with open_client({"step_delay": 0.0005}) as client:
        await client.add_request([0], SamplingParams(max_tokens=300))
        for turns in range(10_000):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def cancel(scope: anyio.CancelScope = scope, turns: int = turns) -> None:
                        for _ in range(turns % 7):
                            await checkpoint()
                        scope.cancel()

                    group.start_soon(cancel)
                    tokens += (await client.get_output()).token_ids
            cancelled += scope.cancelled_caught
            if len(tokens) == 300:
                break
    assert tokens == list(range(1, 301))
    assert cancelled


async def test_a_cancelled_block_ends_its_engine(open_client: Opener) -> None:
    with anyio.CancelScope() as scope:
        async with open_client({"step_delay": 0.0005}) as client:
            async with anyio.create_task_group() as group:
                for wait in (stream, generate, get_output, slow_call, wait_dead):
                    group.start_soon(wait, client)
                await anyio.sleep(0.01)
                scope.cancel()
    assert scope.cancelled_caught
    assert client.health().state == "closed"
    assert nothing_waits(client)
