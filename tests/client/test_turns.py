"""Bursts: many requests that begin or end at one moment are spread over turns of the event loop, and none is lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint
from tests.helpers import until

import anyengine.frames
from anyengine import EngineClient, EngineClosedError, EngineDeadError, SamplingParams, open_engine_client
from anyengine.client.engine_client import session_of
from anyengine.client.turns import AT_ONCE, Turns
from anyengine.protocol.requests import Abort
from anyengine.testing import scripted_spec
from anyengine.transport.wakeup import run_soon_function, wakeup_type

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

BURST = 500
LONG = SamplingParams(max_tokens=1_000_000)


class Ticks:
    """Counts what happens in each turn of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self.over = False
        self.events: Counter[int] = Counter()
        self._run_soon = run_soon_function()
        self._tick()

    def _tick(self) -> None:
        self.number += 1
        if not self.over:
            self._run_soon(self._tick)

    def note(self) -> None:
        self.events[self.number] += 1

    def check(self, count: int) -> None:
        """``count`` events, of which no turn had more than it may.

        On trio the tick has no fixed place in its turn, and one turn may have some that wait for a second one.
        """
        assert self.events.total() == count
        assert max(self.events.values()) <= 3 * AT_ONCE


@contextmanager
def ticking() -> Generator[Ticks]:
    ticks = Ticks()
    try:
        yield ticks
    finally:
        ticks.over = True


def exhaust(turns: Turns) -> None:
    while turns.take():
        pass


async def test_turns_are_given_in_order_and_so_many_at_once() -> None:
    turns = Turns(wakeup_type())
    order: list[int] = []
    with ticking() as ticks:
        for number in range(BURST):
            turns.call(lambda number=number: (order.append(number), ticks.note()))
        assert len(order) == AT_ONCE  # the first ones need not wait
        await until(lambda: len(order) == BURST)
    assert order == list(range(BURST))
    ticks.check(BURST)


async def test_who_comes_later_does_not_overtake() -> None:
    turns = Turns(wakeup_type())
    order: list[str] = []
    exhaust(turns)
    turns.call(lambda: order.append("first"))
    turns.call_next(lambda: order.append("next"))
    assert not turns.take()
    turns.call(lambda: order.append("second"))
    assert order == []
    await until(lambda: len(order) == 3)
    assert order == ["next", "first", "second"]


async def test_a_cancelled_wait_holds_up_nobody() -> None:
    turns = Turns(wakeup_type())
    exhaust(turns)
    passed = anyio.Event()

    async def wait() -> None:
        await turns.wait()
        passed.set()

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await turns.wait()  # on asyncio the turn may come first
        group.start_soon(wait)
        with anyio.fail_after(10):
            await passed.wait()


async def test_many_streams_opened_ended_and_aborted_at_once() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.01)) as client:
        with ticking() as opening, ticking() as ending, ticking() as leaving:

            async def run(row: int) -> None:
                async with client.open_request([row], SamplingParams(max_tokens=1)) as request:
                    opening.note()
                    async for _ in request:
                        pass
                ending.note()
                try:
                    async with client.open_request([row], LONG) as request:
                        async for _ in request:
                            pass
                finally:
                    leaving.note()

            async with anyio.create_task_group() as group:
                for row in range(BURST):
                    group.start_soon(run, row)
                await until(lambda: client.statistics().live_requests == BURST and ending.events.total() == BURST)
                group.cancel_scope.cancel()
        for ticks in (opening, ending, leaving):
            ticks.check(BURST)
        statistics = client.statistics()
        assert (statistics.live_requests, statistics.aborting_requests) == (0, 0)
        assert (await client.generate([1], SamplingParams(max_tokens=2))).token_ids == [2, 3]


