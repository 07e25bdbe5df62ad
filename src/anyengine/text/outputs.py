"""What a text stream brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from anyengine.types import RequestOutput


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextOutput(RequestOutput):
    """What came of one request since the last output, with the text that its tokens completed (perhaps none).

    A character comes with its last token, and what may become a stop string when it is decided that it does not; so
    ``text`` may lag behind ``token_ids``. With the ``finish_reason`` all of it is there. If a stop string ended the
    request, ``finish_reason`` is ``"stop"``, ``stop_reason`` the string, and the last of ``token_ids`` the one that
    completed it.
    """

    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextCompletion(TextOutput):
    """A whole answer: its text and tokens, why it ended, and the tokens of its prompt."""

    prompt_token_ids: list[int]


PIECE = 512
"""Tokens that are turned into text at a time: it takes milliseconds where a tokenizer is asked for each."""

FIELDS = tuple(field.name for field in dataclasses.fields(RequestOutput))


def with_text(output: RequestOutput, text: str) -> TextOutput:
    """``output`` and its text."""
    return TextOutput(text=text, **{name: getattr(output, name) for name in FIELDS})


def pieces(output: RequestOutput) -> Iterator[RequestOutput]:
    """``output`` as several of at most :data:`PIECE` tokens. The end comes with the last, what has no token before."""
    tokens, logprobs = output.token_ids, output.logprobs
    if len(tokens) <= PIECE:
        yield output
        return
    for start in range(0, len(tokens), PIECE):
        stop = start + PIECE
        piece = dataclasses.replace(
            output if start == 0 else RequestOutput(request_id=output.request_id, token_ids=[]),
            token_ids=tokens[start:stop],
            logprobs=None if logprobs is None else logprobs[start:stop],
            finish_reason=output.finish_reason if stop >= len(tokens) else None,
            stop_reason=output.stop_reason if stop >= len(tokens) else None,
        )
        yield piece


def merged(outputs: Sequence[TextOutput]) -> TextOutput:
    """Outputs of one request as one; lists are joined, of all else the last one that is there is taken."""
    if len(outputs) == 1:
        return outputs[0]
    values: dict[str, Any] = {}
    for name in FIELDS:
        present = [value for output in outputs if (value := getattr(output, name)) is not None]
        if name in ("token_ids", "logprobs", "events") and present:
            values[name] = []
            for part in present:
                values[name] += part
        else:
            values[name] = present[-1] if present else None
    return TextOutput(text="".join([output.text for output in outputs]), **values)


def joined(outputs: Sequence[TextOutput], prompt_token_ids: list[int]) -> TextCompletion:
    """All outputs of one request as a completion."""
    whole = merged(outputs)
    values: dict[str, Any] = {name: getattr(whole, name) for name in FIELDS}
    return TextCompletion(text=whole.text, prompt_token_ids=prompt_token_ids, **values)
