"""What stands in a prompt beside text: images, sounds and videos, as a model's own processor prepared them.

Like :mod:`anyengine.params` this imports only the standard library, since both processes use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import compress, pairwise
from typing import Any, Literal, cast

from anyengine.brief import brief
from anyengine.checks import require, require_integer
from anyengine.errors import RequestRefusedError
from anyengine.types import U32_MAX

Batching = Literal["batched", "flat", "shared"]
"""How an engine puts one field of several items together: stacked, joined along a dimension, or the same for all."""

BATCHINGS: Sequence[Batching] = ("batched", "flat", "shared")

_MAX_NESTING = 4
_MAX_DIMENSIONS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultiModalField:
    """One argument of a model's encoder, for one item.

    :param data: a torch tensor, a numpy array, a number, or a list of these
    :param batching: how it is put together with those of other items
    :param dim: the dimension along which ``"flat"`` ones are joined
    :param keep_on_cpu: whether the model wants it in the host's memory
    :raises TypeError: if a parameter has the wrong type
    :raises RequestRefusedError: if a value is out of its range
    """

    data: Any
    batching: Batching = "batched"
    dim: int = 0
    keep_on_cpu: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", _copied(self.data, 0))
        require(isinstance(self.batching, str), "MultiModalField.batching", self.batching, "a string")
        if self.batching not in BATCHINGS:
            raise RequestRefusedError(
                f"MultiModalField.batching={brief(self.batching)}: expected one of {', '.join(BATCHINGS)}"
            )
        require_integer("MultiModalField.dim", self.dim, -_MAX_DIMENSIONS, _MAX_DIMENSIONS - 1)
        require(isinstance(self.keep_on_cpu, bool), "MultiModalField.keep_on_cpu", self.keep_on_cpu, "a bool")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultiModalFeature:
    """One item of a prompt: what the encoder gets of it, and which of the prompt's tokens it stands for.

    :param modality: the model's name for its kind, as ``"image"``
    :param identifier: names the content. What an engine has computed for one identifier it may use for every item of
        the same, of whichever request and client: equal ones must mean equal content
    :param offset: of its first token in the prompt
    :param length: how many tokens of the prompt it takes up
    :param fields: the encoder's arguments by their names
    :param is_embed: a tensor or array of ``length`` booleans, of which tokens the encoder's output takes the place;
        None means of all of them. There must be as many such tokens as the encoder makes embeddings of the item: how
        many that is only the model knows for every item, and an engine may end of it
    :raises TypeError: if a parameter has the wrong type
    :raises RequestRefusedError: if a value is out of its range
    """

    modality: str
    identifier: str
    offset: int
    length: int
    fields: Mapping[str, MultiModalField]
    is_embed: Any = None

    def __post_init__(self) -> None:
        for name in ("modality", "identifier"):
            value: object = getattr(self, name)
            require(isinstance(value, str), f"MultiModalFeature.{name}", value, "a string")
            if not value:
                raise RequestRefusedError(f"MultiModalFeature.{name}='': expected at least one character")
        require_integer("MultiModalFeature.offset", self.offset, 0, U32_MAX)
        require_integer("MultiModalFeature.length", self.length, 1, U32_MAX)
        fields: object = self.fields
        require(isinstance(fields, Mapping), "MultiModalFeature.fields", fields, "a mapping")
        named = dict(cast("Mapping[object, object]", fields))
        if not named:
            raise RequestRefusedError("MultiModalFeature.fields={}: expected at least one")
        for name, field in named.items():
            require(isinstance(name, str), "MultiModalFeature.fields", name, "string keys")
            is_field = isinstance(field, MultiModalField)
            require(is_field, f"MultiModalFeature.fields[{name!r}]", field, "a MultiModalField")
        object.__setattr__(self, "fields", named)
        if self.is_embed is not None:
            require(_is_mask(self.is_embed), "MultiModalFeature.is_embed", self.is_embed, "an array of booleans")
            shape = tuple(self.is_embed.shape)
            if shape != (self.length,):
                raise RequestRefusedError(
                    f"MultiModalFeature.is_embed of shape {list(shape)}: expected [{self.length}], as length says"
                )

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.offset + self.length

    def places(self) -> set[int]:
        """The positions of the tokens of which the encoder's output takes the place."""
        return set(compress(range(self.offset, self.end), self.mask()))

    def mask(self) -> bytes:
        """A byte for each of its tokens: 1 if the encoder's output takes its place, else 0."""
        mask = self.is_embed
        if mask is None:
            return b"\x01" * self.length
        if not hasattr(mask, "tolist"):  # as it was on the wire, in a process that has not loaded the array's library
            return bytes(mask.data)
        return mask.tobytes() if hasattr(mask, "tobytes") else bytes(mask.tolist())


def check_places(features: Sequence[MultiModalFeature], prompt_length: int) -> None:
    """Refuse features that are not in the prompt, or of which two take the place of one token.

    :raises RequestRefusedError: if there is one; the message names it
    """
    for index, feature in enumerate(features):
        if feature.end > prompt_length:
            raise RequestRefusedError(
                f"features[{index}] takes up the tokens {feature.offset} to {feature.end - 1}: the prompt has "
                f"{prompt_length}"
            )
    ordered = sorted(features, key=lambda feature: feature.offset)
    if all(left.end <= right.offset for left, right in pairwise(ordered)):
        return
    # Those of a video and its sound may take turns in one range.
    taken = bytearray(prompt_length)  # 1 where an encoder's output takes the place
    for feature in ordered:
        # As two long numbers, whose bytes are compared at once: a feature may be as long as a long prompt.
        own = int.from_bytes(feature.mask(), "little")
        others = int.from_bytes(taken[feature.offset : feature.end], "little")
        if twice := own & others:
            place = feature.offset + ((twice & -twice).bit_length() - 1) // 8
            raise RequestRefusedError(f"features: two of them take the place of token {place} of the prompt")
        taken[feature.offset : feature.end] = (own | others).to_bytes(feature.length, "little")


def _copied(data: object, depth: int) -> Any:
    # Lists are copied, so that nothing the caller does later changes a request that is under way; arrays are not.
    if isinstance(data, list | tuple):
        if depth == _MAX_NESTING:
            raise RequestRefusedError(f"MultiModalField.data: nested deeper than {_MAX_NESTING} lists, or a cycle")
        return [_copied(item, depth + 1) for item in cast("Sequence[object]", data)]
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    expected = "a tensor, an array, a number, or a list of these"
    require(is_number or _is_array(data), "MultiModalField.data", data, expected)
    return data


def _is_array(value: object) -> bool:
    """Whether it looks like a tensor or an array; neither library is imported here."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_mask(value: Any) -> bool:
    # What torch and numpy call it, and numpy on the wire.
    return _is_array(value) and str(value.dtype) in ("torch.bool", "bool", "|b1")
