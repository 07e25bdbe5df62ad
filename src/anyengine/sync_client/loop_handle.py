"""An event loop as other threads see it: something that calls functions for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

from anyengine.process.threads import function_to_run_soon

Backend = Literal["asyncio", "trio"]

INTERRUPTS = 100
"""Interrupts that posting one function withstands; nobody presses a key as often as that."""


class LoopHandle:
    """Hands functions to a loop in another thread, from the moment in which that calls :meth:`begin`.

    :param backend: which loop it is
    """

    def __init__(self, backend: Backend) -> None:
        self.backend: Backend = backend
        self._run_soon: Callable[[Callable[[], object]], object] = _no_loop_yet

    def begin(self) -> None:
        """Take the running loop; called in its thread."""
        self._run_soon = function_to_run_soon()

    def post(self, function: Callable[[], object]) -> None:
        """Have the loop call a function soon, unless it ends first."""
        # The loop may end at any moment: then nothing is left for the function to do.
        with contextlib.suppress(RuntimeError):
            self._run_soon(function)

    def post_surely(self, function: Callable[[], object]) -> None:
        """Post what has to happen after an interrupt, though others interrupt this; the first is on its way up."""
        for _ in range(INTERRUPTS):
            with contextlib.suppress(BaseException):  # a signal's handler may raise anything
                self.post(function)
                return
        self.post(function)


def _no_loop_yet(function: Callable[[], object]) -> None:
    """Of a loop that has not started: whoever starts it looks for an interrupt then."""
