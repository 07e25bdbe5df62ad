"""Multipart messages on pyzmq sockets, without copies where copies cost; both processes use it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import zmq

from anyengine.protocol.arrays import INLINE_LIMIT
from anyengine.protocol.cbor import Buffer

# As plain numbers: operations on enumerations take longer than the sends and receives that they are for.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)


HEARTBEAT = 1000
"""Milliseconds between two heartbeats of ZeroMQ on a connection that may lead to another machine."""

HEARTBEAT_LIMIT = 5000
"""Milliseconds without any after which such a connection counts as lost."""


CONNECTION_EVENTS = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
"""What a socket's monitor has to tell of connections that come about, are refused, and end."""


def connection_event(message: Sequence[bytes | memoryview]) -> int:
    """The event in a message of a socket's monitor: one of :data:`CONNECTION_EVENTS`."""
    return int.from_bytes(message[0][:2], sys.byteorder)


def connection_value(message: Sequence[bytes | memoryview]) -> int:
    """What such a message says of the event: for a connection that came or went, its file descriptor."""
    return int.from_bytes(message[0][2:6], sys.byteorder, signed=True)


def notice_silence(socket: zmq.Socket[bytes]) -> None:
    """Have the loss of a peer noticed that a network hides: its machine is gone, or the way to it."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_LIMIT)


def receive_nowait(socket: zmq.Socket[bytes], routed: bool = False) -> list[bytes | memoryview]:
    """The next message: kind and body as bytes, buffers as writable views that keep their memory alive.

    With ``routed`` a ROUTER's identity frame comes first, as bytes.

    :raises zmq.Again: if no message waits
    """
    frame = socket.recv(_NOBLOCK, copy=False)
    return _all_of(socket, frame, 3 if routed else 2) if frame.more else [frame.bytes]


def receive(socket: zmq.Socket[bytes]) -> list[bytes | memoryview]:
    """The next message as :func:`receive_nowait` gives it; waits in native code, where signals are still heard."""
    return _all_of(socket, socket.recv(copy=False), 2)


def _all_of(socket: zmq.Socket[bytes], frame: zmq.Frame, copied: int) -> list[bytes | memoryview]:
    """The message that begins with ``frame``, its first frames ``copied``."""
    # Frames say themselves whether more follow; asking the socket (RCVMORE) takes longer than receiving does.
    frames: list[bytes | memoryview] = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes if len(frames) < copied else memoryview(frame.buffer))
    return frames


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Costs less than a failed receive, and than asking the socket for its events."""
    return bool(zmq.zmq_poll([(socket, _POLLIN)], 0))


def is_large(frame: Buffer) -> bool:
    """Whether a copy of a frame costs more than having it tracked."""
    return (len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes) > INLINE_LIMIT


def send_copied(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Send a message of which ZeroMQ takes copies, so that the sender may change its memory at once.

    :raises zmq.ZMQError: if the socket cannot take it
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        socket.send(frame, _NOBLOCK if index == last else _NOBLOCK_MORE)


def send_tracked(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> list[zmq.MessageTracker]:
    """Send a message of which ZeroMQ reads the large frames in place; their memory must not change meanwhile.

    The trackers are done when ZeroMQ has let go of the frames. Small frames are copied and have none, and byte strings
    have none because nobody can change them.

    :raises zmq.ZMQError: if the socket cannot take it; nothing was sent then
    """
    trackers: list[zmq.MessageTracker] = []
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = _NOBLOCK if index == last else _NOBLOCK_MORE
        if is_large(frame):
            changes = not isinstance(frame, bytes)
            tracker = socket.send(frame, flags, copy=False, track=changes)
            if changes:
                assert tracker is not None
                trackers.append(tracker)
        else:
            socket.send(frame, flags)
    return trackers
