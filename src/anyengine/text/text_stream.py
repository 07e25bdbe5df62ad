"""One request with its text, as its caller awaits it."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from anyio import to_thread
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint

from anyengine.client.engine_client import EngineClient
from anyengine.client.request_stream import RequestStream
from anyengine.errors import EngineDeadError, EngineError
from anyengine.process.threads import run_in_thread
from anyengine.text.assembler import TextAssembler
from anyengine.text.outputs import TextCompletion, TextOutput, joined, merged
from anyengine.text.text_request import TextRequest
from anyengine.types import RequestOutput


class TextStream:
    """The outputs of one request with their text, made by ``text.open_stream``.

    Entering encodes the prompt and sends the request; leaving early, however that happens, aborts it in the engine. A
    slow reader finds all that came meanwhile in one output. Iteration ends after the output with a ``finish_reason``.
    It raises :class:`RequestError` if the engine refused or failed this request, and ``EngineDeadError`` if the engine
    died, after everything that came before, the text that was held back included. One task at a time may iterate.
    """

    def __init__(self, client: EngineClient, request: TextRequest) -> None:
        self.prompt_token_ids: list[int] = []
        """The tokens of the prompt, once it is entered."""
        self._client = client
        self._request = request
        self._sent = False
        self._running: tuple[RequestStream, TextAssembler] | None = None

    @property
    def request_id(self) -> str | None:
        """The name that the request was given, or got when it was sent."""
        return self._request.request_id if self._running is None else self._running[0].request_id

    async def __aenter__(self) -> Self:
        """Encode the prompt and send the request.

        :raises TypeError: if the prompt is not what it should be
        :raises RequestError: if the prompt cannot be encoded, and as :meth:`EngineClient.open_request`
        :raises ModelError: if messages are given and the model has no chat template
        :raises EngineDeadError: if the engine is dead
        :raises EngineClosedError: if the client is closed
        :raises RuntimeError: if this request was sent before
        """
        if self._sent:
            raise RuntimeError("a request can be sent once; call open_stream again")
        self._sent = True
        if self._request.is_short:
            prompt = token_ids = self._request.encode()
        else:
            # Who is cancelled does not wait for the thread: nobody needs its result then.
            async with to_thread.current_default_thread_limiter():
                token_ids, prompt = await run_in_thread(
                    self._request.encode_long, name="encode", abandon_on_cancel=True
                )
        stream = self._client.open_request(prompt, self._request.sampling, **self._request.client_options)
        self.prompt_token_ids = token_ids
        assembler = self._request.assembler(token_ids)
        await stream.__aenter__()
        self._running = stream, assembler
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stream, assembler = self._entered()
        await stream.__aexit__(kind, error, traceback)
        # The client's block counts on whoever got the news of a death; here it has come only as far as this object.
        if error is None and isinstance(assembler.error, EngineDeadError):
            assembler.raise_error()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextOutput:
        stream, assembler = self._entered()
        if assembler.ended or assembler.error is not None:
            await checkpoint()
            assembler.raise_error()
            raise StopAsyncIteration
        try:
            output = await stream.__anext__()
        except EngineError as error:
            held_back = assembler.fail(error, stream.request_id)
            if held_back is None:
                raise
            return held_back
        with_text = await _feed(assembler, output)
        if assembler.ended and output.finish_reason is None:
            # A stop string. The abort is sent here, not only when the caller comes to the end of the block.
            await stream.__aexit__(None, None, None)
        return with_text

    async def completion(self) -> TextCompletion:
        """Everything from here to the end of the request, in one piece.

        :raises RequestError: if the engine refused or failed this request
        :raises EngineDeadError: if the engine dies first
        :raises EngineClosedError: if the client is closed first
        :raises RuntimeError: if it was not entered, or there is nothing left to read
        """
        stream, assembler = self._entered()
        if self._request.stops_at_strings:
            outputs = [output async for output in self]
        else:  # then nobody has to look at the tokens before the end
            outputs = [await _feed(assembler, await stream.completion())]
        if not outputs:
            raise RuntimeError(f"request {self.request_id} has ended, and all of it has been read")
        return joined(outputs, self.prompt_token_ids)

    def _entered(self) -> tuple[RequestStream, TextAssembler]:
        if self._running is None:
            raise RuntimeError("enter the request first: async with text.open_stream(...) as stream")
        return self._running


async def _feed(assembler: TextAssembler, output: RequestOutput) -> TextOutput:
    """``output`` with its text. It is the caller's already, so that a cancellation meanwhile comes later."""
    outputs: list[TextOutput] = []
    for piece in assembler.feed_in_pieces(output):
        if outputs:
            await cancel_shielded_checkpoint()
        outputs.append(piece)
    return merged(outputs)
