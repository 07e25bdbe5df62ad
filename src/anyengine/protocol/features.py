"""Multimodal features on the wire: maps of what differs from the defaults, their large arrays in buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from anyengine.errors import ProtocolError
from anyengine.multimodal import MultiModalFeature, MultiModalField
from anyengine.protocol import cbor, packing
from anyengine.protocol.checks import expect_type

_FIELD_DEFAULTS = {item.name: item.default for item in dataclasses.fields(MultiModalField) if item.name != "data"}


def encode_features(features: Sequence[MultiModalFeature], buffers: list[cbor.Buffer]) -> list[Any]:
    """The list that travels.

    :raises UnencodableError: if an array or a string cannot travel
    """
    return packing.pack([_plain_feature(feature) for feature in features], buffers, path="features")


def _plain_feature(feature: MultiModalFeature) -> dict[str, Any]:
    given = {item.name: getattr(feature, item.name) for item in dataclasses.fields(feature)}
    given["fields"] = {name: _plain_field(field) for name, field in feature.fields.items()}
    if feature.is_embed is None:
        del given["is_embed"]
    return given


def _plain_field(field: MultiModalField) -> dict[str, Any]:
    given = {name: getattr(field, name) for name in _FIELD_DEFAULTS}
    return {"data": field.data} | {name: value for name, value in given.items() if value != _FIELD_DEFAULTS[name]}


def decode_features(wire: object) -> Sequence[MultiModalFeature]:
    """The features that :func:`encode_features` made.

    :raises ProtocolError: if the list does not describe possible features
    """
    expect_type("ADD features", wire, list)
    features = cast("list[object]", wire)
    if not features:
        raise ProtocolError("ADD carries no features, but a list of them")
    try:
        return tuple(map(_feature, features))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"ADD carries impossible features: {error}") from None


def _feature(wire: object) -> MultiModalFeature:
    expect_type("ADD feature", wire, dict)
    given = dict(cast("dict[str, Any]", wire))
    if "is_embed" in given and given["is_embed"] is None:
        raise ProtocolError("ADD feature carries null; what has its default value is left out")
    fields: object = given.get("fields")
    expect_type("ADD feature's fields", fields, dict)
    given["fields"] = {name: _field(field) for name, field in cast("dict[str, object]", fields).items()}
    return MultiModalFeature(**given)


def _field(wire: object) -> MultiModalField:
    expect_type("ADD feature's field", wire, dict)
    return MultiModalField(**cast("dict[str, Any]", wire))
