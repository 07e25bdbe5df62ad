"""A wake-up wakes one task once, whatever comes first, and its wait can be cancelled."""

from __future__ import annotations

import anyio
import pytest

from anyengine.transport.wakeup import wakeup_type

pytestmark = pytest.mark.anyio


async def test_setting_wakes_the_task_that_waits() -> None:
    wakeup = wakeup_type()()
    woken: list[str] = []

    async def wait() -> None:
        await wakeup
        woken.append("woken")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        wakeup.set()
        wakeup.set()
        assert woken == []  # it is woken, not run
    assert woken == ["woken"]


async def test_one_that_is_set_does_not_let_its_task_sleep() -> None:
    wakeup = wakeup_type()()
    wakeup.set()
    with anyio.fail_after(20):
        await wakeup


async def test_a_wait_that_is_cancelled_leaves_nothing_that_setting_could_harm() -> None:
    wakeup = wakeup_type()()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                await anyio.wait_all_tasks_blocked()
                scope.cancel()

            group.start_soon(cancel)
            await wakeup
    assert scope.cancelled_caught
    wakeup.set()
    await anyio.lowlevel.checkpoint()


async def test_a_scope_that_was_cancelled_before_ends_the_wait() -> None:
    with anyio.fail_after(20), anyio.CancelScope() as scope:
        scope.cancel()
        await wakeup_type()()
    assert scope.cancelled_caught
