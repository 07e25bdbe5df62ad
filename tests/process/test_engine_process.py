"""Watching a child: its end is believed from the exit status, and told soon after, whatever its pidfd says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from tests.helpers import is_running, until

from anyengine import ShutdownPolicy, open_engine_client
from anyengine.process.engine_process import EngineProcess
from anyengine.process.lifelines import open_lifeline
from anyengine.process.output import AnonymousFile, ChildOutput
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    """A child that lives until somebody writes to it."""
    lifeline, parent_end = open_lifeline()
    os.close(lifeline)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        files = AnonymousFile("exception"), AnonymousFile("native"), ChildOutput()
        watched = EngineProcess(child, parent_end, *files, None, "mark")
        yield watched
        watched.kill()
        watched.reap()
        watched.close()


async def told_within(process: EngineProcess) -> float:
    """Seconds from the end of the process to the end of the wait for it."""
    told_at: list[float] = []

    async def watch() -> None:
        await process.wait()
        told_at.append(time.monotonic())

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await anyio.sleep(0.3)  # as long as it lives, its descriptor has said that it does not
        assert not told_at
        process._child.kill()  # as it ends by itself: nobody has taken its status
        killed_at = time.monotonic()
        await until(lambda: told_at, limit=5)
    return told_at[0] - killed_at


def always_readable(process: EngineProcess) -> None:
    """Put a descriptor in the place of the pidfd that is always readable, as that of a sandbox may be."""
    reader, writer = os.pipe()
    os.close(writer)
    assert process._pidfd is not None
    os.dup2(reader, process._pidfd)
    os.close(reader)


async def test_a_pidfd_that_is_always_readable_takes_no_core_and_the_end_is_told(process: EngineProcess) -> None:
    always_readable(process)
    looks = 0
    has_ended = process.has_ended

    def count() -> bool:
        nonlocal looks
        looks += 1
        return has_ended()

    process.has_ended = count  # type: ignore[method-assign]
    assert await told_within(process) < 1  # a look each 25 ms, on a busy machine
    assert looks < 60


@pytest.mark.parametrize("refused", ["pidfd", "waiting for it", "waitid", "pidfd and threads"])
async def test_the_end_is_told_whatever_the_system_refuses(
    process: EngineProcess, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise PermissionError(1, "Operation not permitted")

    if "pidfd" in refused or refused == "waitid":
        assert process._pidfd is not None
        os.close(process._pidfd)
        process._pidfd = None
    if refused == "waiting for it":
        regular = os.open(__file__, os.O_RDONLY)  # epoll takes no regular file
        assert process._pidfd is not None
        os.dup2(regular, process._pidfd)
        os.close(regular)
    if refused == "waitid":
        monkeypatch.setattr(os, "waitid", refuse)
    if "threads" in refused:
        monkeypatch.setattr("anyengine.process.engine_process.run_in_thread", refuse)
    assert await told_within(process) < 1
    process.reap()
    assert process.report(rank=0, phase="serve", reason=None).signal == 9


async def test_a_group_that_may_not_be_signalled_ends_with_its_lifeline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(os, "killpg", refuse)
    shutdown = ShutdownPolicy(grace=0.05, terminate=0.05)
    async with open_engine_client(scripted_spec(), shutdown=shutdown) as client:
        pid = client.health().pid
        assert pid is not None
        signal.pidfd_send_signal(pidfd := os.pidfd_open(pid), signal.SIGSTOP)
        os.close(pidfd)
    assert not is_running(pid)


async def test_a_status_that_somebody_else_has_taken_is_an_end(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_readable(process)
    wait, taken = os.waitid, False

    def waitid(*arguments: Any) -> Any:
        nonlocal taken
        result = None if taken else wait(*arguments)
        if taken or result is not None:
            taken = True
            raise ChildProcessError(10, "No child processes")
        return result

    monkeypatch.setattr(os, "waitid", waitid)
    assert await told_within(process) < 1
    report = process.report(rank=0, phase="serve", reason=None)
    assert (report.exit_code, report.signal) == (None, None)


async def test_the_end_is_told_at_once_by_a_true_pidfd(process: EngineProcess) -> None:
    assert await told_within(process) < 1
