"""A ZeroMQ socket in an AnyIO program: waiting and receiving are separate steps, and waiting never consumes.

So a cancelled wait loses nothing, on any backend. What makes ZeroMQ's file descriptor difficult is that it is
edge-like: it becomes readable when *something* changed, and any operation on the socket, a send included, takes that
change away. Here every operation that may have taken it looks at the socket's events afterwards and wakes the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import zmq

from anyengine import frames
from anyengine.protocol.cbor import Buffer


class Socket:
    """One ZeroMQ socket. One task at a time may wait on it; sending is synchronous and may happen in any task."""

    def __init__(self, raw: zmq.Socket[bytes], *, routed: bool = False) -> None:
        self._raw = raw
        self._routed = routed
        self._fd = int(raw.getsockopt(zmq.FD))
        self._closed = False
        self._drained = False
        self._parked: anyio.CancelScope | None = None

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

    async def wait_readable(self) -> bool:
        """Return when a message may wait: False at once if one does already, True after having slept.

        :raises anyio.ClosedResourceError: if the socket is closed, before or meanwhile
        :raises anyio.BusyResourceError: if another task waits on this socket
        """
        if self._closed:
            raise anyio.ClosedResourceError
        # A receive that failed has taken all changes in, and so the next one makes the descriptor readable; otherwise
        # the events have to be looked at first.
        if not self._drained and frames.has_input(self._raw):
            return False
        if self._parked is not None:
            raise anyio.BusyResourceError("waiting on")
        with anyio.CancelScope() as self._parked:
            try:
                await anyio.wait_readable(self._fd)
            finally:
                self._parked = None
        self._drained = False
        if self._closed:
            raise anyio.ClosedResourceError
        return True

    def send(self, message: Sequence[Buffer]) -> list[zmq.MessageTracker]:
        """Send at once; the trackers are done when ZeroMQ has let go of the large frames' memory.

        :raises anyio.ClosedResourceError: if the socket is closed
        :raises zmq.ZMQError: EHOSTUNREACH if a ROUTER does not know the peer
        """
        return self._send(frames.send_tracked, message)

    def send_copied(self, message: Sequence[Buffer]) -> list[zmq.MessageTracker]:
        """Send at once, ZeroMQ taking copies: there is nothing to track. Errors as :meth:`send`."""
        return self._send(frames.send_copied, message)

    def _send(
        self, send: Callable[[zmq.Socket[bytes], Sequence[Buffer]], list[zmq.MessageTracker]], message: Sequence[Buffer]
    ) -> list[zmq.MessageTracker]:
        if self._closed:
            raise anyio.ClosedResourceError
        try:
            return send(self._raw, message)
        finally:
            self._drained = False
            if self._parked is not None and frames.has_input(self._raw):
                self._parked.cancel()

    def close(self) -> None:
        """Close it, dropping what is unsent; a task that waits gets ClosedResourceError."""
        if self._closed:
            return
        # In this order and without a checkpoint between: the waiter must find it closed, and nobody may wait on a file
        # descriptor whose number somebody else can get.
        self._closed = True
        if self._parked is not None:
            anyio.notify_closing(self._fd)
        self._raw.close(linger=0)
