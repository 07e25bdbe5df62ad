"""One request as its caller sees it: an async context manager to iterate over."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint, checkpoint_if_cancelled

from anyengine.client.waiters import CHECK_EVERY, ErrorFactory
from anyengine.errors import RequestStalledError
from anyengine.params import RequestOptions, SamplingParams
from anyengine.protocol.outputs import OutputDetails
from anyengine.protocol.sampling import NO_OPTIONS
from anyengine.transport.wakeup import Wakeup
from anyengine.types import Completion, FinishReason, RequestOutput

if TYPE_CHECKING:
    from anyengine.client.prompts import LongPrompt
    from anyengine.client.session import EngineSession

R = TypeVar("R", bound=RequestOutput)

RELEASE_LIMIT = 1.0
"""Seconds that leaving a block waits for the engine to acknowledge an abort. The abort itself is sent at once, or in
the loop's next turn. What had come by then is read first, as for every limit."""


class RequestStream:
    """The outputs of one request, made by ``client.open_request``.

    Entering sends the request; leaving early, however that happens, aborts it in the engine. A slow reader finds all
    that came meanwhile in one output. Iteration ends after the output with a ``finish_reason``; it raises
    :class:`RequestError` if the engine refused or failed this request, and ``EngineDeadError`` if the engine died,
    after everything that came before. One task at a time may iterate.
    """

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_details",
        "_embeds",
        "_entered",
        "_error",
        "_finish",
        "_handle",
        "_options",
        "_parked",
        "_released",
        "_sampling",
        "_session",
        "_stall_limit",
        "_token_ids",
        "_tokens",
        "_unchecked",
        "_wakes_early",
        "_whole",
        "request_id",
    )

    def __init__(
        self,
        session: EngineSession,
        token_ids: Sequence[int] | LongPrompt | None,
        embeds: object,
        sampling: SamplingParams,
        options: RequestOptions,
        request_id: str | None,
        stall_limit: float | None,
    ) -> None:
        self.request_id = request_id
        self._session = session
        self._token_ids = token_ids
        self._embeds = embeds
        self._sampling = sampling
        self._options = options
        self._whole = False  # the reader wants all of it in one piece
        self._stall_limit = stall_limit
        self._wakes_early = True  # before the end of the request
        self._entered = False
        self._handle: int | None = None
        self._tokens: list[int] = []
        self._details: list[OutputDetails] = []
        self._finish: FinishReason | None = None
        # Without a reference to this object, which would be a cycle.
        self._error: Callable[[], Exception] | None = None
        self._arrival: Wakeup | None = None
        self._parked = False  # the reader waits, and nothing has come that wakes it
        self._unchecked = 0
        self._released: Wakeup | None = None

    # ---- for the client's reader ----

    def push_token(self, token: int) -> None:
        """One more token and nothing else."""
        self._tokens.append(token)
        if self._parked and self._wakes_early:
            self._unpark()

    def keep_token(self, token: int) -> None:
        """One more token, without waking the reader: the end follows at once, and wakes it."""
        self._tokens.append(token)

    def push_row(self, tokens: Sequence[int], details: OutputDetails | None) -> None:
        """One row of a step."""
        self._tokens.extend(tokens)
        if details is not None:
            self._finish = details.finish_reason
            if details.finish_reason == "error":
                self._error = functools.partial(details.to_error, self.request_id)
            else:
                self._details.append(details)
            if self._finish is not None and self._released is not None:  # it ended before it could be aborted
                self._session.turns.call(self._released.set)
        if self._parked and (self._finish is not None or self._wakes_early):
            self._unpark()

    def _unpark(self) -> None:
        self._parked = False
        self._session.delivery.unparked.append(self)

    def wake(self) -> None:
        """Have the reader look at what came."""
        if self._arrival is not None:
            self._arrival.set()

    def close(self, error: ErrorFactory) -> None:
        """Nothing more will come: ``error`` follows what is there, unless the request had ended.

        Whoever waits is woken in its turn.
        """
        if self._finish is None:
            self._error = error
        self._parked = False
        self._session.turns.call(self._wake_all)

    def _wake_all(self) -> None:
        self.wake()
        if self._released is not None:
            self._released.set()

    def release(self, handle: int) -> None:
        """The engine has let go of this request, which the client aborted; who still reads it gets an end."""
        if self._finish is None and self._error is None:
            self.push_row((), OutputDetails(finish_reason="abort"))
        if self._released is not None:
            self._session.turns.call(self._released.set)

    # ---- for the caller ----

    async def __aenter__(self) -> Self:
        """Send the request.

        :raises RequestRefusedError: if a live request has the same id
        :raises EngineDeadError: if the engine is dead
        :raises EngineClosedError: if the client is closed
        :raises RuntimeError: if this request was sent before
        """
        self._session.belonging.require()
        if self._entered:
            raise RuntimeError("a request can be sent once; call open_request again")
        self._entered = True
        try:
            await checkpoint_if_cancelled()
            self._handle, trackers = await self._session.add(
                self, self._token_ids, self._embeds, self._sampling, self._options, self.request_id
            )
        except BaseException:
            self._entered = False  # it can be tried again
            raise
        if self.request_id is None:
            self.request_id = str(self._handle)
        self._token_ids = self._embeds = None
        self._options = NO_OPTIONS
        try:
            # The message is on its way already while other tasks get their turn.
            await cancel_shielded_checkpoint()
            await self._session.await_trackers(trackers)
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session.belonging.is_forked:
            return
        self._session.belonging.require()
        await self._leave()

    async def _leave(self) -> None:
        """Abort the request if it lives, and wait, shielded and bounded, until the engine has let go of it."""
        assert self._handle is not None
        aborted = self._session.abort_stream(self._handle)
        if self._error is None and self._finish is None:
            left = f"request {self.request_id}: its block was left"
            self._error = lambda: anyio.ClosedResourceError(left)
            self._parked = False
            self.wake()
        if aborted:
            self._released = self._session.wakeup_type()
            with self._session.limits.within(RELEASE_LIMIT, shield=True):
                await self._released

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        await self._readiness()
        return self._next_output()

    async def _readiness(self) -> None:
        if self._handle is None:
            raise RuntimeError("enter the request first: async with client.open_request(...) as request")
        if self._ready():
            self._session.belonging.require_thread()
            # A cancellation has to be looked for: on asyncio, AnyIO does not deliver it to a task whose wait is over,
            # as it always is on a busy stream.
            await checkpoint()
        else:
            self._session.belonging.require()
            self._unchecked += 1
            if self._unchecked >= CHECK_EVERY:
                self._unchecked = 0
                await checkpoint_if_cancelled()
        while not self._ready():
            if self._arrival is not None:
                raise anyio.BusyResourceError("iterating over")
            self._arrival = self._session.wakeup_type()
            self._parked = True
            try:
                if self._stall_limit is None:
                    await self._arrival
                else:
                    with self._session.limits.within(self._stall_limit) as limit:
                        await self._arrival
                    # A wake that was put off may be one for a wait that has ended before this one: then wait on.
                    if limit.is_reached and self._parked:
                        self._error = functools.partial(RequestStalledError, self._describe_stall())
            finally:
                self._arrival = None
                self._parked = False

    def _describe_stall(self) -> str:
        health = self._session.link.health(self._stall_limit or math.inf, None)
        return (
            f"request {self.request_id}: nothing came of it for {self._stall_limit} s, its stall_limit; the engine is "
            f"{health.state}, {health.steps} steps made"
        )

    def _ready(self) -> bool:
        if self._whole:
            return self._finish is not None or self._error is not None
        return bool(self._tokens or self._details or self._error is not None or self._finish is not None)

    def _next_output(self) -> RequestOutput:
        tokens, details = self._take(whole=self._whole)
        if not tokens and not details:
            raise StopAsyncIteration
        return _merge(RequestOutput, self.request_id or "", tokens, details)

    async def completion(self) -> Completion:
        """Everything from here to the end of the request, in one piece.

        :raises RequestError: if the engine refused or failed this request
        :raises EngineDeadError: if the engine dies first
        :raises EngineClosedError: if the client is closed first
        :raises RuntimeError: if it was not entered, or there is nothing left to read
        :raises anyio.ClosedResourceError: if its block is left first
        """
        self._session.belonging.require()
        before = self._whole, self._wakes_early
        self._whole, self._wakes_early = True, self._stall_limit is not None
        try:
            await self._readiness()
            return self._completion()
        except BaseException:
            self._whole, self._wakes_early = before  # the stream can still be read as it comes
            raise

    def _completion(self) -> Completion:
        tokens, details = self._take(whole=True)
        if not tokens and not details:
            raise RuntimeError(f"request {self.request_id} has ended, and all of it has been read")
        return completion_of(self.request_id or "", tokens, details)

    def _take(self, *, whole: bool) -> tuple[list[int], list[OutputDetails]]:
        if self._error is not None and (whole or not (self._tokens or self._details)):
            raise self._session.told(self._error())
        tokens, self._tokens = self._tokens, []
        details, self._details = self._details, []
        return tokens, details


