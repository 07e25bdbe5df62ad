"""Bursts: what many tasks do at one moment is spread over as many turns of the event loop as it takes.

An event loop runs all tasks that are ready before it looks at its timers and sockets again. A thousand requests that
are sent, aborted or told of a death in one turn would hold it for tens of milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from anyengine.transport.wakeup import Wakeup, run_soon_function

AT_ONCE = 64
"""Tasks that get a turn at once. Each takes 10 to 40 us, and others may have to wait for two turns."""

_UNCOUNTED = 16
"""Turns that are given before the loop is asked to tell of its next one, which takes 10 us on trio."""


class Turns:
    """Lets :data:`AT_ONCE` tasks go on in one turn of the event loop, and the others in the following ones, in order.

    It runs in callbacks of the loop, so that no task has to be there for it. Made in the loop that it is for.
    """

    def __init__(self, wakeup_type: Callable[[], Wakeup]) -> None:
        self._wakeup_type = wakeup_type
        self._run_soon = run_soon_function()
        self._given = 0
        self._waiting: deque[Callable[[], object]] = deque()
        self._scheduled = False

    def take(self, limit: int = AT_ONCE) -> bool:
        """Whether the caller is one of the first ``limit`` and may go on in this turn; else it has to :meth:`wait`."""
        if self._given >= limit or self._waiting:
            return False
        self._count()
        return True

    async def wait(self) -> None:
        """Return when it is the caller's turn. Cancelling it gives the turn to nobody else."""
        arrival = self._wakeup_type()
        self._waiting.append(arrival.set)
        self._schedule()
        await arrival

    def call(self, wake: Callable[[], object]) -> None:
        """Call ``wake`` in this turn if it has room, else in one of the next. It must not raise."""
        if self.take():
            wake()
        else:
            self._waiting.append(wake)
            self._schedule()

    def call_next(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the next turn, before all who wait. It must not raise."""
        self._waiting.appendleft(function)
        self._schedule()

    def _count(self) -> None:
        self._given += 1
        if self._given >= _UNCOUNTED:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._run_soon(self._begin)

    def _begin(self) -> None:
        """A turn begins."""
        self._scheduled = False
        self._given = 0
        for _ in range(min(AT_ONCE, len(self._waiting))):
            self._count()
            self._waiting.popleft()()
        if self._waiting:
            self._schedule()
