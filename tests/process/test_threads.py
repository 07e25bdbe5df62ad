"""Blocking functions in daemon threads: what they bring arrives, and they hold up no loop and no interpreter."""

from __future__ import annotations

import contextvars
import errno
import subprocess
import sys
import threading
from typing import Any

import anyio
import pytest
from tests.helpers import until

from anyengine.process.threads import ThreadCall, run_in_thread, run_surely

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE")


async def test_a_function_runs_elsewhere_with_the_callers_context() -> None:
    VARIABLE.set("the caller's")

    def look(argument: int) -> tuple[int, str, bool, bool]:
        thread = threading.current_thread()
        return argument, VARIABLE.get(), thread is threading.main_thread(), thread.daemon

    assert await run_in_thread(look, 3, name="look") == (3, "the caller's", False, True)


@pytest.mark.parametrize("error", [ValueError("a"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
async def test_what_it_raises_is_raised_in_its_caller(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await run_in_thread(fail, name="fail")
    assert caught.value is error


async def test_a_cancellation_waits_for_the_end() -> None:
    entered, release, ended = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        release.wait()
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run_in_thread_named, block)
        await until(entered.is_set)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.01)
            release.set()
    assert ended.is_set()


async def run_in_thread_named(function: Any) -> None:
    await run_in_thread(function, name="test")


async def test_a_cancellation_abandons_it_where_that_is_asked_for() -> None:
    entered, release = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        release.wait()

    async def call() -> None:
        await run_in_thread(block, name="block", abandon_on_cancel=True)

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await until(entered.is_set)
        group.cancel_scope.cancel()
    assert threading.active_count() > 1
    release.set()


async def test_nothing_is_called_for_a_caller_that_is_cancelled_already() -> None:
    called = threading.Event()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await run_in_thread(called.set, name="set")
    assert scope.cancelled_caught
    assert not called.is_set()


async def test_a_wait_that_was_cancelled_can_be_repeated() -> None:
    release = threading.Event()
    call = ThreadCall(release.wait, name="wait")
    with anyio.move_on_after(0):
        await call.wait()
    release.set()
    await call.wait()
    assert call.result() is True


async def test_without_a_thread_it_is_an_oserror_and_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    called = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="this process needs a thread named anyengine-set: ") as caught:
            await run_in_thread(called.set, name="set")
        assert caught.value.errno == errno.EAGAIN
        assert not called.is_set()
        assert await run_surely(called.is_set, name="look") is False


def test_a_loop_may_end_before_the_function(anyio_backend: Any) -> None:
    entered, release, returned = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        release.wait()
        returned.set()

    async def main() -> None:
        with anyio.move_on_after(0.001):
            await run_in_thread(block, name="block", abandon_on_cancel=True)

    anyio.run(main, backend=anyio_backend[0])
    before = threading.excepthook
    problems: list[Any] = []
    threading.excepthook = problems.append
    try:
        release.set()
        assert returned.wait(10)
        for thread in threading.enumerate():
            if thread.name == "anyengine-block":
                thread.join(10)
    finally:
        threading.excepthook = before
    assert not problems


EXITS = """
import anyio, sys, threading
from anyengine.process.threads import run_in_thread

async def main():
    with anyio.move_on_after(0.05):
        await run_in_thread(threading.Event().wait, name="for-ever", abandon_on_cancel=True)
    sys.exit(3)

anyio.run(main, backend=sys.argv[1])
"""


def test_a_thread_that_never_ends_does_not_hold_up_the_interpreters_exit(anyio_backend: Any) -> None:
    ended = subprocess.run([sys.executable, "-c", EXITS, anyio_backend[0]], timeout=30, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
