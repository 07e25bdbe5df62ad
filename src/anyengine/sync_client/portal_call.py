"""One call through the portal, and the latch on which its caller waits."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

from anyengine.errors import EngineClosedError, EngineError

T = TypeVar("T")

TakeBack = Callable[[Callable[[], object]], object]


class Latch:
    """An event that is set once. Waiting is one call into C, which an interrupt ends and does not break.

    ``threading.Event`` is written in Python, and KeyboardInterrupt may come between any two of its lines.
    """

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set: bool = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let everybody through who waits; one thread alone may call it."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self, timeout: float = -1) -> bool:
        """Wait until it is set, for ``timeout`` seconds at most if that is not negative; whether it is."""
        if not self.is_set and self._lock.acquire(timeout=timeout):
            self._lock.release()
        return self.is_set


class PortalCall(Generic[T]):
    """An async function that runs in the loop for a caller in another thread.

    ``done`` is set when there is a result; for a call that was abandoned, ``gone`` when nothing of it runs any more.
    ``undo`` takes a value that the function returned though its caller had been interrupted.
    """

    __slots__ = ("_abandoned", "_error", "_function", "_scope", "_undo", "_values", "done", "gone", "started")

    def __init__(self, function: Callable[[], Awaitable[T]], undo: Callable[[T], Awaitable[object]] | None) -> None:
        self._function = function
        self._undo = undo
        self._values: list[T] = []  # one when the function has returned
        self._error: BaseException | None = None
        self._scope: anyio.CancelScope | None = None
        self._abandoned = False
        self.started: bool = False
        self.done: Latch = Latch()
        self.gone: Latch = Latch()

    def result(self) -> T:
        """What the function returned; raises what it raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._values.pop()
        finally:
            del error  # its traceback holds this frame

    # ---- in the loop's thread ----

    async def run(self) -> None:
        """Run the function and note what comes of it; it raises nothing but a cancellation of the whole loop."""
        if self._abandoned:
            return  # before its first turn
        try:
            with anyio.CancelScope() as self._scope:
                value = await self._function()
                self._values.append(value)
        except anyio.get_cancelled_exc_class():
            self.close()
            raise
        except BaseException as error:  # whatever it is, it belongs to the caller
            self._error = error
        self.done.set()
        if self._abandoned:
            await self.take_back()

    def abandon(self) -> bool:
        """Cancel the call, whose caller was interrupted.

        Whether it had ended before, so that :meth:`take_back` must follow.
        """
        self._abandoned = True
        if self.done.is_set:
            return True
        if self._scope is None:  # interrupted before it was handed over, or before its first turn
            self.close()
        else:
            self._scope.cancel()
        return False

    async def take_back(self) -> None:
        """Undo what an abandoned call has done all the same."""
        try:
            with anyio.CancelScope(shield=True), contextlib.suppress(EngineError):
                if self._values and self._undo is not None:
                    await self._undo(self._values.pop())
        finally:
            self.gone.set()

    def close(self) -> None:
        """End the call, of which nothing runs: the client was closed."""
        if not self.done.is_set:
            self._error = EngineClosedError("the client was closed")
        self.done.set()
        self.gone.set()


class Listener(abc.ABC):
    """Something that the loop's own code brings to another thread, for which no task has to run."""

    def __init__(self) -> None:
        self.started: bool = False

    @abc.abstractmethod
    def begin(self) -> None:
        """Listen; called once, in the loop's thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """The loop has ended, or will not begin with this: nothing comes any more."""


class PortalWait(Listener):
    """A caller's wait for something that the loop's own code brings.

    ``listen`` is called in the loop's thread with this object, and has :meth:`finish` or :meth:`fail` called there, now
    or later; it returns what takes that back, for a caller that was interrupted, and calls what it is given when
    nothing of it is left.
    """

    def __init__(self, listen: Callable[[PortalWait], TakeBack]) -> None:
        super().__init__()
        self._listen = listen
        self._stop: TakeBack | None = None
        self._error: BaseException | None = None
        self.done: Latch = Latch()
        self.gone: Latch = Latch()

    def check(self) -> None:
        """Raise what it failed with, if it did."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    # ---- in the loop's thread ----

    def begin(self) -> None:
        """Listen."""
        try:
            self._stop = self._listen(self)
        except BaseException as error:  # whatever it is, it belongs to the caller
            self.fail(error)

    def finish(self) -> None:
        """Let the caller go on."""
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in the caller."""
        self._error = error
        self.done.set()

    def abandon(self) -> None:
        """Listen no more: the caller was interrupted."""
        if self._stop is not None and not self.done.is_set:
            self._stop(self.gone.set)
        else:
            self.gone.set()

    def close(self) -> None:
        """End the wait: the client was closed."""
        if not self.done.is_set:
            self.fail(EngineClosedError("the client was closed"))
        self.gone.set()
