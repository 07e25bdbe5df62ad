"""System calls that a sandbox may refuse, and what the error says where there is no going on without one.

The filter of a container (seccomp) answers such a call with an error, mostly EPERM or ENOSYS, of which Python's own
message names neither the call nor the filter.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import sys
from collections.abc import Callable, Generator

_CLONE3 = 435  # of all architectures
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT)


@contextlib.contextmanager
def naming(call: str) -> Generator[None]:
    """Have an OSError that leaves the block say that it comes from ``call``, with the number that it has."""
    try:
        yield
    except OSError as error:
        hint = ", perhaps by a sandbox" if error.errno in _REFUSALS else ""
        raise OSError(error.errno, f"{call} failed{hint}: {error.strerror}") from error


def check_calls_of_zmq() -> None:
    """Make the system calls that a sandbox may refuse, and without which libzmq ends the process.

    :raises OSError: if one of them is refused; the message names it
    """
    if sys.platform == "linux":
        _check("eventfd2", lambda: os.close(os.eventfd(0)))
        _check("epoll_create1", lambda: select.epoll().close())
        _check("sched_getscheduler and sched_setscheduler", _set_scheduling_as_it_is)


def check_tcp_of_zmq() -> None:
    """The same for a socket of libzmq's that listens on a TCP port: it lists the network interfaces first.

    :raises OSError: if that is refused
    """
    if sys.platform == "linux":
        _check("socket(AF_NETLINK) for TCP", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close())


def _check(names: str, make: Callable[[], object]) -> None:
    try:
        make()
    except OSError as error:
        if error.errno in _REFUSALS:
            raise OSError(
                error.errno, f"ZeroMQ needs {names}, refused perhaps by a sandbox: {error.strerror}"
            ) from error


def _set_scheduling_as_it_is() -> None:
    # As libzmq does in its threads. Python's own functions fail wherever the C library is musl.
    libc = ctypes.CDLL(None)
    libc.pthread_self.restype = ctypes.c_void_p
    thread = ctypes.c_void_p(libc.pthread_self())
    policy, parameters = ctypes.c_int(), ctypes.create_string_buffer(64)
    code = libc.pthread_getschedparam(thread, ctypes.byref(policy), parameters)
    if code == 0:
        code = libc.pthread_setschedparam(thread, policy, parameters)
    if code != 0:
        raise OSError(code, os.strerror(code))


def refuses_clone3() -> bool:
    """Whether a sandbox refuses ``clone3`` so that there are no threads: with EPERM, where the C library asks for it.

    It does without if the error is ENOSYS. Filters that are older than the call answer EPERM to all that they do not
    know.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_CLONE3, None, 0) == -1 and ctypes.get_errno() == errno.EPERM
