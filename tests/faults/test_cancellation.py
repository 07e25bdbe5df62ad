"""Cancellation at every await, in numbers: nothing leaks, nothing hangs, and the engine goes on as before."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import anyio
import psutil
import pytest
from anyio.abc import TaskGroup
from tests.helpers import until

from anyengine import EngineClient, SamplingParams, open_engine_client
from anyengine.client.delivery import WAKE_AT_ONCE
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


def counts(client: EngineClient) -> tuple[int, ...]:
    statistics = client.statistics()
    return statistics.live_requests, statistics.aborting_requests, statistics.pending_calls, statistics.unread_outputs


async def start_a_crowd(client: EngineClient, group: TaskGroup) -> None:
    """1,024 tasks that each read a stream without an end."""

    async def read(start: int) -> None:
        async with client.open_request([start], SamplingParams(max_tokens=10**6)) as request:
            async for _ in request:
                pass

    for start in range(1024):
        group.start_soon(read, start)
    await until(lambda: client.statistics().live_requests == 1024)


async def test_a_thousand_streams_cancelled_together_five_times() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
        for _ in range(5):
            async with anyio.create_task_group() as group:
                await start_a_crowd(client, group)
                group.cancel_scope.cancel()
            # Leaving waits a second at most for the engine's word, which a busy machine may need more for.
            await until(lambda: counts(client) == (0, 0, 0, 0))
            await until(lambda: client.statistics().engine == {"running": 0, "waiting": 0})
        assert (await client.generate([1], SamplingParams(max_tokens=50))).token_ids == list(range(2, 52))


async def test_aborts_that_race_with_the_end() -> None:
    chance = random.Random(3)
    async with open_engine_client(scripted_spec()) as client:
        for _ in range(2000):
            handle = await client.add_request([0], SamplingParams(max_tokens=chance.randrange(1, 4)))
            if chance.random() < 0.5:
                await anyio.lowlevel.checkpoint()
            await client.abort_requests([handle, handle, handle + 1_000_000])
            while client.statistics().unread_outputs:
                await client.get_output()
        await until(lambda: counts(client)[:2] == (0, 0))
        assert client.health()
        assert (await client.generate([1], SamplingParams(max_tokens=2))).token_ids == [2, 3]


async def test_random_cancellation_everywhere() -> None:
    chance = random.Random(11)
    finished = cancelled = 0
    async with open_engine_client(scripted_spec(step_delay=0.0005, max_num_seqs=32)) as client:

        async def run(number: int) -> None:
            nonlocal finished, cancelled
            await anyio.sleep(chance.uniform(0, 0.5))
            with anyio.move_on_after(chance.choice([0, 0.0005, 0.005, 0.02, None])) as scope:
                match number % 3:
                    case 0:
                        length = chance.randrange(1, 40)
                        tokens = (await client.generate([number], SamplingParams(max_tokens=length))).token_ids
                        assert tokens == list(range(number + 1, number + 1 + length))
                    case 1:
                        assert await client.call_utility("echo", number) == number
                    case _:
                        async with client.open_request([number], SamplingParams(max_tokens=20)) as request:
                            tokens = [token async for output in request for token in output.token_ids]
                        assert tokens == list(range(number + 1, number + 21))
            finished += not scope.cancelled_caught
            cancelled += scope.cancelled_caught

        async with anyio.create_task_group() as group:
            for number in range(600):
                group.start_soon(run, number)
        await until(lambda: counts(client) == (0, 0, 0, 0))
    assert finished > 50
    assert cancelled > 50


async def test_a_request_cancelled_while_it_waits_is_never_run() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.005, max_num_seqs=1)) as client:
        async with client.open_request([0], SamplingParams(max_tokens=10**6)) as running:
            async with anyio.create_task_group() as group:
                group.start_soon(client.generate, [5])
                await until(lambda: client.statistics().engine == {"running": 1, "waiting": 1})
                group.cancel_scope.cancel()
            await until(lambda: client.statistics().engine == {"running": 1, "waiting": 0})
            # The one place is still taken, so the other has left the queue without ever having had it.
            tokens = (await anext(running)).token_ids
            assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
            assert (await anext(running)).token_ids[0] == tokens[-1] + 1


async def test_five_thousand_live_requests_take_no_descriptors_or_threads() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.05, max_num_seqs=10_000)) as client:
        before = psutil.Process().num_fds(), set(threading.enumerate())
        handles = [await client.add_request([0], SamplingParams(max_tokens=10**6)) for _ in range(5000)]
        assert client.statistics().live_requests == 5000
        assert psutil.Process().num_fds() == before[0]
        assert set(threading.enumerate()) <= before[1]  # one that idled since an earlier test may end
        await client.abort_requests(handles)
        await until(lambda: client.statistics().aborting_requests == 0)


async def test_one_long_step_does_not_hold_the_loop() -> None:
    """A thousand streams with a token each, and steps faster than they can be read: other tasks run in between.

    The promise is 10 ms, which the benchmark measures. What keeps it is that few readers have their turn at a time.
    """
    reads = 0
    in_a_turn: list[int] = []
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:

        async def run(start: int) -> None:
            nonlocal reads
            async with client.open_request([start], SamplingParams(max_tokens=10**6)) as request:
                async for _ in request:
                    reads += 1

        async with anyio.create_task_group() as group:
            for start in range(1000):
                group.start_soon(run, start)
            await until(lambda: client.statistics().live_requests == 1000)
            while reads < 5000:
                before = reads
                await anyio.sleep(0)
                in_a_turn.append(reads - before)
            group.cancel_scope.cancel()
    # Of two slices that meet in one turn, and on trio in any order.
    assert 0 < max(in_a_turn) <= 4 * WAKE_AT_ONCE


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancellation_aborts_too(anyio_backend: Any) -> None:
    """Servers on asyncio cancel tasks without AnyIO's scopes."""
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:

        async def run() -> None:
            async with client.open_request([0], SamplingParams(max_tokens=10**6)) as request:
                async for _ in request:
                    pass

        tasks = [asyncio.create_task(run()) for _ in range(50)]
        await until(lambda: client.statistics().live_requests == 50)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await until(lambda: counts(client) == (0, 0, 0, 0))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncio_timeout_and_wait_for(anyio_backend: Any) -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.generate([0], SamplingParams(max_tokens=10**6))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.call_utility("sleep_for", 0.3), 0.05)
        await until(lambda: counts(client) == (0, 0, 0, 0))
        assert await client.call_utility("echo", 1) == 1


