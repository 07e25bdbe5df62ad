"""Parameters and options of a request on the wire: maps of what differs from the defaults, token ids as u32."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any, cast

from anyengine.brief import brief
from anyengine.errors import ProtocolError
from anyengine.params import LoRARequest, PoolingParams, RequestOptions, SamplingParams, StructuredOutputs
from anyengine.protocol import cbor, packing
from anyengine.protocol.checks import expect_type
from anyengine.protocol.features import decode_features, encode_features
from anyengine.protocol.outputs import decode_column

_STRUCTURED: dict[str, tuple[type, ...]] = {"json": (str, dict), "regex": (str,), "choice": (list,), "grammar": (str,)}

NO_OPTIONS = RequestOptions()
"""What most requests ask for."""


def encode_sampling(sampling: SamplingParams, buffers: list[cbor.Buffer]) -> dict[str, Any]:
    """The map that travels.

    :raises UnencodableError: if ``extra`` or ``structured_outputs`` holds a value that cannot travel
    """
    fields = dict(sampling.differences)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in fields:
            fields[name] = array("I", fields[name]).tobytes()
    if sampling.structured_outputs is not None:
        given = {name: getattr(sampling.structured_outputs, name) for name in _STRUCTURED}
        given = {name: value for name, value in given.items() if value is not None}
        fields["structured_outputs"] = packing.pack(given, buffers, path="SamplingParams.structured_outputs")
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    if "extra" in fields:
        fields["extra"] = packing.pack(fields["extra"], buffers, path="SamplingParams.extra")
    return fields


def decode_sampling(wire: object) -> SamplingParams:
    """The parameters that :func:`encode_sampling` made.

    :raises ProtocolError: if the map does not describe possible parameters
    """
    expect_type("ADD sampling", wire, dict)
    fields = dict(cast("dict[str, Any]", wire))
    for name, value in fields.items():
        if value is None and name != "max_tokens":
            raise ProtocolError(f"ADD carries null for {brief(name)}; what has its default value is left out")
    cbor.expect_value("ADD extra sampling parameters", fields.get("extra"))
    for name in ("stop_token_ids", "allowed_token_ids"):
        if name in fields:
            fields[name] = decode_column("I", fields[name], (), name).tolist()
    try:
        if "structured_outputs" in fields:
            fields["structured_outputs"] = _decode_structured(fields["structured_outputs"])
        return SamplingParams(**fields)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"ADD carries impossible sampling parameters: {error}") from None


def _decode_structured(wire: object) -> StructuredOutputs:
    expect_type("ADD structured_outputs", wire, dict)
    fields = cast("dict[str, Any]", wire)
    for name, value in fields.items():
        if type(value) not in _STRUCTURED.get(name, ()):
            raise ProtocolError(f"ADD structured_outputs has {brief(name)}: {type(value).__name__}")
    cbor.expect_value("ADD structured_outputs", fields)
    if not all(type(choice) is str for choice in fields.get("choice", ())):
        raise ProtocolError("ADD structured_outputs has a choice that is not a string")
    return StructuredOutputs(**fields)


def encode_options(options: RequestOptions, buffers: list[cbor.Buffer]) -> dict[str, Any]:
    """The map that travels: only what is set.

    :raises UnencodableError: if a feature holds something that cannot travel
    """
    if options is NO_OPTIONS:
        return {}
    fields: dict[str, Any] = {}
    if options.priority:
        fields["priority"] = options.priority
    if options.cache_salt is not None:
        fields["cache_salt"] = packing.pack(options.cache_salt, [], path="cache_salt")
    if options.lora is not None:
        fields["lora"] = packing.pack(dataclasses.asdict(options.lora), [], path="lora")
    if options.pooling is not None:
        given = {name: value for name, value in dataclasses.asdict(options.pooling).items() if value is not None}
        fields["pooling"] = packing.pack(given, [], path="pooling_params")
    if options.features:
        fields["features"] = encode_features(options.features, buffers)
    return fields


def decode_options(wire: object) -> RequestOptions:
    """The options that :func:`encode_options` made.

    :raises ProtocolError: if the map does not describe possible options
    """
    expect_type("ADD options", wire, dict)
    fields = dict(cast("dict[str, Any]", wire))
    if not fields:
        return NO_OPTIONS
    try:
        for name, kind in (("lora", LoRARequest), ("pooling", PoolingParams)):
            if name in fields:
                expect_type(f"ADD {name}", fields[name], dict)
                if None in fields[name].values():
                    raise ProtocolError(f"ADD {name} carries null; what has its default value is left out")
                fields[name] = kind(**fields[name])
        if "features" in fields:
            fields["features"] = decode_features(fields["features"])
        if any(value is None for value in fields.values()):
            raise ProtocolError("ADD options carry null; what has its default value is left out")
        return RequestOptions(**fields)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"ADD carries impossible options: {error}") from None
