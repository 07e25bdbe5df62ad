"""The parent's ends of lifelines. A process that the application forks must not keep them open."""

from __future__ import annotations

import os
import threading

from anyengine.system_calls import naming

_lock = threading.Lock()
_open: set[int] = set()


def open_lifeline() -> tuple[int, int]:
    """A pipe: the child's end, and the parent's end, which lives as long as this process and no fork of it."""
    with _lock, naming("pipe2"):
        child_end, parent_end = os.pipe()
        _open.add(parent_end)
    return child_end, parent_end


def close_lifeline(parent_end: int) -> None:
    """Close the parent's end: whatever still lives on the other end is killed by the kernel."""
    with _lock:
        _open.discard(parent_end)
        os.close(parent_end)


def _after_in_child() -> None:
    for parent_end in _open:
        os.close(parent_end)
    _open.clear()
    _lock.release()


# The lock is held across a fork, so that no lifeline is made and not yet known at that moment.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_in_child)
