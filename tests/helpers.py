"""What several tiers of tests use: waiting for conditions, and looking at processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import anyio

BUSY = 30.0
"""Seconds that a busy machine may need for what takes none on a quiet one. No promise is measured by it."""


async def until(condition: Callable[[], object], limit: float = BUSY) -> None:
    """Return when ``condition()`` is true; fail after ``limit`` seconds."""
    with anyio.fail_after(limit):
        while not condition():
            await anyio.sleep(0.005)


def until_sync(condition: Callable[[], object], limit: float = BUSY) -> None:
    """The same without an event loop."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in (b"Z", b"X")


def children_of(pid: int) -> list[int]:
    """The direct children of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def kill(pid: int, number: int) -> None:
    """Send a signal."""
    os.kill(pid, number)
