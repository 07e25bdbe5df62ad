"""When the clients of an engine are sent its own figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from anyengine.engine.control import SchedulerControl, SchedulerState

INTERVAL = 1.0
"""Seconds between two STATS messages while there is work."""

DELAY = 0.005
"""Seconds without work or input after which the last figures are sent: whoever was just answered may ask again at once,
and is not to wait for figures."""


class Figures:
    """The figures of one engine on their way to its clients.

    ``due`` is set by whoever changes what they may say. At ``overdue_at``, in seconds of ``time.monotonic``, they do
    not wait for a quiet moment any longer.
    """

    __slots__ = ("_send", "_state_told", "_were_empty", "due", "overdue_at")

    def __init__(self, send: Callable[[Mapping[str, float]], None]) -> None:
        self.due: bool = False
        self.overdue_at: float = 0.0
        self._send = send
        self._were_empty = True
        self._state_told = SchedulerState.RUNNING

    def are_overdue(self, control: SchedulerControl) -> bool:
        """Whether an engine without work sends them before it looks for input: a pause is told at once."""
        return control.state is not self._state_told or (self.due and time.monotonic() >= self.overdue_at)

    def send(self, control: SchedulerControl) -> None:
        """Send them as they are now, if there are any or were before."""
        self.due = False
        self.overdue_at = time.monotonic() + INTERVAL
        self._state_told = control.state
        figures = control.statistics()
        if not figures and self._were_empty:
            return
        self._were_empty = not figures  # empty figures take back those of before
        self._send(figures)
