"""Multipart messages on pyzmq sockets, without copies where copies cost; both processes use it."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from anyengine.protocol.arrays import INLINE_LIMIT
from anyengine.protocol.cbor import Buffer


def receive_nowait(socket: zmq.Socket[bytes], routed: bool = False) -> list[bytes | memoryview]:
    """The next message: kind and body as bytes, buffers as writable views that keep their memory alive.

    With ``routed`` a ROUTER's identity frame comes first, as bytes.

    :raises zmq.Again: if no message waits
    """
    frames: list[bytes | memoryview] = [socket.recv(zmq.NOBLOCK)]
    copied = 3 if routed else 2
    while socket.getsockopt(zmq.RCVMORE):
        if len(frames) < copied:
            frames.append(socket.recv(zmq.NOBLOCK))
        else:
            frames.append(memoryview(socket.recv(zmq.NOBLOCK, copy=False).buffer))
    return frames


def send_copied(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Send a message of which ZeroMQ takes copies, so that the sender may change its memory at once.

    :raises zmq.ZMQError: if the socket cannot take it
    """
    socket.send_multipart(frames, zmq.NOBLOCK)


def send_tracked(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> list[zmq.MessageTracker]:
    """Send a message of which ZeroMQ reads the large frames in place; their memory must not change meanwhile.

    The trackers are done when ZeroMQ has let go of the frames. Small frames are copied and have none.

    :raises zmq.ZMQError: if the socket cannot take it; nothing was sent then
    """
    trackers: list[zmq.MessageTracker] = []
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = zmq.NOBLOCK if index == last else zmq.NOBLOCK | zmq.SNDMORE
        if memoryview(frame).nbytes <= INLINE_LIMIT:
            socket.send(frame, flags)
        else:
            tracker = socket.send(frame, flags, copy=False, track=True)
            assert tracker is not None
            trackers.append(tracker)
    return trackers
