"""A ZeroMQ socket in an AnyIO program: waiting and receiving are separate steps, and waiting never consumes.

So a cancelled wait loses nothing, on any backend. What makes ZeroMQ's file descriptor difficult is that it is
edge-like: it becomes readable when *something* changed, and any operation on the socket, a send included, takes that
change away. Here every operation that may have taken it looks at the socket's events afterwards and wakes the owner.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

import anyio
import zmq
from anyio.lowlevel import checkpoint

from anyengine import forks, frames
from anyengine.protocol.cbor import Buffer
from anyengine.transport import collector
from anyengine.transport.wakeup import in_asyncio

_sockets: weakref.WeakSet[Socket] = weakref.WeakSet()


class Socket:
    """One ZeroMQ socket. One task at a time may wait on it; sending is synchronous and may happen in any task."""

    def __init__(self, raw: zmq.Socket[bytes], *, routed: bool = False) -> None:
        self._raw = raw
        self._routed = routed
        self._fd = int(raw.getsockopt(zmq.FD))
        forks.watch(self._fd)
        _sockets.add(self)
        self._closed = False
        self._drained = False
        self._woken = False
        self._parked: anyio.CancelScope | None = None
        self._reader: _CallbackReader | None = None

    def receive_nowait(self) -> list[bytes | memoryview] | None:
        """The next message, or None if there is none; buffers are writable views, the frames before them bytes.

        :raises anyio.ClosedResourceError: if the socket is closed
        """
        if self._closed:
            raise anyio.ClosedResourceError
        try:
            return frames.receive_nowait(self._raw, self._routed)
        except zmq.Again:
            self._drained = True
            return None

    def has_input(self) -> bool:
        """Whether a message waits.

        :raises anyio.ClosedResourceError: if the socket is closed
        """
        if self._closed:
            raise anyio.ClosedResourceError
        self._drained = not frames.has_input(self._raw)
        return not self._drained

    async def serve(self, drain: Callable[[], bool]) -> NoReturn:
        """Call ``drain`` whenever messages may wait, until cancelled.

        It receives until nothing is left, or returns True to be called again when others have had a turn. On asyncio
        it runs in a callback of the loop and not in a task, so it must not ask AnyIO for what belongs to a task.

        :raises anyio.ClosedResourceError: if the socket is closed, before or meanwhile
        :raises anyio.BusyResourceError: if another task waits on this socket
        :raises Exception: what ``drain`` raised
        """
        self._check_free()
        if in_asyncio():
            self._reader = _CallbackReader(self._fd, drain)
            try:
                await self._reader.ended
            finally:
                self._reader.close()
                self._reader = None
            raise anyio.ClosedResourceError
        while True:
            with anyio.CancelScope() as self._parked:
                try:
                    while True:
                        slept = await self._wait()
                        while drain() or not slept:
                            await checkpoint()
                            slept = True
                finally:
                    self._parked = None

    async def wait_readable(self) -> bool:
        """Return when a message may wait: False at once if one does already, True after having slept.

        :raises anyio.ClosedResourceError: if the socket is closed, before or meanwhile
        :raises anyio.BusyResourceError: if another task waits on this socket
        """
        self._check_free()
        slept = True
        with anyio.CancelScope() as self._parked:
            try:
                slept = await self._wait()
            finally:
                self._parked = None
                self._woken = False
        return slept

    async def _wait(self) -> bool:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._woken:
            self._woken = False
            return False
        # A receive that failed has taken all changes in, and so the next one makes the descriptor readable; otherwise
        # the events have to be looked at first.
        if not self._drained and frames.has_input(self._raw):
            return False
        try:
            await anyio.wait_readable(self._fd)
        finally:
            self._drained = False
        if self._closed:
            raise anyio.ClosedResourceError
        return True

    def _check_free(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._parked is not None or self._reader is not None:
            raise anyio.BusyResourceError("waiting on")

    def wake(self) -> None:
        """Have the task that waits look again, or call ``drain`` again: somebody else did, and not to the end."""
        self._drained = False
        if self._parked is not None:
            self._woken = True
            self._parked.cancel()
        elif self._reader is not None:
            self._reader.wake()

    def send(self, message: Sequence[Buffer]) -> list[zmq.MessageTracker]:
        """Send at once; the trackers are done when ZeroMQ has let go of the large frames' memory.

        Where the system has no thread left for letting go of it, ZeroMQ takes copies instead.

        :raises anyio.ClosedResourceError: if the socket is closed
        :raises zmq.ZMQError: EHOSTUNREACH if a ROUTER does not know the peer
        """
        if self._closed:
            raise anyio.ClosedResourceError
        try:
            if any(map(frames.is_large, message)) and collector.can_run():
                return frames.send_tracked(self._raw, message)
            frames.send_copied(self._raw, message)
            return []
        finally:
            self._wake_owner()

    def send_copied(self, message: Sequence[Buffer]) -> None:
        """Send at once, ZeroMQ taking copies: there is nothing to track. Errors as :meth:`send`."""
        if self._closed:
            raise anyio.ClosedResourceError
        try:
            frames.send_copied(self._raw, message)
        finally:
            self._wake_owner()

    def _wake_owner(self) -> None:
        """The operation that was may have taken the descriptor's change away."""
        self._drained = False
        if (self._parked is not None or self._reader is not None) and frames.has_input(self._raw):
            self.wake()

    def forget(self) -> None:
        """In a forked process: the socket is the parent's, and ZeroMQ's threads are not here."""
        self._closed = True

    def close(self) -> None:
        """Close it, dropping what is unsent; a task that waits gets ClosedResourceError."""
        if self._closed:
            return
        # In this order and without a checkpoint between: the waiter must find it closed, and nobody may wait on a file
        # descriptor whose number somebody else can get.
        self._closed = True
        if self._parked is not None:
            anyio.notify_closing(self._fd)
        if self._reader is not None:
            self._reader.close()
        forks.unwatch(self._fd)
        self._raw.close(linger=0)


class _CallbackReader:
    """Reads in a callback that stays registered. A task that waits anew for each message takes twice as long."""

    def __init__(self, fd: int, drain: Callable[[], bool]) -> None:
        self._fd = fd
        self._drain = drain
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._registered = True
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(fd, self._on_readable)
        self.wake()

    def wake(self) -> None:
        """Messages wait: read them in the loop's next turn."""
        if self._again is None:
            self._again = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._again = None
        self._on_readable()

    def _on_readable(self) -> None:
        if self._again is not None:
            return  # it is this reader's turn soon, or was it already
        try:
            if self._drain():
                self.wake()
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        # Once: when the task that waits has its turn, the number of the descriptor may be somebody else's.
        if self._registered:
            self._registered = False
            self._loop.remove_reader(self._fd)
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)

    def close(self) -> None:
        """Read no more; ``ended`` is resolved."""
        if self._again is not None:
            self._again.cancel()
        self._end(None)


def _after_in_child() -> None:
    for socket in list(_sockets):
        socket.forget()


os.register_at_fork(after_in_child=_after_in_child)
