"""What the loop's thread leaves for other threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from anyengine.client.session import EngineSession
from anyengine.errors import EngineError
from anyengine.protocol.outputs import StepOutputs
from anyengine.sync_client.portal_call import PortalWait

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


class StepsArrival:
    """Moves the steps that have come to a handover, for a thread that waits for them."""

    def __init__(self, session: EngineSession, steps: Handover[StepOutputs], wait: PortalWait) -> None:
        self._session = session
        self._steps = steps
        self._wait = wait

    def notice(self) -> None:
        """A step has come: move it, and what comes with it, when this slice of messages has been read."""
        self._session.queue.stop_listening()
        self._session.delivery.unparked.appendleft(self)

    def wake(self) -> None:
        """Move them, and let the thread go on."""
        if self._wait.gone.is_set:
            return  # it was interrupted; the next one finds them where they are
        try:
            self._steps.extend(self._session.queue.take())
        except EngineError as error:
            self._wait.fail(self._session.told(error))
        else:
            self._wait.finish()
