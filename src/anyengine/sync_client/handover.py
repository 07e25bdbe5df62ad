"""What the loop's thread leaves for other threads: the steps for ``get_output``."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

import anyio

from anyengine.client.session import EngineSession
from anyengine.errors import EngineClosedError, EngineError
from anyengine.protocol.outputs import StepOutputs
from anyengine.sync_client.portal_call import Latch, Listener


class StepHandover:
    """A queue from which any thread takes one step at a time, and one thread at a time waits.

    An interrupt of either loses nothing.
    """

    def __init__(self) -> None:
        self._steps: deque[StepOutputs] = deque()
        self._error: BaseException | None = None
        self._roused = False
        self._waiter: Latch | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits."""
        return self._waiter is not None

    # ---- in the loop's thread ----

    def extend(self, steps: Iterable[StepOutputs]) -> None:
        """Append steps."""
        with self._lock:
            self._steps.extend(steps)
            if self._waiter is not None:
                self._waiter.set()

    def rouse(self, error: BaseException | None) -> None:
        """Have whoever waits, now or next, look again, and ``error`` raised once after the steps from before."""
        with self._lock:
            self._error = error
            self._roused = True
            if self._waiter is not None:
                self._waiter.set()

    def replace(self, change: Callable[[deque[StepOutputs]], deque[StepOutputs]]) -> None:
        """Put what ``change`` makes of the steps in their place."""
        with self._lock:
            self._steps = change(self._steps)

    # ---- in any thread ----

    def take(self) -> StepOutputs | None:
        """The next step, or None; raises the error that follows it."""
        step: StepOutputs | None = None
        taken = False
        try:
            with self._lock:
                if self._steps:
                    # CPython raises KeyboardInterrupt when a call returns or a loop turns, so not between these lines;
                    # popleft would return a step that nobody has a name for yet.
                    step = self._steps[0]
                    del self._steps[0]
                    taken = True
            if step is None and self._error is not None:
                self._raise_error()
            return step
        except BaseException:
            if taken and step is not None:
                with self._lock:
                    self._steps.appendleft(step)
            raise

    def wait(self) -> None:
        """Return when there may be something to take.

        :raises anyio.BusyResourceError: if another thread waits
        """
        waiter = Latch()
        try:
            with self._lock:
                if self._steps or self._roused:
                    self._roused = False
                    return
                if self._waiter is not None:
                    raise anyio.BusyResourceError("reading outputs from")
                self._waiter = waiter
            waiter.wait()
        finally:  # an interrupt may come between any two lines
            if self._waiter is waiter:
                self._waiter = None
                self._roused = False

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame


class StepSubscription(Listener):
    """Moves the steps that come to a handover, slice by slice, until the queue that they come from is closed."""

    def __init__(self, session: EngineSession, steps: StepHandover) -> None:
        super().__init__()
        self._session = session
        self._steps = steps
        self._noticed = False
        self.is_over: bool = False

    def begin(self) -> None:
        """Subscribe, for a thread that waits: it is told if nothing will come."""
        try:
            while not self._session.queue.listen(self._notice):
                self._steps.extend(self._session.queue.take())
        except EngineError as error:
            self._end(self._session.told(error))
        except BaseException as error:
            self._end(error)

    def _notice(self) -> None:
        # Moved, with what comes after it, when this slice of messages has been read.
        if not self._noticed:
            self._noticed = True
            self._session.delivery.unparked.appendleft(self)

    def wake(self) -> None:
        """Move what has come."""
        self._noticed = False
        queue = self._session.queue
        steps = queue.get_outputs_nowait()
        if steps:
            self._steps.extend(steps)
        if queue.is_closed and not self.is_over:
            queue.stop_listening()
            if steps or not self._steps.is_awaited:
                self._end(None)  # why is for the next one to be told who asks; perhaps nobody does
                return
            try:
                queue.take()
            except EngineError as error:
                self._end(self._session.told(error))

    def close(self) -> None:
        """The loop has ended."""
        self._end(EngineClosedError("the client was closed"))

    def _end(self, error: BaseException | None) -> None:
        if not self.is_over:
            self.is_over = True
            self._steps.rouse(error)
