"""Multimodal features on the wire that no engine may get, for a prompt of three tokens."""

from __future__ import annotations

from typing import Any

import cbor2

_FIELD: dict[str, Any] = {"data": cbor2.CBORTag(41440, ["torch", "float32", [1], bytes(4)])}
FEATURE: dict[str, Any] = {"modality": "image", "identifier": "a", "offset": 0, "length": 2, "fields": {"x": _FIELD}}
"""A good one."""


def _mask(dtype: str, length: int, library: str = "torch") -> Any:
    return cbor2.CBORTag(41440, [library, dtype, [length], b"\1" * length])


BAD_FEATURES: dict[str, Any] = {
    "none": [],
    "null": None,
    "no list": FEATURE,
    "a list": [[]],
    "no identifier": [{name: value for name, value in FEATURE.items() if name != "identifier"}],
    "an empty identifier": [FEATURE | {"identifier": ""}],
    "a number for a modality": [FEATURE | {"modality": 5}],
    "an unknown name": [FEATURE | {"size": 5}],
    "a number for a name": [FEATURE | {5: 5}],
    "a place before the prompt": [FEATURE | {"offset": -1}],
    "a place that is true": [FEATURE | {"offset": True}],
    "a place that is an array": [FEATURE | {"offset": _mask("bool", 2)}],
    "no length": [FEATURE | {"length": 0}],
    "no fields": [FEATURE | {"fields": {}}],
    "fields that are null": [FEATURE | {"fields": None}],
    "a field with a number for a name": [FEATURE | {"fields": {5: _FIELD}}],
    "a field that is an array": [FEATURE | {"fields": {"x": _FIELD["data"]}}],
    "a field without data": [FEATURE | {"fields": {"x": {"dim": 1}}}],
    "data that are null": [FEATURE | {"fields": {"x": {"data": None}}}],
    "data that are a bool": [FEATURE | {"fields": {"x": {"data": [True]}}}],
    "data that are undefined": [FEATURE | {"fields": {"x": {"data": cbor2.undefined}}}],
    "data that are text": [FEATURE | {"fields": {"x": {"data": ["text"]}}}],
    "an unknown batching": [FEATURE | {"fields": {"x": _FIELD | {"batching": "none"}}}],
    "a batching that is an array": [FEATURE | {"fields": {"x": _FIELD | {"batching": _mask("bool", 2)}}}],
    "a dimension out of range": [FEATURE | {"fields": {"x": _FIELD | {"dim": 64}}}],
    "a number for a bool": [FEATURE | {"fields": {"x": _FIELD | {"keep_on_cpu": 1}}}],
    "a mask that is null": [FEATURE | {"is_embed": None}],
    "a mask of numbers": [FEATURE | {"is_embed": _mask("uint8", 2)}],
    "a mask that is a list": [FEATURE | {"is_embed": [True, True]}],
}

MISPLACED_FEATURES: dict[str, Any] = {
    "a mask of another length": [FEATURE | {"is_embed": _mask("bool", 3)}],
    "behind the prompt": [FEATURE | {"offset": 2}],
    "two in one place": [FEATURE, FEATURE | {"offset": 1}],
    "two in one place by their masks": [
        FEATURE | {"is_embed": _mask("bool", 2)},
        FEATURE | {"is_embed": _mask("|b1", 2, "numpy")},
    ],
}
"""What the schema has no words for."""
