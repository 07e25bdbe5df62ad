"""The queue of whole steps: what its reader gets while the engine dies and lives again."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from anyengine import EngineClosedError
from anyengine.client.waiters import OutputQueue
from anyengine.transport.wakeup import wakeup_type

pytestmark = pytest.mark.anyio


async def test_a_restart_while_the_error_is_on_its_way_ends_in_the_next_step() -> None:
    queue = OutputQueue(wakeup_type())
    queue.close(lambda: EngineClosedError("dead"), owed=True)
    with pytest.raises(EngineClosedError):
        await queue.get()
    got: list[Any] = []

    async def read() -> None:
        got.append(await queue.get())

    step: Any = object()
    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(anyio.lowlevel.checkpoint)
        group.start_soon(_reopen, queue)
        await anyio.wait_all_tasks_blocked()
        assert not got
        queue.push(step)
    assert got == [step]


async def _reopen(queue: OutputQueue) -> None:
    queue.reopen()


async def test_of_two_readers_the_second_is_refused() -> None:
    queue = OutputQueue(wakeup_type())
    async with anyio.create_task_group() as group:
        group.start_soon(queue.get)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError):
            await queue.get()
        group.cancel_scope.cancel()
