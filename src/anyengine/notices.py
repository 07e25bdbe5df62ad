"""Warnings of the client, logged by a daemon thread: a handler may block, and the event loop must not.

Without any configuration Python's logging writes to stderr, which may be a pipe that nobody reads or a terminal that is
stopped. The caller waits a moment for the handlers, so that a warning is out before what follows it, but no longer.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from anyengine import streams

logger: logging.Logger = logging.getLogger("anyengine")

PATIENCE = 0.005
"""Seconds that a warning may hold up its caller; those that follow one which took longer hold up nobody."""

ROOM_LIMIT = 5.0
"""Seconds that a warning waits for room in a stream that nobody reads; then it is counted only."""

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
        context = contextvars.copy_context()
        _notices.submit(lambda: context.run(logger.handle, record))


def are_pending() -> bool:
    """Whether a warning has not reached all handlers yet."""
    return _notices.are_pending


class _Notices:
    """Calls functions one after the other in a thread, which is there while there is something to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], object], threading.Event]] = deque()
        self._lost = 0
        self._late = False  # a handler blocks
        self.are_pending: bool = False

    def submit(self, emit: Callable[[], object]) -> None:
        emitted = threading.Event()
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                self._lost += 1
                return
            self._waiting.append((emit, emitted))
            is_running, self.are_pending = self.are_pending, True
        if not is_running:
            try:
                threading.Thread(target=self._run, name="anyengine-log", daemon=True).start()
            except RuntimeError:  # no thread to be had
                self._run()
        if not self._late and not emitted.wait(PATIENCE):
            self._late = True

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            emit, emitted = next_one
            with contextlib.suppress(BaseException):  # a handler's own errors are none of the client's
                if _is_there_room():
                    self._emit(emit)
                else:
                    self._drop_all()
            emitted.set()

    def _next(self) -> tuple[Callable[[], object], threading.Event] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self.are_pending = self._late = False
            return None

    def _emit(self, emit: Callable[[], object]) -> None:
        emit()
        with self._lock:
            lost, self._lost = self._lost, 0
        if lost:
            logger.warning("%d warnings before this one were not logged: the log's handlers blocked", lost)

    def _drop_all(self) -> None:
        with self._lock:
            self._lost += 1 + len(self._waiting)
            self._waiting.clear()


def _is_there_room() -> bool:
    """Wait, bounded, until the streams of all handlers take something: to block in a handler is to keep its lock."""
    deadline = time.monotonic() + ROOM_LIMIT
    return all(streams.has_room(stream, max(0.0, deadline - time.monotonic())) for stream in _streams())


def _streams() -> list[object]:
    found: list[object] = []
    at: logging.Logger | None = logger
    has_handlers = False
    while at is not None:
        for handler in at.handlers:
            has_handlers = True
            if isinstance(handler, logging.StreamHandler):
                found.append(handler.stream)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        at = at.parent if at.propagate else None
    return found if has_handlers else [sys.stderr]


_notices = _Notices()


def _after_in_child() -> None:
    global _notices
    _notices = _Notices()  # the thread is not there, and the lock may be held


os.register_at_fork(after_in_child=_after_in_child)
