"""How many requests a client may have at a time, and what becomes of one more."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Generator
from typing import Literal

import anyio

from anyengine.client.turns import Turns
from anyengine.client.waiters import ErrorFactory
from anyengine.errors import TooManyRequestsError

WhenFull = Literal["refuse", "wait"]


class Admission:
    """Lets at most ``limit`` requests live, counted by ``live``. In mode ``"wait"`` others queue in order of arrival.

    A request is let in by :meth:`enter`, and must then be registered without a checkpoint between. :meth:`update` is
    called whenever the number of live requests may have fallen. Those who waited go on in their ``turns``.
    """

    def __init__(self, limit: int | None, when_full: WhenFull, live: Callable[[], int], turns: Turns) -> None:
        self._limit = limit
        self._when_full: WhenFull = when_full
        self._live = live
        self._turns = turns
        self._queue: deque[_Turn] = deque()
        self._called = 0  # out of the queue, and not back from the wait yet
        self._held = 0  # let in, and not registered yet

    @property
    def waiting(self) -> int:
        """Requests that wait to be let in."""
        return len(self._queue) + self._called

    def _is_full(self) -> bool:
        return self._limit is not None and self._live() + self._called + self._held >= self._limit

    @property
    def room(self) -> int:
        """How many more requests may live now, not counting places that others wait for."""
        if self._limit is None:
            return sys.maxsize
        return 0 if self._queue else max(0, self._limit - self._live() - self._called - self._held)

    def check(self) -> None:
        """:raises TooManyRequestsError: if one more request would be refused now"""
        if self._when_full == "refuse" and self._limit is not None and self._is_full():
            raise TooManyRequestsError(
                f"the client has {self._limit} live requests, which is its max_requests (aborted ones count until the "
                f"engine lets go of them); wait for one to end or cancel one, or open the client with when_full='wait'",
                self._limit,
            )

    async def enter(self) -> None:
        """Return when one more request may live.

        :raises TooManyRequestsError: if it may not, and is not to wait
        :raises EngineError: if all who wait are dismissed
        """
        self.check()
        if not self._queue and not self._is_full():
            return
        turn = _Turn()
        self._queue.append(turn)
        try:
            await turn.came.wait()
        except BaseException:
            if turn.is_called:
                self._called -= 1
                self.update()
            else:
                self._queue.remove(turn)
            raise
        self._called -= 1
        if turn.error is not None:
            raise turn.error()

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """Keep the place of a request that was let in; from the end of the block it has to be registered at once."""
        self._held += 1
        try:
            yield
        except BaseException:
            self._held -= 1
            self.update()
            raise
        self._held -= 1

    def update(self) -> None:
        """Let in who waits, as far as there is room."""
        while self._queue and not self._is_full():
            self._call(None)

    def dismiss(self, error: ErrorFactory) -> None:
        """The engine or the client is gone: whoever waits gets a fresh ``error``."""
        while self._queue:
            self._call(error)

    def _call(self, error: ErrorFactory | None) -> None:
        turn = self._queue.popleft()
        turn.error = error
        turn.is_called = True
        self._called += 1
        self._turns.call(turn.came.set)


class _Turn:
    """Somebody who waits to be let in, and is told ``error`` if that will not happen."""

    __slots__ = ("came", "error", "is_called")

    def __init__(self) -> None:
        self.came = anyio.Event()
        self.is_called = False
        self.error: ErrorFactory | None = None
