"""One request as a caller without an event loop sees it: a context manager to iterate over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from anyengine.client.request_stream import RequestStream, completion_left, output_left
from anyengine.errors import EngineClosedError
from anyengine.sync_client.portal import Portal
from anyengine.types import Completion, RequestOutput

T = TypeVar("T")


class SyncRequestStream:
    """The outputs of one request, made by ``client.stream``.

    Entering sends the request; leaving early, however that happens, aborts it in the engine, and so does an interrupt
    of a call that waits, after which there is nothing more to read. Each turn brings all that came since the last one
    in one output. Iteration ends after the output with a ``finish_reason``; it raises :class:`RequestError` if the
    engine refused or failed this request, and ``EngineDeadError`` if the engine died, after everything that came
    before. One thread at a time may iterate.
    """

    def __init__(self, portal: Portal[Any], stream: RequestStream) -> None:
        self._portal = portal
        self._stream = stream
        self._entered = False

    @property
    def request_id(self) -> str | None:
        """The name that the request was given, or got when it was sent."""
        return self._stream.request_id

    def __enter__(self) -> Self:
        """Send the request.

        :raises RequestRefusedError: if a live request has the same id
        :raises EngineDeadError: if the engine is dead
        :raises EngineClosedError: if the client is closed
        :raises RuntimeError: if this request was sent before
        """
        self._portal.call(self._stream.__aenter__, undo=self._abort)
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(EngineClosedError):  # the engine is gone, and the request with it
            self._portal.finish(self._abort)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        output = self._call(self._next, functools.partial(output_left, self._stream))
        if output is None:
            raise StopIteration
        return output

    def completion(self) -> Completion:
        """Everything from here to the end of the request, in one piece.

        :raises RequestError: if the engine refused or failed this request
        :raises EngineDeadError: if the engine dies first
        :raises EngineClosedError: if the client is closed first
        :raises RuntimeError: if it was not entered, or there is nothing left to read
        """
        return self._call(self._stream.completion, functools.partial(completion_left, self._stream))

    def _call(self, function: Callable[[], Awaitable[T]], read: Callable[[], T]) -> T:
        if not self._entered:
            raise RuntimeError("enter the request first: with client.stream(...) as request")

        async def call() -> T:
            try:
                return await function()
            except anyio.get_cancelled_exc_class():
                await self._abort()
                raise

        try:
            return self._portal.call(call, undo=self._abort)
        except EngineClosedError:
            if self._portal.is_left:  # a request that the client's end ended has an end to be read all the same
                return read()
            raise

    async def _next(self) -> RequestOutput | None:
        return await anext(self._stream, None)

    async def _abort(self, lost: object = None) -> None:
        await self._stream.__aexit__(None, None, None)
