"""What a fork of the application means for what belongs to one process.

What belongs to a process has an :class:`Origin`, made with it. In a process that the application forks the number of
forks is another one, and comparing it takes no system call.

A fork shares the epoll of the event loop that it was made in. If the loop is unwound there, it takes back its waits for
descriptors, and so the parent's. A watched descriptor leads nowhere in a fork, and then that changes nothing.
"""

from __future__ import annotations

import os

from anyengine.errors import EngineClosedError

_count = 0
_watched: set[int] = set()


def count() -> int:
    """The number of forks between this process and the one that loaded this module."""
    return _count


class Origin:
    """The process in which this is made, by its number ``pid``."""

    __slots__ = ("_forks", "pid")

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        self._forks = _count

    @property
    def is_forked(self) -> bool:
        """Whether this is another process: one that was forked from it."""
        return _count != self._forks

    def require_process(self) -> None:
        """:raises EngineClosedError: in a process that was forked from it"""
        if self.is_forked:
            raise EngineClosedError(
                f"the client belongs to process {self.pid}, and this is a fork of it, process {os.getpid()}; open a "
                "client here, or have the engine shared by client.connect_client(address)"
            )


def watch(fd: int) -> None:
    """An event loop may wait for this descriptor until :func:`unwatch`, which comes before it is closed."""
    _watched.add(fd)


def unwatch(fd: int) -> None:
    """No loop waits for it any more."""
    _watched.discard(fd)


def _after_in_child() -> None:
    global _count
    _count += 1
    if _watched:
        os.close(_watched.pop())  # so that there is a number left for the other
        nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for fd in _watched:
            if fd != nowhere:
                os.dup2(nowhere, fd, inheritable=False)
        _watched.clear()


os.register_at_fork(after_in_child=_after_in_child)