async def test_streams_left_at_once_are_aborted_by_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = anyengine.frames.send_copied

    def count(socket: object, message: list[bytes]) -> None:
        if message[1] == Abort.KIND:
            sent.append(len(Abort.decode(bytes(message[2]), ()).handles))
        send(socket, message)  # type: ignore[arg-type]

    async with open_engine_client(scripted_spec(step_delay=0.01)) as client:
        monkeypatch.setattr(anyengine.frames, "send_copied", count)
        entered: list[int] = []

        async def run(row: int) -> None:
            async with client.open_request([row], LONG):
                entered.append(row)
                await anyio.sleep_forever()

        async with anyio.create_task_group() as group:
            for row in range(BURST):
                group.start_soon(run, row)
            await until(lambda: len(entered) == BURST)
            group.cancel_scope.cancel()
        assert client.statistics().aborting_requests == 0
        assert sum(sent) == BURST and len(sent) < BURST // 10


async def test_a_request_that_ends_before_it_is_aborted_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine_client(scripted_spec(step_delay=0.05)) as client:
        session = session_of(client)
        postponed: list[object] = []
        monkeypatch.setattr(session.turns, "call_next", postponed.append)
        monkeypatch.setattr("anyengine.client.request_stream.RELEASE_LIMIT", 600)
        with anyio.fail_after(30):
            async with client.open_request([1], SamplingParams(max_tokens=2)):
                exhaust(session.turns)
        assert len(postponed) == 1  # it was not sent: the end came first, and no limit of time had to pass
        assert client.statistics().live_requests == 0
        session._abort_leaving()  # pyright: ignore[reportPrivateUsage] - the turn that was postponed
        assert client.statistics().aborting_requests == 0
        assert (await client.generate([1], SamplingParams(max_tokens=2))).token_ids == [2, 3]


async def test_a_death_is_told_to_many_in_turns() -> None:
    told: list[object] = []
    entered: list[int] = []
    async with open_engine_client(scripted_spec(step_delay=0.01), max_requests=BURST, when_full="wait") as client:
        with ticking() as ticks:

            async def stream(row: int) -> None:
                try:
                    async with client.open_request([row], LONG) as request:
                        entered.append(row)
                        async for _ in request:
                            pass
                except EngineDeadError as error:
                    told.append(error)
                    ticks.note()

            async def call() -> None:
                with pytest.raises(EngineDeadError) as caught:
                    await client.call_utility("echo", 1)
                told.append(caught.value)
                ticks.note()

            async with anyio.create_task_group() as group:
                for row in range(2 * BURST):  # half of them wait to be let in
                    group.start_soon(stream, row)
                await until(lambda: len(entered) == BURST and client.statistics().waiting_requests == BURST)
                os.kill(client.health().pid, signal.SIGSTOP)
                for _ in range(BURST):
                    group.start_soon(call)
                await until(lambda: client.statistics().pending_calls == BURST)
                os.kill(client.health().pid, signal.SIGKILL)
        ticks.check(3 * BURST)
        assert len(set(map(id, told))) == 3 * BURST


async def test_who_waits_for_a_turn_learns_of_the_close() -> None:
    client_of: list[EngineClient] = []
    refused: list[EngineClosedError] = []

    async def late() -> None:
        try:
            await client_of[0].generate([1])
        except EngineClosedError as error:
            refused.append(error)

    async with anyio.create_task_group() as group:
        async with open_engine_client(scripted_spec()) as client:
            client_of.append(client)
            turns = session_of(client).turns
            for _ in range(50 * AT_ONCE):
                turns.call(lambda: None)
            group.start_soon(late)
            await checkpoint()
            assert not client.statistics().live_requests
    assert len(refused) == 1


async def test_who_was_let_in_and_is_cancelled_passes_the_place_on() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.01), max_requests=1, when_full="wait") as client:
        session = session_of(client)
        async with anyio.create_task_group() as group:
            async with client.open_request([1], LONG) as request:
                await anext(request)
                first, second = anyio.CancelScope(), anyio.Event()

                async def cancelled() -> None:
                    with first:
                        await client.generate([1], LONG)

                async def follows() -> None:
                    assert (await client.generate([5], SamplingParams(max_tokens=1))).token_ids == [6]
                    second.set()

                group.start_soon(cancelled)
                await until(lambda: client.statistics().waiting_requests == 1)
                group.start_soon(follows)
                await until(lambda: client.statistics().waiting_requests == 2)
                exhaust(session.turns)  # so that who is let in is woken in a later turn
            first.cancel()
            with anyio.fail_after(10):
                await second.wait()
