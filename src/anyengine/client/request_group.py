"""Many requests of which each is wanted as a whole: no task, stream or event for any of them."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import anyio

from anyengine.client.request_stream import RELEASE_LIMIT, completion_of
from anyengine.client.waiters import ErrorFactory
from anyengine.errors import EngineError, RequestError
from anyengine.params import RequestOptions, SamplingParams
from anyengine.protocol.outputs import OutputDetails, StepOutputs
from anyengine.protocol.requests import MAX_PROMPTS
from anyengine.protocol.sampling import NO_OPTIONS
from anyengine.types import Completion

if TYPE_CHECKING:
    from anyengine.client.session import EngineSession

IndexedPrompt = tuple[int, Sequence[int]]
"""The place of a prompt among the prompts, and its token ids (u32)."""

MESSAGE_TOKENS = 2**18
"""Prompt tokens up to which requests share a message, and more than which are sent in one turn of the event loop by one
request alone."""

_KEPT_TOKENS = 2**16
"""Tokens of a steady batch that are kept as columns: to turn them into rows takes a millisecond."""

IndexedResult = tuple[int, Completion | RequestError]
"""The place of a prompt among the prompts, and what came of it."""


class RequestGroup:
    """Requests that run side by side, alike in all but their prompts. Their results come in the order of their ends.

    Whoever makes it must have :meth:`run` running as long as it is used, unless the session takes requests now and
    ``limit`` is not reached. When the engine dies, its error follows the results from before.

    :param limit: requests that are under way at a time; the others wait here, and follow as soon as one has ended
    """

    def __init__(self, session: EngineSession, sampling: SamplingParams, options: RequestOptions, limit: int) -> None:
        self._session = session
        self._sampling = sampling
        self._options = options
        self._limit = limit
        self._indices: dict[int, int] = {}  # of live requests, by their handles
        self._tokens: dict[int, list[int]] = {}
        self._details: dict[int, list[OutputDetails]] = {}
        # A steady batch has the same handles in each step: its columns are kept, and turned to rows when that changes.
        self._column: bytes | None = None
        self._handles: Sequence[int] = ()
        self._steps: list[Sequence[int]] = []
        self._results: list[IndexedResult] = []
        self._failure: Callable[[], Exception] | None = None  # why no more requests can be sent
        self._is_left = False
        self._queue: deque[IndexedPrompt] = deque()  # beyond the limit
        self._backlog: deque[IndexedPrompt] = deque()  # within the limit, and not sent yet
        self._backlog_grew = anyio.Event()
        self._goes_on = False  # more is sent in the loop's next turn
        self._aborting = 0  # requests of which the engine has not let go yet
        self._released = anyio.Event()
        self._then: Callable[[], object] | None = None  # when it has
        self._wake: Callable[[], object] | None = None
        self._noticed = False

    # ---- for its owner, in the event loop ----

    def add(self, prompts: Sequence[IndexedPrompt]) -> None:
        """Send more requests, now or as soon as the engine takes them."""
        if self._failure is None and not self._is_left:
            self._queue.extend(prompts)
            self._top_up()
            self.wake()

    def results(self) -> list[IndexedResult]:
        """The results that have come since the last time, perhaps none.

        :raises EngineError: if the engine died or the client was closed, after all results from before
        """
        results, self._results = self._results, []
        if not results and self._failure is not None and not self._indices:
            error = self._failure()
            raise self._session.told(error) if isinstance(error, EngineError) else error
        return results

    def listen(self, wake: Callable[[], object]) -> None:
        """Have ``wake`` called once when there is something to take, perhaps at once."""
        self._wake = wake
        self.wake()

    def stop_listening(self) -> None:
        """Nobody is to be woken any more."""
        self._wake = None

    def abort(self, then: Callable[[], object] | None = None) -> None:
        """Abort the requests that run, without waiting for anything, and take no more.

        :param then: called when the engine has let go of them, perhaps at once
        """
        if not self._is_left:
            self._is_left = True
            self._queue.clear()
            self._backlog.clear()
            self._aborting = len(self._indices)
            self._session.abort(list(self._indices))
            self._indices.clear()
        if then is not None:
            if self._aborting and not self._released.is_set():
                self._then = then
            else:
                then()

    async def run(self) -> None:
        """Send what cannot be sent at once. It ends by cancellation alone, which aborts the requests that run."""
        try:
            while True:
                await self._backlog_grew.wait()
                self._backlog_grew = anyio.Event()
                try:
                    while self._backlog:
                        await self._send_when_admitted()
                except Exception as error:
                    self._fail(error)
                    self.wake()
        finally:
            await self._leave()

    # ---- for the client's reader ----

    def push(self, outputs: StepOutputs) -> None:
        """The rows of its requests in one step."""
        if outputs.counts is None and not outputs.details:
            column = outputs.handle_bytes()
            if column != self._column:
                self._turn_columns()
                self._column, self._handles = column, outputs.handles
            self._steps.append(outputs.token_ids)
            if len(self._steps) * len(self._handles) >= _KEPT_TOKENS:
                self._turn_columns()
            return
        self._turn_columns()
        self._take_rows(outputs.rows())

    def wake(self) -> None:
        """Tell whoever listens, if there is something to take."""
        self._noticed = False
        if self._wake is not None and (self._results or (self._failure is not None and not self._indices)):
            wake, self._wake = self._wake, None
            wake()

    def close(self, error: ErrorFactory) -> None:
        """Nothing more will come: ``error`` follows the results that are there."""
        if self._failure is None:
            self._failure = error
        self._indices.clear()
        self._queue.clear()
        self._backlog.clear()
        self._let_go()
        self.wake()

    def release(self, handle: int) -> None:
        """The engine has let go of one of its requests, which was aborted; one that is still wanted gets an end."""
        if handle in self._indices:
            self._turn_columns()
            self._take_rows([(handle, (), OutputDetails(finish_reason="abort"))])
            return
        self._aborting -= 1
        if not self._aborting:
            self._let_go()

    def _let_go(self) -> None:
        self._released.set()
        then, self._then = self._then, None
        if then is not None:
            then()

    # ---- sending ----

    def _top_up(self) -> None:
        """Send what may be sent now, as much as this turn of the loop has time for.

        Whoever listens has to be told afterwards.
        """
        left = MESSAGE_TOKENS
        while not self._goes_on:
            while self._queue and len(self._indices) + len(self._backlog) < self._limit:
                self._backlog.append(self._queue.popleft())
            if not self._backlog:
                return
            if not self._session.takes_requests_now:
                self._backlog_grew.set()
                return
            left -= self._send_backlog()
            if left <= 0 and (self._queue or self._backlog):
                self._goes_on = True
                self._session.turns.call_next(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        self._top_up()
        self.wake()

    async def _send_when_admitted(self) -> None:
        try:
            await self._session.admit(None, NO_OPTIONS, [])
        except RequestError as error:
            if self._backlog:
                self._refuse([self._backlog.popleft()], error)
        else:
            if self._backlog:
                self._send_backlog()
            else:  # it has been sent meanwhile
                self._session.admission.update()
        self._top_up()
        self.wake()

    def _send_backlog(self) -> int:
        """Send as many requests as may live and share a message, one at least; returns the tokens of their prompts."""
        room = max(1, min(len(self._backlog), self._session.admission.room, MAX_PROMPTS))
        batch = [self._backlog.popleft()]
        tokens = len(batch[0][1])
        while len(batch) < room and tokens + len(self._backlog[0][1]) <= MESSAGE_TOKENS:
            batch.append(self._backlog.popleft())
            tokens += len(batch[-1][1])
        try:
            handles, _ = self._session.register(
                self, [prompt for _, prompt in batch], None, self._sampling, self._options
            )
        except RequestError as error:  # each is refused for the same reason
            self._refuse(batch, error)
        except EngineError as error:
            self._fail(error)
        else:
            for handle, (index, _) in zip(handles, batch, strict=True):
                self._indices[handle] = index
                self._tokens[handle] = []
        return tokens

    def _refuse(self, batch: Sequence[IndexedPrompt], error: RequestError) -> None:
        self._results += [(index, error) for index, _ in batch]

    def _fail(self, error: Exception) -> None:
        """No more can be sent. What runs may still end; ``error`` comes after that."""
        if self._failure is None:
            self._failure = functools.partial(copy.copy, error.with_traceback(None))
        self._queue.clear()
        self._backlog.clear()

    # ---- receiving ----

    def _turn_columns(self) -> None:
        if self._steps:
            tokens = self._tokens
            if len(set(self._handles)) == len(self._handles):
                rows = zip(*self._steps, strict=True)
                for handle, row in zip(self._handles, rows, strict=True):
                    tokens[handle].extend(row)
            else:  # a request has several rows in each step
                for step in self._steps:
                    for handle, token in zip(self._handles, step, strict=True):
                        tokens[handle].append(token)
            self._steps.clear()
        self._column = None

    def _take_rows(self, rows: Iterable[tuple[int, Sequence[int], OutputDetails | None]]) -> None:
        ended: list[tuple[int, int]] = []
        for handle, tokens, details in rows:
            self._tokens[handle].extend(tokens)
            if details is not None:
                self._details.setdefault(handle, []).append(details)
                if details.finish_reason is not None:
                    ended.append((handle, self._indices.pop(handle)))
        # Before their results are made: the engine may have nothing else to do.
        self._top_up()
        self._results += [(index, self._result(handle)) for handle, index in ended]
        if ended and self._wake is not None and not self._noticed:
            self._noticed = True
            self._session.delivery.unparked.appendleft(self)

    def _result(self, handle: int) -> Completion | RequestError:
        tokens, details = self._tokens.pop(handle), self._details.pop(handle)
        if details[-1].finish_reason == "error":
            return details[-1].to_error(handle)
        return completion_of(str(handle), tokens, details)

    async def _leave(self) -> None:
        """Abort what runs, and wait, shielded and bounded, until the engine has let go of it."""
        self.abort()
        if self._aborting:
            with self._session.limits.within(RELEASE_LIMIT, shield=True):
                await self._released.wait()
