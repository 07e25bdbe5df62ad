"""One request in text: what the awaiting stream and the blocking one have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, cast

from anyengine.brief import brief
from anyengine.client.checks import check_keywords
from anyengine.client.prompts import LONG_PROMPT, PIECE, in_one_column
from anyengine.errors import RequestRefusedError
from anyengine.params import RequestKeywords, SamplingParams
from anyengine.text.assembler import TextAssembler
from anyengine.text.stop_strings import check_stop

if TYPE_CHECKING:
    from anyengine.text.model_text import ModelText

ENCODED_IN_PLACE = 4096
"""Characters that are encoded by whoever asks, on an event loop too: it takes milliseconds."""

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Text to go on from, the messages of a chat to answer, or token ids to go on from."""


class TextOptions(RequestKeywords, total=False):
    """How a prompt becomes tokens and tokens become text, and what goes to the client; every field has a default.

    ``stop``: a string or several; the one that is complete first ends the text, once ``min_tokens`` have come.
    ``include_stop_str_in_output``: whether it belongs to the text, as then does that of a stop token or an EOS; False.
    ``skip_special_tokens``: whether special tokens are no text; True.
    ``chat_options``: for messages, keyword arguments of :meth:`ModelText.encode_chat`, as ``{"tools": [...]}``.
    ``request_id`` and ``stall_limit`` are explained at :meth:`EngineClient.open_request`.
    """

    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    chat_options: Mapping[str, Any]
    request_id: str | None
    stall_limit: float | None


class TextRequest:
    """A prompt and how it is to be answered.

    :raises TypeError: if there is no such option, or one has the wrong type, or the prompt is of none of the three
        kinds
    :raises RequestRefusedError: if a stop string is empty
    """

    def __init__(
        self,
        text: ModelText,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        stop: str | Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        chat_options: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        stall_limit: float | None = None,
        **options: Unpack[RequestKeywords],
    ) -> None:
        check_keywords(options, TextOptions)
        first = prompt[0] if isinstance(prompt, Sequence) and len(prompt) else None
        if (
            isinstance(prompt, bytes | Mapping)
            or not isinstance(prompt, Iterable)
            or (isinstance(first, str) and not isinstance(prompt, str))
        ):
            raise TypeError(f"prompt={brief(prompt)} ({type(prompt).__name__}): expected text, messages or token ids")
        if options.get("features") and (isinstance(prompt, str) or isinstance(first, Mapping)):
            raise TypeError("features: expected a prompt of token ids, in which they have their places")
        self.sampling = sampling
        self.request_id = request_id
        self.client_options: dict[str, Any] = {
            **options,
            "request_id": request_id,
            "stall_limit": stall_limit,
        }
        self._text = text
        self._prompt = prompt
        self._is_chat = isinstance(first, Mapping)
        self._stop = check_stop(stop)
        self._include_stop = include_stop_str_in_output
        self._skip_special_tokens = skip_special_tokens
        self._chat_options = chat_options or {}
        if self._chat_options and not self._is_chat:
            raise TypeError("chat_options are for a prompt of messages")

    @property
    def stops_at_strings(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop)

    @property
    def is_short(self) -> bool:
        """Whether an event loop has time to encode it."""
        if self._is_text:
            return _characters(self._prompt) + _characters(self._chat_options) <= ENCODED_IN_PLACE
        return not _is_long(self._prompt)

    @property
    def _is_text(self) -> bool:
        return self._is_chat or isinstance(self._prompt, str)

    def encode(self) -> list[int]:
        """The tokens of the prompt; errors as :meth:`ModelText.encode` and :meth:`ModelText.encode_chat`."""
        if self._is_chat:
            return self._text.encode_chat(cast("Sequence[Mapping[str, Any]]", self._prompt), **self._chat_options)
        if not isinstance(self._prompt, str):
            return _listed(self._prompt)
        token_ids = self._text.encode(self._prompt)
        if not token_ids:
            raise RequestRefusedError(f"prompt={brief(self._prompt)}: expected text that has at least one token")
        return token_ids

    def encode_long(self) -> tuple[list[int], Sequence[int]]:
        """The tokens of the prompt, also as the client takes them without looking at each: for a worker thread.

        Errors as :meth:`encode`, and of a long prompt as :meth:`EngineClient.open_request`.
        """
        token_ids = self.encode()
        return token_ids, in_one_column(token_ids) if _is_long(token_ids) else token_ids

    def assembler(self, prompt_token_ids: Sequence[int]) -> TextAssembler:
        """What makes text of this request's outputs. An answer in a chat is a text of its own, all else goes on."""
        context = () if self._is_chat else prompt_token_ids
        return TextAssembler(
            self._text.detokenizer(context, skip_special_tokens=self._skip_special_tokens),
            self._stop,
            include_stop=self._include_stop,
            min_tokens=self.sampling.min_tokens,
        )


def _is_long(prompt: Any) -> bool:
    return isinstance(prompt, Sized) and getattr(prompt, "shape", None) != () and len(prompt) > LONG_PROMPT


def _listed(prompt: Any) -> list[int]:
    """Token ids as a list; those of a long array in pieces, between which other threads can run."""
    if not callable(getattr(prompt, "tolist", None)):
        return list(prompt)
    if not _is_long(prompt):
        return prompt.tolist()
    token_ids: list[int] = []
    for start in range(0, len(prompt), PIECE):
        token_ids += prompt[start : start + PIECE].tolist()
    return token_ids


def _characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, list | tuple):
        return sum(map(_characters, cast("Sequence[Any]", value)))
    return 0
