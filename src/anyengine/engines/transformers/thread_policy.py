"""How many threads a step should have beside other processes: a policy without a clock, threads or torch.

The threads of a step meet at hundreds of barriers and wait there by spinning. Where each has a core, that is the
fastest way. Where one has to share its core, all wait for it, and two that share one take turns by the scheduler's
slice: then each barrier costs milliseconds, and a step a hundred times what it did. One thread fewer, and all have a
core again. Waiting without spinning, for which OpenMP has settings, costs a third of the speed of an idle machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

WINDOW = 0.2
"""Seconds of steps after which the policy judges them: a few, or one that was slow."""

_TOO_MANY_LOST = 1 / 3
"""Cores that may be lost to others: an application that takes its outputs costs a few per cent of one, and a busy
process at least a half."""

_LONGEST_TURN = 0.02
"""Seconds for which a thread that was interrupted waits for its turn at most. What one switch cannot explain is no
contention: threads also sleep, where a step has long parts for one thread alone."""

_FIRST_HOLD, _LONGEST_HOLD = 1.0, 64.0
"""Seconds of steps before more threads are tried. Each failure doubles it, so that a neighbour that comes and goes, or
one that cannot be seen, costs little."""

_PROBATION = 5.0
"""Seconds of steps after which more threads have proved themselves."""

_ENOUGH_FREE = 0.75
"""The part of a core that has to be free for one thread more."""


@dataclasses.dataclass(slots=True)
class Window:
    """What steps used together: seconds of wall time and of CPU time, and involuntary context switches."""

    wall: float = 0.0
    cpu: float = 0.0
    switches: int = 0


def cores_lost(threads: int, window: Window) -> float:
    """Return how many cores ``threads`` threads lost to others in this window, or 0 if that is tolerable."""
    unused = threads - window.cpu / window.wall
    lost = min(unused, window.switches * _LONGEST_TURN / window.wall)
    return lost if lost > _TOO_MANY_LOST else 0.0


class ThreadPolicy:
    """Chooses the number of threads: as many as have a core each, between 1 and ``limit``.

    ``threads`` is the choice for the next steps.
    """

    def __init__(self, limit: int) -> None:
        self.threads: int = limit
        self._limit = limit
        self._seconds = 0.0  # of steps with this number
        self._hold = _FIRST_HOLD
        self._proven = limit  # the last number that was not only tried

    def judge(self, window: Window, free_cores: Callable[[], float | None]) -> None:
        """Take in a window of steps that had ``threads`` threads, and choose anew.

        :param free_cores: how many cores were free for this process of late, used or not, None if that is unknown; it
            is called only where more threads are an option
        """
        self._seconds += window.wall
        if lost := cores_lost(self.threads, window):
            self._lower(max(1, self.threads - max(1, round(lost))))
            return
        if self._proven != self.threads and self._seconds >= _PROBATION:
            self._proven, self._hold = self.threads, _FIRST_HOLD
        if self.threads < self._limit and self._seconds >= self._hold:
            self._raise(free_cores())

    def _lower(self, threads: int) -> None:
        if self.threads > self._proven >= threads:
            self._hold = min(2 * self._hold, _LONGEST_HOLD)
        self.threads = self._proven = threads
        self._seconds = 0.0

    def _raise(self, free: float | None) -> None:
        wanted = 2 * self.threads if free is None else int(free + 1 - _ENOUGH_FREE)
        if wanted > self.threads:
            self.threads = min(self._limit, wanted)
            self._seconds = 0.0
