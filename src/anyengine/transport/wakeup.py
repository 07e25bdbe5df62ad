"""How one task is woken once.

An ``anyio.Event`` does it too, and wakes many. To make one, wait for it and set it takes nineteen functions of Python
on asyncio, and a future two; a stream does it for each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Protocol, cast

import anyio
from anyio.lowlevel import current_token


class Wakeup(Protocol):
    """Awaited once, by the task that it wakes. Setting it again changes nothing."""

    def set(self) -> None:
        """Wake the task, or have it not sleep at all."""
        ...

    def __await__(self) -> Generator[object, None, None]:
        """Return when it is set."""
        ...


class _FutureWakeup(asyncio.Future[None]):
    def set(self) -> None:
        if not self.done():
            self.set_result(None)


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
    """Whether the caller is a task of asyncio, and not one of a trio that runs within a task or a loop of asyncio."""
    return isinstance(current_token().native_token, asyncio.AbstractEventLoop)


def run_soon_function() -> Callable[[Callable[[], object]], object]:
    """The function by which the event loop that runs is told to call another one in its next turn."""
    token = current_token().native_token
    if isinstance(token, asyncio.AbstractEventLoop):
        return token.call_soon
    return cast("Any", token).run_sync_soon
