"""The strict CBOR of the wire: RFC 8949 by cbor2, with less allowed than it would take.

Decoding refuses indefinite lengths, duplicate keys, trailing bytes, deep nesting and every tag but the private one for
arrays (:mod:`anyengine.protocol.arrays`). Encoding refuses whatever decoding would refuse, and names its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import cbor2

from anyengine.errors import ProtocolError, UnencodableError
from anyengine.protocol import arrays

ARRAY_TAG = 41440
"""A tag of the first-come-first-served range of RFC 8949, used privately on these sockets."""

MAX_DEPTH = 64
"""Nesting allowed on the wire, containers and tags counted."""

Buffer = bytes | bytearray | memoryview
"""What can be a frame of a message."""

encode_plain = cast("Callable[[object], bytes]", cbor2.dumps)
"""Encode what :func:`pack` made, or what trusted code built of plain types."""


def encode(value: object, buffers: list[Buffer], *, path: str) -> bytes:
    """Encode a value that came from outside; the bytes of large arrays are appended to ``buffers``.

    :raises UnencodableError: if something in ``value`` cannot travel; it names the place, starting with ``path``
    """
    return encode_plain(pack(value, buffers, path=path))


def pack(value: object, buffers: list[Buffer], *, path: str) -> Any:
    """Turn ``value`` into plain types that :func:`encode_plain` takes, moving large arrays to ``buffers``.

    :raises UnencodableError: if something in ``value`` cannot travel; it names the place, starting with ``path``
    """
    packed: list[Buffer] = []
    result = _pack(value, packed, len(buffers), path, 0)
    buffers += packed  # only now: a refused value leaves the caller's message as it was
    return result


def _pack(value: object, buffers: list[Buffer], first: int, path: str, depth: int) -> Any:
    if value is None or value is True or value is False or type(value) is float or type(value) is bytes:
        return value
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise UnencodableError(path, f"the integer {value} does not fit 64 bits")
        return value
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UnencodableError(path, f"the string holds a lone surrogate: {error.reason}") from None
        return value
    # Two levels of reserve for the message around it and the array tag within; a cycle ends here as well.
    if depth > MAX_DEPTH - 8:
        raise UnencodableError(path, f"nested deeper than {MAX_DEPTH - 8} levels, or a cycle")
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        return [_pack(item, buffers, first, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)]
    if isinstance(value, Mapping):
        packed: dict[Any, Any] = {}
        for key, item in cast("Mapping[object, object]", value).items():
            if type(key) is not str and type(key) is not int:
                raise UnencodableError(path, f"the key {key!r} ({_name(key)}) is neither a string nor an integer")
            _pack(key, buffers, first, f"{path} key {key!r}", depth)
            packed[key] = _pack(item, buffers, first, f"{path}[{key!r}]", depth + 1)
        return packed
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        array = arrays.from_value(value)
    except TypeError as error:
        raise UnencodableError(path, str(error)) from None
    if array is None:
        raise UnencodableError(path, f"{value!r:.80} of type {_name(value)} cannot travel{_hint(value)}")
    data: object
    if array.data.nbytes <= arrays.INLINE_LIMIT:
        data = bytes(array.data)
    else:
        data = first + len(buffers)
        buffers.append(array.data)
    return cbor2.CBORTag(ARRAY_TAG, [array.library, array.dtype, list(array.shape), data])


def decode(body: bytes, buffers: Sequence[memoryview] = ()) -> Any:
    """Decode one message body, putting ``buffers`` behind the arrays that refer to them.

    :raises ProtocolError: if the bytes are not exactly one value of the strict form
    """
    if not buffers:
        return _decode(body, _resolve_inline)
    views = list(buffers)
    return _decode(body, lambda tag, immutable: _resolve(tag, views))


def _resolve(tag: cbor2.CBORTag, buffers: list[memoryview]) -> Any:
    if tag.tag != ARRAY_TAG:
        raise ProtocolError(f"CBOR tag {tag.tag} is not allowed here")
    return arrays.from_wire(cast("object", tag.value), buffers)


def _resolve_inline(tag: cbor2.CBORTag, immutable: bool) -> Any:
    return _resolve(tag, [])


def decode_outline(body: bytes) -> Any:
    """Decode one message body with None for each array, whatever it says of itself.

    :raises ProtocolError: if the bytes are not exactly one value of the strict form
    """
    return _decode(body, lambda tag, immutable: None)


def decode_plain(body: bytes) -> Any:
    """Decode one message body that may hold no arrays; see :func:`decode`.

    :raises ProtocolError: if the bytes are not exactly one value of the strict form
    """
    return _decode(body, _refuse_tag)


def _refuse_tag(tag: cbor2.CBORTag, immutable: bool) -> Any:
    raise ProtocolError(f"CBOR tag {tag.tag} is not allowed here")


def _refuse_builtin(value: Any, immutable: bool) -> Any:
    raise ProtocolError("CBOR tags of the standard are not allowed here")


# Every tag that cbor2 6 decodes without asking tag_hook; a test walks all tags below 70,000.
_BUILTIN_TAGS = {
    tag: _refuse_builtin
    for tag in (
        *range(6), 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799,
    )
}  # fmt: skip

# cbor2.loads ignores bytes behind the value. So the body is decoded as the first of two items whose second is a random
# nonce: bytes too many or too few put something else, or nothing, in its place. Reading byte by byte to find the end,
# the other way, takes more than twice as long.
_NONCE = os.urandom(16)
_PAIR = b"\x82"
_END = encode_plain(_NONCE)


def _decode(body: bytes, tag_hook: cbor2.TagHook) -> Any:
    try:
        value, end = cbor2.loads(
            b"".join((_PAIR, body, _END)),
            tag_hook=tag_hook,
            semantic_decoders=_BUILTIN_TAGS,
            max_depth=MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
        )
    except cbor2.CBORDecodeError as error:
        if isinstance(error.__cause__, ProtocolError):
            raise ProtocolError(str(error.__cause__)) from None
        raise ProtocolError(f"not CBOR of the strict form: {error}") from None
    if end != _NONCE:
        raise ProtocolError("bytes follow the CBOR value of a message")
    return value


def _name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _hint(value: object) -> str:
    if hasattr(value, "item") and hasattr(value, "dtype"):
        return "; use .item()"
    if isinstance(value, set | frozenset):
        return "; send a list"
    return ""
