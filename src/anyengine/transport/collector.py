"""The thread of pyzmq that lets go of memory sent without a copy: it starts with the first large frame and never ends.

A client leaves no thread behind, so the last one to close ends it, unless others of this process had it running before
or still have memory in it. It starts again by itself when it is needed.
"""

from __future__ import annotations

import os
import threading
import time

from zmq.utils.garbage import gc as collector

from anyengine.thread_limits import ZMQ_THREADS, check_threads

_lock = threading.Lock()
_users = 0
_ran_before = False

IDLE_LIMIT = 0.05
"""Seconds for which closing waits until the memory of the last frames is let go."""


def _after_in_child() -> None:
    global _lock, _users, _ran_before
    # The thread is not there, the clients are the parent's, and the lock may be held by somebody who is not there.
    _lock, _users, _ran_before = threading.Lock(), 0, False


os.register_at_fork(after_in_child=_after_in_child)


def acquire() -> None:
    """One more client may send without a copy."""
    global _users, _ran_before
    with _lock:
        if _users == 0:
            _ran_before = collector.is_alive()
        _users += 1


def can_run() -> bool:
    """Whether it runs, or may be started by the next large frame. ZeroMQ would end a process that gets no threads."""
    if collector.is_alive():
        return True
    try:
        check_threads(1 + ZMQ_THREADS)  # it has a context of its own
    except OSError:
        return False
    return True


def release() -> None:
    """One client less, after its context has ended; blocks for a moment."""
    global _users
    with _lock:
        _users -= 1
        if _users or _ran_before or not collector.is_alive():
            return
        deadline = time.monotonic() + IDLE_LIMIT
        while collector.refs and time.monotonic() < deadline:
            time.sleep(0.001)
        if not collector.refs:
            collector.stop()