async def test_an_iterator_wrapped_twice_aborts_when_the_outer_is_closed() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:

        async def inner() -> Any:
            async with client.open_request([0], SamplingParams(max_tokens=10**6)) as request:
                async for output in request:
                    yield output

        async def outer() -> Any:
            iterator = inner()
            try:
                async for output in iterator:
                    yield output
            finally:
                with anyio.CancelScope(shield=True):
                    await iterator.aclose()

        iterator = outer()
        await anext(iterator)
        await iterator.aclose()
        assert counts(client) == (0, 0, 0, 0)


@pytest.mark.parametrize("use_uvloop", [False, True])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
def test_cancellation_reaches_busy_streams(anyio_backend: Any, use_uvloop: bool) -> None:
    """Tokens that come in every turn of the loop must not keep a cancellation from being delivered."""

    async def main() -> float:
        async with open_engine_client(scripted_spec(step_delay=0.005)) as client:
            async with anyio.create_task_group() as group:
                await start_a_crowd(client, group)
                await until(lambda: client.health().steps > 20)
                group.cancel_scope.cancel()
                started = time.monotonic()
            return time.monotonic() - started

    assert anyio.run(main, backend_options={"use_uvloop": use_uvloop}) < 5


@pytest.mark.parametrize("streams", [65, 130])
@pytest.mark.parametrize(("backend", "options"), [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
def test_deadlines_of_streams_that_share_the_turns(
    anyio_backend: Any, backend: str, options: dict[str, Any], streams: int
) -> None:
    """More than are woken in one turn, of an engine that is faster: each reader's wait is over when it begins."""

    async def read(client: EngineClient) -> None:
        with anyio.move_on_after(0.5):
            async with client.open_request([0], SamplingParams(max_tokens=10**6)) as request:
                async for _ in request:
                    pass

    async def main() -> float:
        async with open_engine_client(scripted_spec()) as client:
            started = time.monotonic()
            async with anyio.create_task_group() as group:
                for _ in range(streams):
                    group.start_soon(read, client)
            return time.monotonic() - started

    assert 0.5 <= anyio.run(main, backend=backend, backend_options=options) < 10


async def test_a_deadline_ends_a_stream_that_is_never_idle() -> None:
    async with open_engine_client(scripted_spec()) as client:
        started = time.monotonic()
        with anyio.move_on_after(0.3) as scope:
            async with client.open_request([0], SamplingParams(max_tokens=10**9)) as request:
                async for _ in request:
                    pass
        assert scope.cancelled_caught
        assert time.monotonic() - started < 10


async def test_threads_of_the_application_do_not_hold_up_the_close() -> None:
    limiter = anyio.to_thread.current_default_thread_limiter()
    block = threading.Event()
    async with anyio.create_task_group() as group:
        async with open_engine_client(scripted_spec()) as client:
            for _ in range(int(limiter.total_tokens)):
                group.start_soon(anyio.to_thread.run_sync, block.wait)
            await until(lambda: limiter.available_tokens == 0)
            assert await client.call_utility("echo", 1) == 1
            started = time.monotonic()
        closing = time.monotonic() - started
        block.set()
    assert closing < 10
