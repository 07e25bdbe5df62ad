"""Writing to this process's standard error from a daemon thread, when it may be a pipe that nobody reads.

A thread that blocks inside a write keeps the stream's lock, for which the interpreter waits when it ends. So nothing
is written before there is room for it.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from typing import Any

PIECE = 1024
"""Characters that are written at a time: at most ``PIPE_BUF`` bytes, for which there is room if there is any."""

LOOK = 0.05
"""Seconds after which a thread that waits for room looks whether it is still wanted."""


def has_room(stream: object, seconds: float) -> bool:
    """Wait until a write of one piece does not block, ``seconds`` at most. True for what cannot be asked."""
    try:
        poller = select.poll()
        poller.register(stream.fileno(), select.POLLOUT)  # type: ignore[attr-defined]  # pyright: ignore
        return bool(poller.poll(seconds * 1000))
    except Exception:  # whatever the application has put there, which may be no file at all
        return True


def write_stderr(text: str, is_wanted: Callable[[], bool], wrote: Callable[[], object]) -> int:
    """Write ``text`` to ``sys.stderr``, whatever that is by now; blocking, for a daemon thread. Never raises.

    :param is_wanted: asked while there is no room
    :param wrote: called after each piece
    :returns: the number of characters that were not written because they were not wanted any more
    """
    stream: Any = sys.stderr
    if stream is None:
        return 0
    at = 0
    try:
        while at < len(text):
            while not has_room(stream, LOOK):
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
    except BaseException:  # noqa: S110 - closed, full, narrow, binary, or an object with its own ideas: it ends nothing
        pass
    return 0
