"""How one task is woken once.

An ``anyio.Event`` does it too, and wakes many. On asyncio it is ten functions of Python deep each time it is made,
waited for and set; a future of the loop's own is one, which is what a stream of tokens takes for each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Protocol

import anyio


class Wakeup(Protocol):
    """Awaited once, by the task that it wakes. Setting it again changes nothing."""

    def set(self) -> None:
        """Wake the task, or have it not sleep at all."""
        ...

    def __await__(self) -> Generator[object, None, None]:
        """Return when it is set."""
        ...


class _FutureWakeup:
    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def __await__(self) -> Generator[object, None, None]:
        return self._future.__await__()


class _EventWakeup:
    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    def __await__(self) -> Generator[object, None, None]:
        return self._event.wait().__await__()


def wakeup_type() -> type[Wakeup]:
    """What wakes tasks in the event loop that runs."""
    return _FutureWakeup if in_asyncio() else _EventWakeup


def in_asyncio() -> bool:
    """Whether the caller is a task of asyncio; trio as a guest in asyncio's loop runs in none."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False
