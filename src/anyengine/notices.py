"""Warnings of the client, logged by a daemon thread: a handler may block, and the event loop must not.

Without any configuration Python's logging writes to stderr, which may be a pipe that nobody reads or a terminal that is
stopped. The caller waits a moment for the handlers, so that a warning is out before what follows it, but no longer.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import time
from collections import deque
from typing import Any, cast

from anyengine import streams

logger: logging.Logger = logging.getLogger("anyengine")

PATIENCE = 0.005
"""Seconds that a warning may hold up its caller; those that follow one which took longer hold up nobody."""

ROOM_LIMIT = 5.0
"""Seconds that a warning waits for the reader of a stream; then it is counted only, there and nowhere else."""

MOST_WAITING = 1000
"""Warnings that wait for a handler that blocks; further ones are counted only."""


def warn(message: str, *args: object) -> None:
    """Log a warning, as ``logging`` would, except that handlers run in another thread. Never blocks, never raises."""
    _log(logging.WARNING, message, args)


def log_error(message: str, *args: object) -> None:
    """The same for an error."""
    _log(logging.ERROR, message, args)


def _log(level: int, message: str, args: tuple[object, ...]) -> None:
    if logger.isEnabledFor(level):
        path, line, function, _ = logger.findCaller(stacklevel=3)
        record = logger.makeRecord(logger.name, level, path, line, message, args, None, function)
        _notices.submit(record)


def are_pending() -> bool:
    """Whether a warning has not reached all handlers yet."""
    return _notices.are_pending


class _Notices:
    """Logs records one after the other in a thread, which is there while there is something to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[logging.LogRecord, contextvars.Context, threading.Event]] = deque()
        self._lost = 0
        self._late = False  # a handler blocks
        self._unread: dict[int, int] = {}  # by the handler whose stream nobody reads: what was not written to it
        self.are_pending: bool = False

    def submit(self, record: logging.LogRecord) -> None:
        logged = threading.Event()
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                self._lost += 1
                return
            self._waiting.append((record, contextvars.copy_context(), logged))
            is_running, self.are_pending = self.are_pending, True
        if not is_running:
            try:
                threading.Thread(target=self._run, args=(ROOM_LIMIT,), name="anyengine-log", daemon=True).start()
            except RuntimeError:  # no thread to be had, and this one must not wait
                self._run(0.0)
        if not self._late and not logged.wait(PATIENCE):
            self._late = True

    def _run(self, room_limit: float) -> None:
        while (next_one := self._next()) is not None:
            record, context, logged = next_one
            context.run(self._handle, record, room_limit)
            with self._lock:
                lost, self._lost = self._lost, 0
            if lost:
                text = f"{lost} warnings before this one were not logged: the log's handlers blocked"
                note = logger.makeRecord(logger.name, logging.WARNING, record.pathname, record.lineno, text, (), None)
                context.run(self._handle, note, room_limit)
            logged.set()

    def _next(self) -> tuple[logging.LogRecord, contextvars.Context, threading.Event] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self.are_pending = self._late = False
            return None

    def _handle(self, record: logging.LogRecord, room_limit: float) -> None:
        """Give a record to all handlers, as the logger would; those last who may have to wait for a reader."""
        with contextlib.suppress(BaseException):  # the application's own errors are none of the client's
            if logger.disabled or not logger.filter(record):
                return
            waiting: list[tuple[logging.StreamHandler[Any], streams.UnblockedEnd]] = []
            for handler in _handlers():
                with contextlib.suppress(BaseException):
                    if record.levelno < handler.level:
                        continue
                    if (end := _unblocked_end(handler)) is not None:
                        waiting.append((cast("logging.StreamHandler[Any]", handler), end))
                    elif streams.has_room(getattr(handler, "stream", None), room_limit):
                        handler.handle(record)
                    else:
                        with self._lock:
                            self._lost += 1
            for handler, end in waiting:
                with contextlib.suppress(BaseException), end:
                    self._write(handler, end, record, room_limit)

    def _write(
        self,
        handler: logging.StreamHandler[Any],
        end: streams.UnblockedEnd,
        record: logging.LogRecord,
        room_limit: float,
    ) -> None:
        if not handler.filter(record):
            return
        text = handler.format(record) + handler.terminator
        unread = self._unread.get(id(handler), 0)
        if unread:
            text = f"[{unread} warnings before this one were not logged: nobody read them]{handler.terminator}{text}"
        # One that was waited for in vain is not waited for again until it takes something.
        deadline = time.monotonic() + (0.0 if unread else room_limit)
        data = streams.encoded(handler.stream, text)
        if end.write(data, lambda: time.monotonic() < deadline, _nothing):
            self._unread[id(handler)] = unread + 1
        else:
            self._unread.pop(id(handler), None)


def _handlers() -> list[logging.Handler]:
    found: list[logging.Handler] = []
    at: logging.Logger | None = logger
    while at is not None:
        found += at.handlers
        at = at.parent if at.propagate else None
    if not found and logging.lastResort is not None:
        found = [logging.lastResort]
    return found


def _unblocked_end(handler: logging.Handler) -> streams.UnblockedEnd | None:
    """The way to the stream of a handler that does nothing but write to it, if it is one that may block."""
    plain: Any = logging.StreamHandler
    if not isinstance(handler, plain) or cast("Any", type(handler)).emit is not plain.emit:
        return None
    try:
        return streams.UnblockedEnd(cast("Any", handler).stream)
    except OSError:
        return None


def _nothing() -> None:
    pass


_notices = _Notices()


def _after_in_child() -> None:
    global _notices
    _notices = _Notices()  # the thread is not there, and the lock may be held


os.register_at_fork(after_in_child=_after_in_child)
