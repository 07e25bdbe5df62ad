"""Looking whether this process may start threads, before native code that ends a process which may not.

And what the error says where the system refuses a thread or a process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import threading
import time
from pathlib import Path

from anyengine.system_calls import refuses_clone3

ZMQ_THREADS = 2
"""Threads that a ZeroMQ context starts with its first socket: one for its I/O, one that closes sockets."""

_GONE_LIMIT = 1.0
"""Seconds for threads that have ended to be gone for the system, too."""


def check_threads(count: int) -> None:
    """Look whether ``count`` more threads could be started now, by starting them for a moment.

    :raises OSError: EAGAIN, if the system refuses one
    """
    started: list[threading.Thread] = []
    go = threading.Event()
    try:
        for _ in range(count):
            thread = threading.Thread(target=go.wait, name="anyengine-probe", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise none_left(f"{count} more threads, of which {len(started)} could be started") from None
    finally:
        go.set()
        for thread in started:
            thread.join()
        _await_gone([thread.native_id for thread in started])


def none_left(what: str) -> OSError:
    """The error for threads or a process that this process needs and does not get, naming the limits that there are."""
    return OSError(errno.EAGAIN, f"this process needs {what}: {_limits()}")


def _await_gone(ids: list[int | None]) -> None:
    # A thread that was joined still counts, until the kernel has cleared it away.
    if sys.platform != "linux" or not os.path.exists("/proc/self/task"):
        time.sleep(0.005)
        return
    deadline = time.monotonic() + _GONE_LIMIT
    while any(os.path.exists(f"/proc/self/task/{number}") for number in ids) and time.monotonic() < deadline:
        time.sleep(0)


def _limits() -> str:
    limits = [f"pids.max of its cgroup is {most}, and {now} are there" for most, now in _cgroup_limits()]
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.getuid() != 0:
        limits.append(f"its user may have {most} (ulimit -u)")
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if memory != resource.RLIM_INFINITY:
        limits.append(f"its address space is limited to {memory} bytes (ulimit -v), and each has a stack in it")
    if refuses_clone3():
        limits.append("clone3 is refused with EPERM, as by a seccomp filter that is older than the C library")
    return "; ".join(limits) or "the system has no more, or no memory for them"


def _cgroup_limits() -> list[tuple[str, str]]:
    """``pids.max`` and ``pids.current`` of this process's cgroup and those above it, where there is a limit."""
    found: list[tuple[str, str]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "pids"):
                continue
            root = Path("/sys/fs/cgroup") / controllers
            directory = root / path.lstrip("/")
            for level in (directory, *directory.parents):
                with contextlib.suppress(OSError):
                    most = (level / "pids.max").read_text().strip()
                    if most != "max":
                        found.append((most, (level / "pids.current").read_text().strip()))
                if level == root:
                    break
    return found
