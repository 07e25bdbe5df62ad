"""Which connections to a socket an engine's life has, by what the socket's monitor tells of them."""

from __future__ import annotations

from typing import Any

import zmq

from anyengine import frames
from anyengine.transport.sockets import Socket


class Connections:
    """The connections to ``socket`` that came since :meth:`forget`: the end of an earlier one concerns nobody.

    One task at a time may wait.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        # By the number of its descriptor, which is free again, and told to be, before another connection gets it.
        self._open: set[int] = set()
        self._came = False
        self._monitor = Socket(socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))

    def follow(self) -> None:
        """Take in what has happened.

        :raises anyio.ClosedResourceError: if it is closed
        """
        while (message := self._monitor.receive_nowait()) is not None:
            descriptor = frames.connection_value(message)
            if frames.connection_event(message) == zmq.EVENT_ACCEPTED:
                self._came = True
                self._open.add(descriptor)
            else:
                self._open.discard(descriptor)

    def forget(self) -> None:
        """A new life begins, and nothing that is connected by now belongs to it."""
        self.follow()
        self._open.clear()
        self._came = False

    async def end(self) -> None:
        """Return when all have ended, if any came: all that was sent on them has arrived.

        :raises anyio.ClosedResourceError: if it is closed, before or meanwhile
        """
        while True:
            self.follow()
            if self._came and not self._open:
                return
            await self._monitor.wait_readable()

    def close(self) -> None:
        """Let go of the monitor, before the socket is closed."""
        self._monitor.close()
