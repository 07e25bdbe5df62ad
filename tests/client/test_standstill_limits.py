"""Limits count while this process runs, and are believed when what had come has been read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

import anyio
import pytest
from tests.helpers import BUSY

from anyengine.client.limits import Limits

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def running(arrived: anyio.Event | None = None) -> AsyncIterator[Limits]:
    """Limits that run; before one is believed, ``arrived`` is found to have come."""
    limits = Limits()

    async def catch_up() -> None:
        if arrived is not None:
            arrived.set()
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(limits.run, catch_up)
        await anyio.wait_all_tasks_blocked()
        yield limits
        group.cancel_scope.cancel()


@pytest.mark.parametrize("seconds", [0.02, 0.3])
async def test_a_limit_is_reached_after_its_time(seconds: float) -> None:
    async with running() as limits:
        started = time.monotonic()
        with anyio.fail_after(BUSY):
            with limits.within(seconds) as limit:
                await anyio.sleep_forever()
        assert limit.is_reached
        assert time.monotonic() - started >= seconds - 0.01
        with limits.within(60) as limit:
            await anyio.sleep(0)
        assert not limit.is_reached


async def test_a_short_limit_does_not_wait_for_the_look_of_a_long_one() -> None:
    async with running() as limits:
        for _ in range(3):  # one of these would be struck at the right moment by chance
            with limits.within(60):
                await anyio.sleep(0.01)
                started = time.monotonic()
                with limits.within(0.01) as short:
                    await anyio.sleep_forever()
                assert short.is_reached
                if time.monotonic() - started < 0.06:
                    return
        pytest.fail("a limit of 10 ms was looked at each 100 ms only")


async def test_limits_that_are_reached_during_a_reading_are_not_read_for_again() -> None:
    limits, readings = Limits(), 0

    async def catch_up() -> None:
        nonlocal readings
        readings += 1
        await anyio.sleep(0.1)

    async def wait() -> None:
        with limits.within(0.2):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(limits.run, catch_up)
        await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as waiters:
            for _ in range(5):
                waiters.start_soon(wait)
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert readings == 1


@pytest.mark.parametrize("seconds", [0.3, 0.9])
async def test_a_standstill_counts_as_one_look(seconds: float) -> None:
    async with running() as limits:
        with limits.within(seconds) as limit:
            await anyio.sleep(0.01)
            time.sleep(1)
            ended_at = time.monotonic()
            await anyio.sleep_forever()
        assert limit.is_reached
        assert time.monotonic() - ended_at >= seconds - 0.25


async def test_a_loop_that_stands_still_again_and_again_reaches_its_limits_all_the_same() -> None:
    async with running() as limits:
        blocked = 0.0

        async def block() -> None:
            nonlocal blocked
            while True:
                blocked -= time.monotonic()
                time.sleep(0.25)
                blocked += time.monotonic()
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as group:
            group.start_soon(block)
            with limits.within(2) as limit:
                await anyio.sleep_forever()
            group.cancel_scope.cancel()
        assert limit.is_reached
        assert blocked < 6  # the first look counts little, and the last one may be late


async def test_what_had_come_by_then_counts() -> None:
    arrived = anyio.Event()
    async with running(arrived) as limits:
        with limits.within(0.05) as limit:
            await arrived.wait()
        assert not limit.is_reached


async def test_a_limit_can_begin_anew() -> None:
    async with running() as limits:
        started = time.monotonic()
        with limits.within(0.3) as limit:
            for _ in range(4):
                await anyio.sleep(0.15)
                limit.begin_anew()
            await anyio.sleep_forever()
        assert limit.is_reached
        assert time.monotonic() - started >= 0.85


async def test_without_the_task_that_counts_limits_are_the_loops_own() -> None:
    limits = Limits()
    with anyio.fail_after(BUSY), limits.within(0.05) as before:
        await anyio.sleep_forever()
    assert before.is_reached
    async with running() as limits:
        pass
    with anyio.fail_after(BUSY), limits.within(0.05) as after:
        await anyio.sleep_forever()
    assert after.is_reached
    with anyio.fail_after(BUSY):
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                with limits.within(0.2) as meanwhile:
                    await anyio.sleep_forever()
                assert meanwhile.is_reached

            async with running() as limits:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()


async def test_a_cancellation_from_outside_is_no_limit_that_was_reached() -> None:
    async with running() as limits:
        with anyio.move_on_after(0.05) as scope:
            with limits.within(60):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        with anyio.CancelScope() as scope:
            scope.cancel()
            with limits.within(0.05, shield=True) as limit:
                await anyio.sleep_forever()
        assert limit.is_reached
