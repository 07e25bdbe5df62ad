"""Limits in seconds that count while this process runs, and are believed when all that had come has been read.

A process that was stopped, or whose event loop was blocked, finds its own deadlines passed when it goes on, although
the answers lie in its sockets, or the engine was stopped with it. So a deadline of the loop's own says nothing about
the engine. Here one task counts the time in small steps: however long the loop stood still, that is one step. When a
limit is reached, the task first reads what has come.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NoReturn, Self

import anyio

STEP = 0.1
"""Seconds between two looks at the clock while a limit runs."""

STANDSTILL = 0.1
"""Seconds by which a look may be late on a busy machine; later ones come after a standstill."""

MOMENT = 0.05
"""Seconds that ZeroMQ's threads, which may have stood still as well, then have to read what lies in the kernel."""


class Limits:
    """All limits of one client that run. Those begun before or after :meth:`run` are the loop's own deadlines."""

    def __init__(self) -> None:
        self._pending: set[Limit] = set()
        self._begun = anyio.Event()
        self._sleep: anyio.CancelScope | None = None
        self._is_running = False
        self._ran = 0.0
        self._counted_at = 0.0
        self._was_late = False  # the last look, by more than a busy machine explains

    def within(self, seconds: float | None, *, shield: bool = False) -> Limit:
        """A block that ends after ``seconds``; None for no limit. ``shield`` as of ``anyio.CancelScope``."""
        return Limit(self, seconds, shield)

    async def run(self, catch_up: Callable[[], Awaitable[object]]) -> NoReturn:
        """Count, until cancelled.

        :param catch_up: reads all that has come by now and lets those have their turn who waited for it
        """
        self._is_running = True
        try:
            while True:
                if not self._pending:
                    self._begun = anyio.Event()
                    await self._begun.wait()
                next_look = min(STEP, min((limit.due for limit in self._pending), default=0.0) - self._ran)
                with anyio.CancelScope(deadline=anyio.current_time() + next_look) as self._sleep:
                    await anyio.sleep_forever()
                stood_still = self._count()
                if any(limit.due <= self._ran for limit in self._pending):
                    if stood_still:
                        await anyio.sleep(MOMENT)
                    await catch_up()
                    self._count()  # those that were begun a moment later need not wait for another reading
                    for limit in [limit for limit in self._pending if limit.due <= self._ran]:
                        self._pending.discard(limit)
                        limit.strike()
        finally:
            self._is_running = False
            for limit in self._pending:
                limit.set_deadline(limit.due - self._ran)

    def begin(self, limit: Limit, seconds: float) -> None:
        """Let a limit run, from now on or anew."""
        if not self._is_running:
            limit.set_deadline(seconds)
        if not self._pending:
            self._counted_at, self._was_late = time.monotonic(), False
        limit.due = self._ran + min(time.monotonic() - self._counted_at, STEP) + seconds
        self._pending.add(limit)
        self._begun.set()
        if seconds < STEP and self._sleep is not None:
            self._sleep.deadline = min(self._sleep.deadline, anyio.current_time() + seconds)

    def end(self, limit: Limit) -> None:
        """The limit's block is left."""
        self._pending.discard(limit)

    def _count(self) -> bool:
        """Count the time since the last look; whether this process stood still in it."""
        now = time.monotonic()
        passed, self._counted_at = now - self._counted_at, now
        stood_still = passed > STEP + STANDSTILL
        # In a standstill the engine may have stood still as well, so it counts as one look. A loop that is late at each
        # look is busy: its limits are reached in their time all the same.
        self._ran += STEP if stood_still and not self._was_late else passed
        self._was_late = stood_still
        return stood_still


class Limit:
    """A block that is cancelled when its seconds are over, which ``is_reached`` then says."""

    __slots__ = ("_limits", "_scope", "_seconds", "_shield", "due")

    def __init__(self, limits: Limits, seconds: float | None, shield: bool) -> None:
        self._limits = limits
        self._seconds = seconds
        self._shield = shield
        self.due: float = 0.0

    def __enter__(self) -> Self:
        self._scope = anyio.CancelScope(shield=self._shield)
        self._scope.__enter__()
        self.begin_anew()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._limits.end(self)
        return bool(self._scope.__exit__(kind, error, traceback))

    @property
    def is_reached(self) -> bool:
        """Whether the block was left because its time was over."""
        return self._scope.cancelled_caught

    def begin_anew(self) -> None:
        """Have all of its seconds count again, from now on."""
        if self._seconds is not None:
            self._limits.begin(self, self._seconds)

    def strike(self) -> None:
        """Its time is over."""
        self._scope.cancel()

    def set_deadline(self, seconds: float) -> None:
        """Have the loop's own clock count instead."""
        self._scope.deadline = anyio.current_time() + seconds