def output_left(stream: RequestStream) -> RequestOutput | None:
    """What is left to be read of a stream whose client has ended, in any thread; None if nothing is.

    :raises EngineError: that by which the request ended, after what had come before
    """
    try:
        return stream._next_output()  # pyright: ignore[reportPrivateUsage] - while the client is open, its loop's alone
    except StopAsyncIteration:
        return None


def completion_left(stream: RequestStream) -> Completion:
    """The same in one piece. Errors as :meth:`RequestStream.completion`."""
    return stream._completion()  # pyright: ignore[reportPrivateUsage] - as above


def completion_of(request_id: str, tokens: list[int], details: list[OutputDetails]) -> Completion:
    """A request that has ended, from all that came of it."""
    return _merge(Completion, request_id, tokens, details)


def _merge(kind: type[R], request_id: str, tokens: list[int], details: list[OutputDetails]) -> R:
    if not details:
        return kind(request_id=request_id, token_ids=tokens)
    last = details[-1]
    if len(details) == 1 and last.is_plain:
        return kind(request_id=request_id, token_ids=tokens, finish_reason=last.finish_reason)
    logprobs = [position for more in details if more.logprobs is not None for position in more.logprobs]
    events = [event for more in details if more.events is not None for event in more.events]
    prompt = next((more.prompt_logprobs for more in details if more.prompt_logprobs is not None), None)
    pooled = next((more.pooling_output for more in details if more.pooling_output is not None), None)
    transfer = next((more.kv_transfer_params for more in details if more.kv_transfer_params is not None), None)
    return kind(
        request_id=request_id,
        token_ids=tokens,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs or None,
        prompt_logprobs=None if prompt is None else list(prompt),
        pooling_output=pooled,
        kv_transfer_params=transfer,
        events=events or None,
    )
