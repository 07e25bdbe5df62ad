"""Moments that travel as a token: microseconds of a clock that all processes of the machine share."""

from __future__ import annotations

import time

_MASK = 2**31 - 1


def stamp() -> int:
    """Now, as a token id."""
    return time.monotonic_ns() // 1000 & _MASK


def age(token: int) -> int:
    """Microseconds since :func:`stamp`, in whichever process."""
    return (stamp() - token) & _MASK


def wait_until(due: float) -> None:
    """Sleep until ``due`` on the monotonic clock: a step on an accelerator keeps its thread waiting too."""
    delay = due - time.monotonic()
    if delay > 0:
        time.sleep(delay)
