"""What the examples of several processes share: programs that end with their block, and signals that end everything."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.abc import Process, TaskStatus


@asynccontextmanager
async def program(command: Sequence[str]) -> AsyncGenerator[Process]:
    """Run a program that prints where we print. Leaving the block, however that happens, kills it.

    It has a session of its own, so that Ctrl-C reaches us alone, and we decide what ends first.
    """
    async with await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stdout=None, stderr=None, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself just now
                    process.kill()


async def run_until_signal(function: Callable[..., Awaitable[int]], *arguments: object) -> int:
    """Run ``function`` under SIGINT, SIGTERM and SIGHUP, each of which cancels it.

    Returns what it returned, an exit code, or 128 and the number of the signal.
    """
    code = 0

    async def watch(scope: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
        nonlocal code
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                code = 128 + number
                scope.cancel()

    async with anyio.create_task_group() as group:
        await group.start(watch, group.cancel_scope)
        code = await function(*arguments)
        group.cancel_scope.cancel()
    return code
