"""Requests that wait for a place for their adapter, in the order of their turns."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from anyengine.params import LoRARequest

PATIENCE = 128
"""Requests that may overtake the one whose turn is next. More make adapters change less often, and waiting longer."""


class Held(NamedTuple):
    """A request that waits; ``enqueue`` hands it to vLLM."""

    request_id: str
    lora: LoRARequest
    enqueue: Callable[[], None]
    priority: int

    @property
    def number(self) -> int:
        """Its adapter's."""
        return self.lora.lora_int_id


class HeldRequests:
    """Ordered by priority, and those of one priority as they came.

    A request for an adapter that is in use goes past those that wait for others, or places would be empty for no good
    reason. When ``PATIENCE`` have done so, the first in turn is overtaken by none any more that is not more urgent.
    """

    def __init__(self) -> None:
        self.numbers: Counter[int] = Counter()
        """How many wait for each adapter."""
        self._queue: list[Held] = []
        self._ids: set[str] = set()
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._queue)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ids

    @property
    def is_overdue(self) -> bool:
        """Whether the first has been overtaken as often as it may be."""
        return bool(self._queue) and self._overtaken >= PATIENCE

    def holds_back(self, priority: int) -> bool:
        """Whether a new request has to wait behind those that are here, whatever its adapter."""
        return self.is_overdue and priority >= self._queue[0].priority

    def overtake(self, priority: int) -> None:
        """Take note that a request went past those that are here."""
        if self._queue and priority >= self._queue[0].priority:
            self._overtaken += 1

    def add(self, request: Held) -> None:
        """Let a request wait."""
        insort(self._queue, request, key=lambda held: held.priority)
        self._ids.add(request.request_id)
        self.numbers[request.number] += 1
        if self._queue[0] is request:
            self._overtaken = 0

    def take(self, request_ids: Collection[str]) -> None:
        """These wait no more; all of them are here."""
        gone = set(request_ids)
        if self._queue and self._queue[0].request_id in gone:
            self._overtaken = 0
        for request in self._queue:
            if request.request_id in gone:
                self.numbers[request.number] -= 1
        self.numbers = +self.numbers
        self._queue = [request for request in self._queue if request.request_id not in gone]
        self._ids -= gone
