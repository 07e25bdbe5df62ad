"""What outlives an engine's own process: its group, and orphans whose parent this process has become.

The first process of a container, and any other that is a subreaper (``PR_SET_CHILD_SUBREAPER``), becomes the parent of
what a dead engine had started. Each of these stays a zombie until its new parent takes its exit status. Only statuses
of the engine's descendants are taken here: those of the application's own children are the application's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MARK = "ANYENGINE_DESCENT"
"""The variable in the environment of an engine's process, and of all that it starts, by which they are known."""

_PR_GET_CHILD_SUBREAPER = 37  # <linux/prctl.h>

_awaited: set[int] = set()
"""Orphans for each of which a thread waits."""

os.register_at_fork(after_in_child=_awaited.clear)


class _Process(NamedTuple):
    pid: int
    state: bytes
    parent: int
    group: int
    session: int

    @property
    def has_ended(self) -> bool:
        return self.state in (b"Z", b"X")


def has_members(group: int) -> bool:
    """Whether a process is in the group that has not ended. A zombie waits for its parent and holds nothing."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # macOS says so of a group of zombies. On Linux a sandbox refuses the call, or they are another user's.
        if not _can_list():
            return False
    if not _can_list():
        return True
    return any(process.group == group and not process.has_ended for process in _processes())


def take_group(group: int) -> None:
    """Take the exit statuses that there are of a group, where this process has become its members' parent.

    Without ``/proc``, zombies could not be told from the living. Call it as :func:`take_orphans`.
    """
    _take(-group)


def take_orphans(engine: int, mark: str) -> None:
    """Take the exit statuses of what an engine had started, where this process has become its parent.

    For what has not ended yet, a daemon thread waits. Call it when the status of the engine's own process was taken.

    :param engine: the process id of the engine, which is the number of its group and its session too
    :param mark: what the variable :data:`MARK` has of it, for what has left the session
    """
    if not _adopts_orphans():
        return
    own = os.getpid()
    for process in _processes():
        if process.parent != own or process.pid in _awaited:
            continue
        if process.session != engine and not _is_marked(process.pid, mark):
            continue
        if not _take(process.pid):
            _start_to_await(process.pid, engine, mark)


def mark_for_child(mark: str) -> dict[str, str]:
    """The variable for the environment of an engine's process. That of an engine in an engine has both marks."""
    return {MARK: f"{os.environ.get(MARK, '')} {mark}".lstrip()}


def _adopts_orphans() -> bool:
    if sys.platform != "linux":
        return False
    if os.getpid() == 1:
        return True
    is_subreaper = ctypes.c_int()
    is_refused = ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0) != 0
    return is_refused or bool(is_subreaper.value)


def _take(which: int) -> bool:
    """Take all exit statuses that there are of a child, or of a group's; whether none of these lives."""
    try:
        while os.waitpid(which, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _start_to_await(pid: int, engine: int, mark: str) -> None:
    thread = threading.Thread(target=_await_orphan, args=(pid, engine, mark), name="anyengine-orphan", daemon=True)
    _awaited.add(pid)
    try:
        thread.start()
    except RuntimeError:  # no thread to be had: it may stay a zombie
        _awaited.discard(pid)


def _await_orphan(pid: int, engine: int, mark: str) -> None:
    with contextlib.suppress(ChildProcessError):  # the application has taken its status
        os.waitpid(pid, 0)
    _awaited.discard(pid)
    take_orphans(engine, mark)  # what this one had started is ours only now


def _is_marked(pid: int, mark: str) -> bool:
    """Whether a process has the mark in its environment. A zombie has none, and another user's cannot be read."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == MARK.encode():
                return mark.encode() in value.split()
    return False


def _can_list() -> bool:
    return os.path.exists("/proc/self/stat")


def _processes() -> Iterator[_Process]:
    """All processes that this one can see; none without Linux's ``/proc``."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it is gone by now
            state, *numbers = entry.read_bytes().rpartition(b")")[2].split()[:4]
            yield _Process(int(entry.parent.name), state, *map(int, numbers))
