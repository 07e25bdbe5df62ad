"""Prompts as callers pass them, checked and turned into u32; long ones in pieces, between which other tasks run."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, cast

from anyengine.brief import brief
from anyengine.errors import RequestRefusedError
from anyengine.protocol.arrays import from_value, is_array, is_loaded
from anyengine.types import U32_MAX, EngineInfo

LONG_PROMPT = 16 * 1024
"""Tokens up to which the call that brings a prompt checks it, which takes a third of a millisecond."""

PIECE = 4096
"""Tokens of a longer prompt that are checked without a checkpoint."""

_UNCHANGING = (tuple, range)

_FORMATS = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q",
    "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip
"""What a memoryview calls the elements of the torch dtypes that it can read."""


class LongPrompt:
    """A long prompt whose tokens are still to be checked.

    :param tokens: its own, or one that never changes; a slice of it is a sequence of integers
    """

    __slots__ = ("_checked", "_length", "_tokens")

    def __init__(self, tokens: Sequence[Any]) -> None:
        self._tokens = tokens
        self._length = len(tokens)
        self._checked: Sequence[int] | None = None

    def __len__(self) -> int:
        return self._length

    def check(self) -> Iterator[None]:
        """Check it, with a pause after each piece. A check that was given up can be begun anew.

        :raises TypeError: if a token is no integer; the message has its place
        :raises RequestRefusedError: if one is not u32; the message has its place
        """
        if self._checked is not None:
            return
        pieces: list[bytes] = []
        for start in range(0, self._length, PIECE):
            pieces.append(as_token_ids("prompt_token_ids", self._tokens[start : start + PIECE], start).tobytes())
            yield
        self._checked = memoryview(b"".join(pieces)).cast("I")
        self._tokens = ()

    @property
    def token_ids(self) -> Sequence[int]:
        """Its token ids as u32, once all is checked."""
        assert self._checked is not None
        return self._checked


def accept_prompt(token_ids: object, embeds: object, info: EngineInfo) -> Sequence[int] | LongPrompt | None:
    """The prompt's token ids, copied: as u32, or unchecked if they are many. None if the prompt is embeddings.

    :raises TypeError: if a prompt has the wrong type, or not exactly one is given
    :raises RequestRefusedError: if it is empty, holds an id that is not u32, or the engine takes no embeddings
    """
    if (token_ids is None) == (embeds is None):
        raise TypeError("expected exactly one of prompt_token_ids and prompt_embeds")
    if token_ids is None:
        _check_embeds(embeds, info)
        return None
    if isinstance(token_ids, str | bytes | bytearray):
        raise TypeError(f"prompt_token_ids={brief(token_ids)}: expected token ids, not text; tokenize it first")
    sequence = cast("Sequence[Any]", token_ids)
    if callable(tolist := getattr(token_ids, "tolist", None)):
        if (long := _accept_array(token_ids)) is not None:
            return long
        sequence = cast("Sequence[Any]", tolist())
    if not isinstance(sequence, Sequence):
        raise TypeError(f"prompt_token_ids={brief(token_ids)} ({type(token_ids).__name__}): expected token ids")
    if not len(sequence):
        raise RequestRefusedError("prompt_token_ids=[]: expected at least one token")
    if len(sequence) > LONG_PROMPT:
        return LongPrompt(sequence if type(token_ids) in _UNCHANGING else list(sequence))
    return as_token_ids("prompt_token_ids", sequence)


def check_prompt(token_ids: object, embeds: object, info: EngineInfo) -> Sequence[int] | None:
    """The prompt's token ids as u32, copied; None if the prompt is embeddings. For a caller without an event loop.

    Errors as :func:`accept_prompt`.
    """
    prompt = accept_prompt(token_ids, embeds, info)
    return in_one_column(prompt) if isinstance(prompt, LongPrompt) else prompt


def in_one_column(prompt: LongPrompt | list[int]) -> Sequence[int]:
    """A long prompt's token ids as u32, checked by a thread; others can run after each piece.

    Errors as :meth:`LongPrompt.check`.
    """
    if not isinstance(prompt, LongPrompt):
        prompt = LongPrompt(prompt)
    for _ in prompt.check():
        pass
    return prompt.token_ids


def as_token_ids(where: str, token_ids: Sequence[Any], first: int = 0) -> array[int]:
    """Token ids as u32, copied; integers of numpy and torch are integers, too.

    :param first: the place of the first of them, for errors
    :raises TypeError: if one is no integer; the message has its place
    :raises RequestRefusedError: if one is not u32; the message has its place
    """
    try:
        # Refuses floats and numbers out of u32 at C speed; a loop over a long prompt would hold up the event loop.
        return array("I", token_ids)
    except (TypeError, OverflowError, ValueError):
        for index, token in enumerate(token_ids, first):
            try:
                number = operator.index(token)
            except TypeError:
                flat = " in one flat list" if issubclass(type(token), (list, tuple)) else ""
                raise TypeError(
                    f"{where}[{index}]={brief(token)} ({type(token).__name__}): expected integers from 0 to "
                    f"{U32_MAX}{flat}"
                ) from None
            if not 0 <= number <= U32_MAX:
                raise RequestRefusedError(f"{where}[{index}]={brief(number)}: a token id is 0 to {U32_MAX}") from None
        raise


def _accept_array(token_ids: Any) -> Sequence[int] | LongPrompt | None:
    """A copy of a long flat array, tensor or memoryview; None if it is short, or its elements cannot be looked at."""
    shape = cast("tuple[int, ...]", getattr(token_ids, "shape", None) or ())
    if len(shape) > 1:
        raise TypeError(
            f"prompt_token_ids of shape {list(shape)}: expected integers from 0 to {U32_MAX} in one flat list"
        )
    length = shape[0] if shape else len(cast("Any", token_ids)) if isinstance(token_ids, Sequence) else 0
    if length <= LONG_PROMPT or (view := _view(token_ids)) is None:
        return None
    if view.format == "I" and type(view.obj) is bytes and view.contiguous:
        return view  # which nobody can change
    copied = cast("memoryview[int]", memoryview(view.tobytes()).cast(cast("Any", view.format)))
    return copied if view.format == "I" else LongPrompt(copied)


def _view(token_ids: Any) -> memoryview | None:
    """The elements as they lie in memory, if Python can read them there."""
    if is_loaded("torch") and isinstance(token_ids, sys.modules["torch"].Tensor):
        element = _FORMATS.get(str(token_ids.dtype).removeprefix("torch."))
        wire = None if element is None else from_value(token_ids)
        return None if wire is None else cast("memoryview", wire.data.cast(cast("Any", element)))
    try:
        view = memoryview(token_ids)
    except (TypeError, ValueError):  # no buffer, or one of an element that has no name there
        return None
    return view if view.ndim == 1 and view.format in {*_FORMATS.values(), "l", "L"} else None


def _check_embeds(embeds: object, info: EngineInfo) -> None:
    if not is_array(embeds):
        raise TypeError(
            f"prompt_embeds={brief(embeds)} ({type(embeds).__name__}): expected a torch tensor or a numpy array"
        )
    shape = tuple(cast("Any", embeds).shape)
    if len(shape) != 2 or 0 in shape:
        raise RequestRefusedError(
            f"prompt_embeds of shape {list(shape)}: expected [tokens, hidden size], neither of them 0"
        )
    if not info.prompt_embeds:
        raise RequestRefusedError(f"prompt_embeds: engine {info.engine!r} takes prompt_token_ids only")
