"""System calls that a container may refuse: :func:`refuse` has the kernel do so, by a seccomp filter."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from typing import NamedTuple

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
REASON = "the filter knows the system calls of Linux on x86-64"

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CALL = 0
"""Where the kernel shows a filter the number of the call."""
_ARGUMENTS = 16
"""Where it shows it the first argument, in 64 bits, the lower half first."""


class _Call(NamedTuple):
    number: int
    argument: int = 1
    """Which argument a rule may name, the first being 0."""
    mask: int = 0xFFFFFFFF
    """What of it counts."""


_CALLS = {
    "lseek": _Call(8),
    "sched_yield": _Call(24),
    "socket": _Call(41, argument=0),
    "socketpair": _Call(53, mask=0xF),  # beside the kind there are flags
    "fcntl": _Call(72),
    "flock": _Call(73),
    "chmod": _Call(90),
    "sigaltstack": _Call(131),
    "sched_setscheduler": _Call(144),
    "prctl": _Call(157),
    "sched_getaffinity": _Call(204),
    "waitid": _Call(247),
    "eventfd2": _Call(290),
    "memfd_create": _Call(319),
    "pidfd_open": _Call(434),
    "clone3": _Call(435),
}


def refuse(*rules: str) -> None:
    """Have system calls fail from now on, in this process and in all that it starts.

    Each rule names a call and an error, ``"pidfd_open:EPERM"``; or also an argument with which alone it fails,
    ``"fcntl=10:EPERM"``.
    """
    program = b""
    for rule in rules:
        left, _, error = rule.partition(":")
        name, _, argument = left.partition("=")
        call = _CALLS[name]
        answer = _step(_RETURN, _ERRNO | getattr(errno, error))
        if argument:
            is_other = _step(_JUMP_IF_EQUAL, int(argument), 0, 1)
            answer = _step(_LOAD, _ARGUMENTS + 8 * call.argument) + _step(_AND, call.mask) + is_other + answer
        program += _step(_LOAD, _CALL) + _step(_JUMP_IF_EQUAL, call.number, 0, len(answer) // 8) + answer
    program += _step(_RETURN, _ALLOW)
    code = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, header, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
