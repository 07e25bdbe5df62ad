"""A request's outputs with their text: tokens become characters, and a stop string ends the request.

Like the protocol's machines this neither waits nor does I/O: the awaiting stream and the blocking one both feed it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from anyengine.errors import EngineError
from anyengine.text.detokenizer import Detokenizer
from anyengine.text.outputs import TextOutput, pieces, with_text
from anyengine.text.stop_strings import StopMatcher
from anyengine.types import RequestOutput


class TextAssembler:
    """One request's outputs, to be fed in their order.

    :param include_stop: whether the stop string, or the text of a stop token or of the EOS, belongs to the text
    :param min_tokens: a stop string counts only if it ends after so many tokens
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], *, include_stop: bool, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0
        self.ended: bool = False
        """Whether the last output has come: nothing more of this request is wanted."""
        self.error: EngineError | None = None
        """What ended the request, while nobody has been told of it."""

    def feed_in_pieces(self, output: RequestOutput) -> Iterator[TextOutput]:
        """The output with its text, in pieces after each of which others may run; up to the last one."""
        for piece in pieces(output):
            yield self.feed(piece)
            if self.ended:
                return

    def feed(self, output: RequestOutput) -> TextOutput:
        """The output with its text. If it has a ``finish_reason``, it is the last one, whatever the engine does."""
        with_its_text = self._feed(output)
        self.ended = with_its_text.finish_reason is not None
        return with_its_text

    def _feed(self, output: RequestOutput) -> TextOutput:
        shown = output.token_ids
        if self._ends_with_stop_token(output) and not self._include_stop:
            shown = shown[:-1]
        ended = output.finish_reason is not None
        if self._matcher is None:
            text = self._detokenizer.feed(shown)
            if ended:
                text += self._detokenizer.finish()
            return with_text(output, text)
        return self._feed_matcher(self._matcher, output, shown, ended)

    def _feed_matcher(
        self, matcher: StopMatcher, output: RequestOutput, shown: Sequence[int], ended: bool
    ) -> TextOutput:
        text = ""
        # Token by token, so that how many came at a time changes nothing about where the request ends.
        for used, token in enumerate(shown, start=1):
            self._tokens += 1
            text += matcher.feed(self._detokenizer.feed((token,)), counts=self._tokens > self._min_tokens)
            if matcher.matched is not None:
                return with_text(_cut(output, used, matcher.matched), text)
        if ended:
            text += matcher.feed(self._detokenizer.finish(), counts=self._tokens > self._min_tokens)
            if matcher.matched is not None:
                return with_text(_cut(output, len(output.token_ids), matcher.matched), text)
            text += matcher.finish()
        return with_text(output, text)

    def fail(self, error: EngineError, request_id: str | None) -> TextOutput | None:
        """The text that stayed back until the request failed: it came before the error, so the error is kept for later.

        :returns: None if there is no such text; then the error is for the caller to raise
        """
        text = self._detokenizer.finish()
        if self._matcher is not None:
            text = self._matcher.feed(text, counts=False) + self._matcher.finish()
        if not text:
            return None
        self.error = error.with_traceback(None)  # whose frames hold this object
        return TextOutput(request_id=request_id or "", token_ids=[], text=text)

    def raise_error(self) -> None:
        """Raise the error that was kept, if there is one; it is raised once."""
        if self.error is not None:
            error, self.error = self.error, None
            self.ended = True
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    @staticmethod
    def _ends_with_stop_token(output: RequestOutput) -> bool:
        """Whether the last token ended the request; if it is the EOS, there is no stop reason."""
        if output.finish_reason != "stop":
            return False
        return output.stop_reason is None or output.token_ids[-1:] == [output.stop_reason]


def _cut(output: RequestOutput, tokens: int, stop: str) -> RequestOutput:
    """The output up to the token that completed a stop string."""
    return dataclasses.replace(
        output,
        token_ids=output.token_ids[:tokens],
        logprobs=None if output.logprobs is None else output.logprobs[:tokens],
        finish_reason="stop",
        stop_reason=stop,
    )
