"""One request with its text, as a caller without an event loop sees it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from anyengine.errors import EngineDeadError, EngineError
from anyengine.sync_client.sync_engine_client import SyncEngineClient
from anyengine.sync_client.sync_request_stream import SyncRequestStream
from anyengine.text.assembler import TextAssembler
from anyengine.text.outputs import TextCompletion, TextOutput, joined, merged
from anyengine.text.text_request import TextRequest


class SyncTextStream:
    """The outputs of one request with their text, made by ``text.open_sync_stream``.

    As :class:`~anyengine.text.text_stream.TextStream`, but every call blocks, and an interrupt of one that waits aborts
    the request. One thread at a time may iterate.
    """

    def __init__(self, client: SyncEngineClient, request: TextRequest) -> None:
        self.prompt_token_ids: list[int] = []
        """The tokens of the prompt, once it is entered."""
        self._client = client
        self._request = request
        self._running: tuple[SyncRequestStream, TextAssembler] | None = None

    @property
    def request_id(self) -> str | None:
        """The name that the request was given, or got when it was sent."""
        return self._request.request_id if self._running is None else self._running[0].request_id

    def __enter__(self) -> Self:
        """Encode the prompt and send the request. Errors as :meth:`TextStream.__aenter__`."""
        if self._running is not None:
            raise RuntimeError("a request can be sent once; call open_sync_stream again")
        token_ids, prompt = self._request.encode_long()
        stream = self._client.stream(prompt, self._request.sampling, **self._request.client_options)
        self.prompt_token_ids = token_ids
        self._running = stream, self._request.assembler(token_ids)
        stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stream, assembler = self._entered()
        stream.__exit__(kind, error, traceback)
        if error is None and isinstance(assembler.error, EngineDeadError):
            assembler.raise_error()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TextOutput:
        stream, assembler = self._entered()
        assembler.raise_error()
        if assembler.ended:
            raise StopIteration
        try:
            output = next(stream)
        except EngineError as error:
            held_back = assembler.fail(error, stream.request_id)
            if held_back is None:
                raise
            return held_back
        with_text = merged(list(assembler.feed_in_pieces(output)))
        if assembler.ended and output.finish_reason is None:
            stream.__exit__(None, None, None)
        return with_text

    def completion(self) -> TextCompletion:
        """Everything from here to the end of the request, in one piece. Errors as :meth:`TextStream.completion`."""
        stream, assembler = self._entered()
        outputs = list(self) if self._request.stops_at_strings else list(assembler.feed_in_pieces(stream.completion()))
        if not outputs:
            raise RuntimeError(f"request {self.request_id} has ended, and all of it has been read")
        return joined(outputs, self.prompt_token_ids)

    def _entered(self) -> tuple[SyncRequestStream, TextAssembler]:
        if self._running is None:
            raise RuntimeError("enter the request first: with text.open_sync_stream(...) as stream")
        return self._running
