"""Whose a client is: the process, the thread, the event loop and the task that opened it.

ZeroMQ's sockets and the client's tables belong to one thread, and what wakes a task belongs to one loop. A call from
elsewhere would abort the process in native code, wait for ever, or fail somebody else.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from threading import get_ident
from typing import Any, cast

from anyio.lowlevel import current_token

from anyengine import forks


class Belonging(forks.Origin):
    """Where its maker runs.

    Checking takes half a microsecond, the thread alone a seventh of one. On asyncio, where trio is loaded too, it takes
    1.3: trio then looks for something of the thread that is not there.
    """

    __slots__ = ("_loop", "_task", "_thread", "_thread_name", "_trio")

    def __init__(self) -> None:
        super().__init__()
        self._thread = get_ident()
        self._thread_name = threading.current_thread().name
        # Both, because one of them may run inside the other.
        self._loop = asyncio._get_running_loop()
        self._trio = _trio_token()
        self._task = _current_task()

    @property
    def in_trio(self) -> bool:
        """Whether the client's loop is trio's, or runs inside it."""
        return self._trio is not None

    @property
    def is_own_task(self) -> bool:
        """Whether the task that opened the client asks."""
        return _current_task() is self._task

    @property
    def loop_has_ended(self) -> bool:
        """Whether the client's loop will run nothing any more."""
        if self._trio is None:
            return self._loop is not None and self._loop.is_closed()
        try:
            self._trio.run_sync_soon(_nothing)
        except RuntimeError:
            return True
        return False

    def require_thread(self) -> None:
        """Errors as :meth:`require`, but another loop in the same thread is let through."""
        if get_ident() != self._thread or forks.count() != self._forks:
            self._refuse()

    def require(self) -> None:
        """Let the client's own loop through.

        :raises RuntimeError: in another thread or event loop than the client's
        :raises EngineClosedError: in a process that was forked from the client's
        """
        if (
            get_ident() != self._thread
            or asyncio._get_running_loop() is not self._loop
            or _trio_token() is not self._trio
            or forks.count() != self._forks
        ):
            self._refuse()

    def _refuse(self) -> None:
        self.require_process()
        here = threading.current_thread().name
        where = f"thread {here!r}" if get_ident() != self._thread else "another event loop, or none, in the same thread"
        raise RuntimeError(
            f"the client belongs to the event loop that opened it, in thread {self._thread_name!r}, and was called "
            f"from {where}. Call it there by anyio.from_thread.run(function), which a thread of "
            "anyio.to_thread.run_sync can do, or open a client for all threads: open_sync_engine_client"
        )


def _trio_token() -> Any:
    """The token of the trio loop that runs here, or None."""
    lowlevel = sys.modules.get("trio.lowlevel")
    return lowlevel.current_trio_token() if lowlevel is not None and lowlevel.in_trio_run() else None


def _current_task() -> object:
    if isinstance(current_token().native_token, asyncio.AbstractEventLoop):
        return asyncio.current_task()
    return cast("Any", sys.modules["trio.lowlevel"]).current_task()


def _nothing() -> None:
    pass
