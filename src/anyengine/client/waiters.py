"""What waits for an engine: a utility call, and the queue of whole steps. Each has one ``close(error)``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from anyengine.client.turns import Turns
from anyengine.errors import EngineError, UnencodableResultError, UtilityError
from anyengine.protocol.outputs import StepOutputs
from anyengine.transport.wakeup import Wakeup

CHECK_EVERY = 16
"""Reads without looking for a cancellation. On asyncio, AnyIO does not deliver it to a task whose wait is over in the
turn in which it began, and so may always be that of one of many readers."""

ErrorFactory = Callable[[], EngineError]
"""Makes a fresh exception for each waiter; they share what it says, not the object with its traceback."""


class PendingCall:
    """A utility call whose answer has not come."""

    __slots__ = ("_error", "_turns", "_value", "_wakeup", "method", "rank")

    def __init__(self, method: str, rank: int, wakeup: Wakeup, turns: Turns) -> None:
        self.method: str = method
        self.rank: int = rank
        self._wakeup = wakeup
        self._turns = turns
        self._value: Any = None
        self._error: ErrorFactory | None = None

    def answer(self, error: tuple[str, str, str | None] | None, value: Any) -> None:
        """Resolve the call with what the engine said."""
        self._value = value
        if error is not None:
            kind, message, traceback = error
            failure = UnencodableResultError if kind == "UnencodableError" else UtilityError
            method, rank = self.method, self.rank  # and not this object, which would be in a cycle
            self._error = lambda: failure(method, message, rank=rank, exception_type=kind, traceback=traceback)
        self._wakeup.set()

    def close(self, error: ErrorFactory) -> None:
        """Resolve the call with an error; its task is woken in its turn."""
        self._error = error
        self._turns.call(self._wakeup.set)

    async def wait(self) -> None:
        """Return when the call is resolved."""
        await self._wakeup

    def take(self) -> Any:
        """The call's value.

        :raises EngineError: if the call failed
        """
        if self._error is not None:
            raise self._error()
        return self._value


class OutputQueue:
    """Whole steps for ``get_output``. One reader at a time may wait."""

    def __init__(self, wakeup_type: Callable[[], Wakeup]) -> None:
        self._wakeup_type = wakeup_type
        self._steps: deque[StepOutputs] = deque()
        self._later: deque[StepOutputs] = deque()  # of the engine's next life: they follow the error
        self._error: ErrorFactory | None = None
        self._told = False
        self._reopened = False
        self._wake: Callable[[], object] | None = None  # of the reader that waits
        self._unchecked = 0
        self._releases: dict[int, anyio.Event] = {}  # of aborted requests whose release somebody awaits

    def __len__(self) -> int:
        return len(self._steps) + len(self._later)

    @property
    def has_told(self) -> bool:
        """Whether the error of a death has been raised, and nothing is left of what came before it."""
        return self._error is not None and self._told and not self._steps

    @property
    def is_closed(self) -> bool:
        """Whether an error is to be raised when what came before it has been read."""
        return self._error is not None

    def push(self, outputs: StepOutputs) -> None:
        """Append a step."""
        (self._later if self._reopened else self._steps).append(outputs)
        if self._wake is not None:
            self._wake()

    def drop(self, handles: Iterable[int]) -> None:
        """Forget what is queued of these requests, which their owner aborted."""
        gone = set(handles)
        self._steps = without_rows(gone, self._steps)
        self._later = without_rows(gone, self._later)

    def release(self, handle: int) -> None:
        """The engine has let go of a request that was aborted."""
        event = self._releases.pop(handle, None)
        if event is not None:
            event.set()

    async def released(self, handles: Sequence[int]) -> None:
        """Return when the engine has let go of these requests, which were aborted, or has ended."""
        events = [self._releases.setdefault(handle, anyio.Event()) for handle in handles]
        try:
            for event in events:
                await event.wait()
        finally:
            for handle in handles:
                self._releases.pop(handle, None)

    def close(self, error: ErrorFactory, *, owed: bool) -> None:
        """What is queued can still be read; then comes ``error``, for every call.

        It is ``owed`` if requests end by it: then it comes even if the queue is opened again before anybody looks.
        """
        if self._error is None or self._reopened:
            self._steps += self._later
            self._later.clear()
            self._told = not (owed or self._reopened)
            self._error, self._reopened = error, False
            if self._wake is not None:
                self._wake()
        for handle in tuple(self._releases):
            self.release(handle)

    def reopen(self) -> None:
        """The engine lives again: new steps come, after the error of its death if that is still owed."""
        if self._error is not None and self._told:
            self._begin_anew()
        else:
            self._reopened = self._error is not None

    def _begin_anew(self) -> None:
        self._steps += self._later
        self._later.clear()
        self._error, self._reopened = None, False

    async def get(self) -> StepOutputs:
        """The next step.

        :raises EngineError: if the queue was closed and is empty
        :raises anyio.BusyResourceError: if another task waits
        """
        # A checkpoint for each step would cost more than the step. A batch is read in one go instead: its size is
        # bounded by the time that the reader may hold the loop, and a cancellation is seen within it.
        self._unchecked += 1
        if self._unchecked >= CHECK_EVERY:
            self._unchecked = 0
            await checkpoint_if_cancelled()
        while not self._steps:
            self._check_free()
            if self._error is not None:
                await checkpoint()
                if self._error is not None:  # otherwise the engine lives again, and somebody was told
                    self._tell()
                continue
            arrival = self._wakeup_type()
            self._wake = arrival.set
            try:
                await arrival
            finally:
                self._wake = None
        return self._steps.popleft()

    def listen(self, wake: Callable[[], object]) -> bool:
        """Have ``wake`` called when there is something to take, unless there is already; whether it will be.

        It may be called several times, until :meth:`stop_listening`.

        :raises anyio.BusyResourceError: if another reader waits
        """
        self._check_free()
        if self._steps or self._error is not None:
            return False
        self._wake = wake
        return True

    def stop_listening(self) -> None:
        """The reader does not wait any more."""
        self._wake = None

    def take(self) -> list[StepOutputs]:
        """The steps that have come.

        :raises EngineError: if the queue was closed and is empty
        """
        if not self._steps and self._error is not None:
            self._tell()
        return self.get_outputs_nowait()

    def get_outputs_nowait(self) -> list[StepOutputs]:
        """The steps that have come already, without waiting; perhaps none."""
        steps = list(self._steps)
        self._steps.clear()
        return steps

    def _check_free(self) -> None:
        if self._wake is not None:
            raise anyio.BusyResourceError("reading outputs from")

    def _tell(self) -> None:
        error = self._error
        assert error is not None
        self._told = True
        if self._reopened:
            self._begin_anew()
        raise error()


def without_rows(gone: set[int], steps: Iterable[StepOutputs]) -> deque[StepOutputs]:
    """``steps`` without the rows of the requests ``gone``, and without steps of which nothing is left."""
    kept: deque[StepOutputs] = deque()
    for step in steps:
        rows = [handle not in gone for handle in step.handles]
        if all(rows):
            kept.append(step)
        elif any(rows):
            kept.append(step.select(rows))
    return kept
