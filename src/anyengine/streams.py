"""Writing to streams that nobody may be reading, from a daemon thread, which must not block in a write.

A thread that blocks there keeps the lock of the stream or of the log's handler, for which the interpreter waits when it
ends. A pipe that has room for something may have none for all of it, and a terminal has room for one byte. So pipes,
terminals and sockets are written to without blocking, by a way of our own that changes nothing for others.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Callable
from typing import Any, Self

PIECE = 1024
"""Characters or bytes that are written at a time."""

LOOK = 0.05
"""Seconds after which a thread that waits for room looks whether it is still wanted."""

_PAUSE = 0.001
"""Seconds between two tries where there is room, but not enough."""


class UnblockedEnd:
    """A way of our own to the pipe, terminal or socket behind a stream. Use it as a context manager.

    :raises OSError: if there is none, or it cannot be had
    """

    def __init__(self, stream: Any) -> None:
        try:
            number = stream.fileno()
            mode = os.fstat(number).st_mode
        except Exception as error:  # whatever the application has put there, which may be no file at all
            raise OSError(f"no file: {error}") from error
        self._socket: socket.socket | None = None
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(number))
            self._fd = self._socket.fileno()
        elif stat.S_ISFIFO(mode) or os.isatty(number):
            # Not a copy of the descriptor, for to unblock that would unblock the application's own.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self._fd = os.open(f"/proc/self/fd/{number}", flags)
        else:
            raise OSError("no pipe, terminal or socket")
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self._fd)

    def write(self, data: bytes, is_wanted: Callable[[], bool], wrote: Callable[[], object]) -> int:
        """Write ``data`` as there is room; the number of bytes that were not written.

        :param is_wanted: asked while there is no room
        :param wrote: called after each piece
        :raises OSError: if nobody will ever read it
        """
        at = 0
        while at < len(data):
            count = self._write_now(data[at : at + PIECE])
            at += count
            if count:
                wrote()
            elif not is_wanted():
                return len(data) - at
            elif self._poll.poll(LOOK * 1000):
                time.sleep(_PAUSE)
        return 0

    def _write_now(self, piece: bytes) -> int:
        try:
            if self._socket is not None:
                return self._socket.send(piece, socket.MSG_DONTWAIT)
            return os.write(self._fd, piece)
        except BlockingIOError:
            return 0


def encoded(stream: Any, text: str) -> bytes:
    """``text`` as a stream would write it; what it has no code for becomes an escape."""
    encoding = getattr(stream, "encoding", None)
    return text.encode(encoding if isinstance(encoding, str) else "utf-8", "backslashreplace")


def write_stderr(text: str, is_wanted: Callable[[], bool], wrote: Callable[[], object]) -> int:
    """Write ``text`` to ``sys.stderr``, whatever that is by now; for a daemon thread. Never raises.

    :param is_wanted: asked while there is no room
    :param wrote: called after each piece
    :returns: the number of characters, about, that were not written because they were not wanted any more
    """
    stream: Any = sys.stderr
    if stream is None:
        return 0
    with contextlib.suppress(BaseException):  # closed, full, narrow, binary, or an object with its own ideas
        try:
            end = UnblockedEnd(stream)
        except OSError:
            return _write_pieces(stream, text, is_wanted, wrote)
        with end:
            return end.write(encoded(stream, text), is_wanted, wrote)
    return 0


def has_room(stream: object, seconds: float) -> bool:
    """Wait until a stream takes something, ``seconds`` at most. True for what cannot be asked."""
    try:
        poller = select.poll()
        poller.register(stream.fileno(), select.POLLOUT)  # type: ignore[attr-defined]  # pyright: ignore
        return bool(poller.poll(seconds * 1000))
    except Exception:  # whatever the application has put there, which may be no file at all
        return True


def _write_pieces(stream: Any, text: str, is_wanted: Callable[[], bool], wrote: Callable[[], object]) -> int:
    at = 0
    while at < len(text):
        while not has_room(stream, LOOK):  # a pipe, perhaps, where there is no /proc to open it by
            if not is_wanted():
                return len(text) - at
        end = at + PIECE
        if end < len(text):  # whole lines, for streams that make a record of each write
            end = text.rfind("\n", at, end) + 1 or end
        stream.write(text[at:end])
        if (flush := getattr(stream, "flush", None)) is not None:
            flush()
        at = end
        wrote()
    return 0
