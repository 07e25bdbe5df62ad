"""What the loop's thread leaves for other threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Handover(Generic[T]):
    """A queue from which any thread takes one item at a time. An interrupt while it takes one loses nothing."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def extend(self, items: Iterable[T]) -> None:
        """Append items."""
        with self._lock:
            self._items.extend(items)

    def replace(self, change: Callable[[deque[T]], deque[T]]) -> None:
        """Put what ``change`` makes of the items in their place."""
        with self._lock:
            self._items = change(self._items)

    def take(self) -> T | None:
        """The next item, or None."""
        item: T | None = None
        taken = False
        try:
            with self._lock:
                if self._items:
                    # CPython raises KeyboardInterrupt when a call returns or a loop turns, so not between these lines;
                    # popleft would return an item that nobody has a name for yet.
                    item = self._items[0]
                    del self._items[0]
                    taken = True
            return item
        except BaseException:
            if taken and item is not None:
                with self._lock:
                    self._items.appendleft(item)
            raise
