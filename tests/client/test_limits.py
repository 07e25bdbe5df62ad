"""How many requests may live at a time, and how long a request may go without a sign."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest
from tests.helpers import until

from anyengine import (
    EngineClient,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    RequestStalledError,
    SamplingParams,
    TooManyRequestsError,
    open_engine_client,
)
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

FOREVER = SamplingParams(max_tokens=10_000_000)
ONE = SamplingParams(max_tokens=1)


async def test_one_request_too_many_is_refused_at_the_call() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.005), max_requests=100) as client:
        handles = [await client.add_request([0], FOREVER) for _ in range(100)]
        for attempt in (lambda: client.generate([0]), lambda: client.add_request([0])):
            with pytest.raises(TooManyRequestsError, match="100 live requests") as caught:
                await attempt()
            assert caught.value.limit == 100
            assert isinstance(caught.value, RequestError) and not isinstance(caught.value, ValueError)
        with pytest.raises(TooManyRequestsError, match="max_requests"):
            client.open_request([0])
        assert await client.call_utility("echo", 1) == 1  # calls are no requests
        # A cancelled one makes room at once, before the engine has said anything about it.
        await client.abort_requests(handles[:1])
        assert (await client.generate([0], ONE)).token_ids == [1]
        await client.abort_requests(handles)
        assert client.statistics().live_requests == 0


async def test_leaving_a_stream_makes_room() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.005), max_requests=1) as client:
        for _ in range(5):
            async with client.open_request([0], FOREVER) as request:
                await anext(request)
                with pytest.raises(TooManyRequestsError):
                    client.open_request([1])


async def test_requests_wait_for_their_turn_in_order() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001), max_requests=2, when_full="wait") as client:
        holders = [await client.add_request([0], FOREVER) for _ in range(2)]
        done: list[int] = []

        async def generate(start: int) -> None:
            assert (await client.generate([start], ONE)).token_ids == [start + 1]
            done.append(start)

        async with anyio.create_task_group() as group:
            for start in range(10):
                group.start_soon(generate, start)
                await until(lambda expected=start + 1: client.statistics().waiting_requests == expected)  # type: ignore[misc]
            assert client.statistics().live_requests == 2
            await client.abort_requests(holders[:1])
            await until(lambda: len(done) == 10)
            await client.abort_requests(holders)
        assert done == list(range(10))
        assert client.statistics().waiting_requests == 0


async def test_never_more_than_the_limit_live() -> None:
    async with open_engine_client(scripted_spec(), max_requests=3, when_full="wait") as client:
        most = 0

        async def generate(start: int) -> None:
            nonlocal most
            async with client.open_request([start], SamplingParams(max_tokens=5)) as request:
                most = max(most, client.statistics().live_requests)
                await request.completion()

        async with anyio.create_task_group() as group:
            for start in range(100):
                group.start_soon(generate, start)
        assert 1 <= most <= 3


async def test_a_turn_that_is_cancelled_passes_to_the_next() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001), max_requests=1, when_full="wait") as client:
        holder = await client.add_request([0], FOREVER)
        scopes: list[anyio.CancelScope] = []
        done: list[int] = []

        async def generate(start: int) -> None:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await client.generate([start], ONE)
                done.append(start)

        async with anyio.create_task_group() as group:
            for start in range(4):
                group.start_soon(generate, start)
                await until(lambda expected=start + 1: client.statistics().waiting_requests == expected)  # type: ignore[misc]
            scopes[1].cancel()
            await until(lambda: client.statistics().waiting_requests == 3)
            await client.abort_requests([holder])
            scopes[0].cancel()  # in the moment in which its turn came
            await until(lambda: len(done) == 2)
        assert done == [2, 3]
        assert client.statistics().waiting_requests == client.statistics().live_requests == 0


@pytest.mark.parametrize("ending", ["death", "close"])
async def test_who_waits_for_a_turn_learns_of_the_end(ending: str) -> None:
    errors: list[Exception] = []

    async def wait(client: EngineClient) -> None:
        with pytest.raises((EngineDeadError, EngineClosedError)) as caught:
            await client.generate([0])
        errors.append(caught.value)

    async with anyio.create_task_group() as group:
        async with open_engine_client(scripted_spec(step_delay=0.001), max_requests=1, when_full="wait") as client:
            await client.add_request([0], FOREVER)
            for _ in range(3):
                group.start_soon(wait, client)
            await until(lambda: client.statistics().waiting_requests == 3)
            if ending == "death":
                with pytest.raises(EngineDeadError):
                    await client.call_utility("exit", 3)
    assert [type(error) for error in errors] == [EngineDeadError if ending == "death" else EngineClosedError] * 3


async def test_a_request_that_stalls_fails_alone() -> None:
    async with open_engine_client(scripted_spec(max_num_seqs=1, step_delay=0.001)) as client:
        await client.call_utility("freeze", 0.0, False)
        running = await client.add_request([0], FOREVER)  # takes the only slot, so the others wait in the engine
        with pytest.raises(RequestStalledError, match=r"nothing came of it for 0\.2 s, its stall_limit"):
            await client.generate([1], ONE, stall_limit=0.2)
        with pytest.raises(RequestStalledError):
            async with client.open_request([1], ONE, stall_limit=0.2) as request:
                async for _ in request:
                    pass
        assert client.statistics().live_requests == 1
        await until(lambda: client.statistics().aborting_requests == 0)
        await client.abort_requests([running])
        assert (await client.generate([1], ONE, stall_limit=5)).token_ids == [2]


async def test_a_slow_request_does_not_stall() -> None:
    """The limit is for the time between two signs, not for the whole."""
    async with open_engine_client(scripted_spec(step_delay=0.05)) as client:
        params = SamplingParams(max_tokens=15)
        completion = await client.generate([0], params, stall_limit=0.6)
        assert completion.token_ids == list(range(1, 16))
        async with client.open_request([0], params, stall_limit=0.6) as request:
            assert [token async for output in request for token in output.token_ids] == list(range(1, 16))


async def test_a_stalled_stream_gives_what_came_first_and_stays_stalled() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
        async with client.open_request([0], FOREVER, stall_limit=0.5) as request:
            first = await anext(request)
            assert first.token_ids[0] == 1
            await client.call_utility("freeze", 2.0, False)
            with pytest.raises(RequestStalledError):
                async for _ in request:
                    pass
            with pytest.raises(RequestStalledError):
                await anext(request)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_requests": 0}, ValueError, "max_requests=0"),
        ({"max_requests": -1}, ValueError, "max_requests=-1"),
        ({"max_requests": 2.5}, TypeError, "max_requests=2.5"),
        ({"max_requests": True}, TypeError, "max_requests=True"),
        ({"when_full": "queue"}, ValueError, "when_full='queue'"),
    ],
)
def test_limits_are_checked(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_engine_client(scripted_spec(), **options)


async def test_stall_limits_are_checked() -> None:
    async with open_engine_client(scripted_spec()) as client:
        with pytest.raises(ValueError, match="stall_limit=0"):
            client.open_request([0], stall_limit=0)
        with pytest.raises(TypeError, match="stall_limit='1'"):
            await client.generate([0], stall_limit="1")  # type: ignore[arg-type]


async def test_aborted_requests_count_until_the_engine_has_let_go_of_them() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001), max_requests=3) as client:
        handles = [await client.add_request([1], SamplingParams(max_tokens=10**6)) for _ in range(3)]
        await client.get_output()
        pid = client.health().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await client.abort_requests(handles)  # returns all the same
            assert client.statistics().aborting_requests == 3
            with pytest.raises(TooManyRequestsError, match="aborted ones count until the engine lets go of them"):
                await client.add_request([1])
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: client.statistics().aborting_requests == 0)
        (handle,) = [await client.add_request([1], SamplingParams(max_tokens=10**6))]
        await client.abort_requests([handle])
        assert client.statistics().aborting_requests == 0
