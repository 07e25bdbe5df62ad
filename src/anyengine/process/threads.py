"""Blocking functions in daemon threads, awaited by a task of asyncio or trio.

AnyIO's worker threads are no daemons on asyncio. They are told to end when the loop's main task ends, so that a loop
which dies in the middle (a second SIGTERM whose handler raises SystemExit) leaves them waiting for work, and the
interpreter waits for them in its exit. A daemon thread holds nothing up. Each call has a thread of its own, which ends
with it: such calls are rare here, and no idle thread stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, TypeVarTuple

import anyio
from anyio.lowlevel import checkpoint_if_cancelled, current_token

from anyengine.thread_limits import none_left

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LOOK = 0.1
"""Seconds between two looks whether a function has ended."""


async def run_in_thread(function: Callable[[*Ts], T], *args: *Ts, name: str, abandon_on_cancel: bool = False) -> T:
    """Run a blocking function in a daemon thread and return what it returns, or raise what it raises.

    The thread has a copy of the caller's context. What it brings is dropped if the loop ends first.

    :param name: what the thread does, for whoever looks at a list of threads
    :param abandon_on_cancel: whether a cancellation ends the wait at once, and the thread goes on for nobody; otherwise
        the cancellation is raised after the function has ended. asyncio's own ``Task.cancel`` ends the wait in any case
    :raises OSError: if the system has no thread for it; the function is not called then
    """
    await checkpoint_if_cancelled()
    call = ThreadCall(function, *args, name=name)
    with anyio.CancelScope(shield=not abandon_on_cancel):
        await call.wait()
    return call.result()


async def run_surely(function: Callable[[*Ts], T], *args: *Ts, name: str) -> T:
    """The same for what must happen: if the system has no thread for it, it blocks this one."""
    try:
        call = ThreadCall(function, *args, name=name)
    except OSError:
        return function(*args)
    with anyio.CancelScope(shield=True):
        await call.wait()
    return call.result()


class ThreadCall(Generic[T]):
    """A function that runs in a daemon thread, for the one task that makes this object. Parameters as
    :func:`run_in_thread`.

    :raises OSError: if the system has no thread for it
    """

    def __init__(self, function: Callable[[*Ts], T], *args: *Ts, name: str) -> None:
        self._ended = anyio.Event()
        self._values: list[T] = []  # one when the function has returned
        self._error: BaseException | None = None
        run_soon = function_to_run_soon()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                self._values.append(context.run(function, *args))
            except BaseException as error:
                # Without the frame of this function, which would keep the error that keeps it.
                self._error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                run_soon(self._ended.set)

        try:
            threading.Thread(target=run, name=f"anyengine-{name}", daemon=True).start()
        except RuntimeError as error:
            raise none_left(f"a thread named anyengine-{name}") from error

    async def wait(self) -> None:
        """Return when the function has ended. A wait that is cancelled can be repeated."""
        while not self._ended.is_set() and not (self._values or self._error):
            # Looking as well as waiting: a fork of this process that unwound its copy of the loop has taken away what
            # wakes this one from other threads, for they share an epoll.
            with anyio.move_on_after(LOOK):
                await self._ended.wait()

    def result(self) -> T:
        """What the function returned, after :meth:`wait`; raises what it raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._values.pop()
        finally:
            del error  # its traceback holds this frame


def function_to_run_soon() -> Callable[[Callable[[], object]], object]:
    """The running loop's function by which any thread has it call another one; RuntimeError if the loop has ended."""
    loop: Any = current_token().native_token
    if isinstance(loop, asyncio.AbstractEventLoop):
        # In the loop's own context: AnyIO finds out from it which kind of loop this is.
        return functools.partial(loop.call_soon_threadsafe, context=contextvars.copy_context())
    return loop.run_sync_soon
