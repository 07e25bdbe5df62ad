"""The child's end of the lifeline: a pipe whose other end only the parent has, so that its end is the parent's end.

On Linux the kernel itself is told to kill this process group when the pipe's state changes: no thread and no Python
code is needed for it, and it works while native code holds the GIL. PR_SET_PDEATHSIG would follow the *thread* that
forked, and the parent may fork from a worker thread that ends.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading

from anyengine.protocol.bootstrap import Bootstrap

_F_SETSIG = 10  # <fcntl.h>, Linux; Python's fcntl module does not name it


def read_bootstrap(fd: int) -> Bootstrap:
    """Read the record that the parent left in a file, and close the file."""
    with open(fd, "rb") as file:
        return Bootstrap.decode(file.read())


def arm(fd: int) -> None:
    """From now on this process and its group end when the parent does, however the parent ends."""
    os.set_inheritable(fd, False)
    if sys.platform == "linux" and _is_armed_by_kernel(fd):
        try:
            os.read(fd, 1)  # the parent may have gone before O_ASYNC was set; nothing is ever written
        except BlockingIOError:
            return
        os.killpg(os.getpgrp(), signal.SIGKILL)
    else:
        threading.Thread(target=_wait_for_end, args=(fd,), name="anyengine-lifeline", daemon=True).start()


def _is_armed_by_kernel(fd: int) -> bool:
    """Have the kernel send the signal; False where a sandbox refuses that."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    except OSError:
        return False
    return True


def _wait_for_end(fd: int) -> None:
    os.read(fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
