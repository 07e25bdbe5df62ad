"""What a text stream brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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


FIELDS = tuple(field.name for field in dataclasses.fields(RequestOutput))


def with_text(output: RequestOutput, text: str) -> TextOutput:
    """``output`` and its text."""
    return TextOutput(text=text, **{name: getattr(output, name) for name in FIELDS})


def joined(outputs: Sequence[TextOutput], prompt_token_ids: list[int]) -> TextCompletion:
    """All outputs of one request as one; lists are joined, of all else the last one that is there is taken."""
    values: dict[str, object] = {}
    for name in FIELDS:
        present = [value for output in outputs if (value := getattr(output, name)) is not None]
        if name in ("token_ids", "logprobs", "events") and present:
            values[name] = [item for part in present for item in part]
        else:
            values[name] = present[-1] if present else None
    text = "".join([output.text for output in outputs])
    return TextCompletion(text=text, prompt_token_ids=prompt_token_ids, **values)  # pyright: ignore[reportArgumentType]
