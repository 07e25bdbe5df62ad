"""The strict CBOR of the wire: RFC 8949 by cbor2, with less allowed than it would take.

Decoding refuses indefinite lengths, duplicate keys, trailing bytes, deep nesting and every tag but the private one for
arrays (:mod:`anyengine.protocol.arrays`). What a message leaves open (arguments, results, events) is a *value*: null,
booleans, 64-bit integers, floats, strings, bytes, arrays, lists, and maps whose keys are strings or integers; see
:mod:`anyengine.protocol.packing` for those that leave.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import cbor2

from anyengine.errors import ProtocolError
from anyengine.excerpts import MESSAGE_LIMIT, excerpt
from anyengine.protocol import arrays

ARRAY_TAG = 41440
"""A tag of the first-come-first-served range of RFC 8949, used privately on these sockets."""

MAX_DEPTH = 64
"""Nesting allowed on the wire, containers and tags counted."""

Buffer = bytes | bytearray | memoryview
"""What can be a frame of a message."""

Frames = list[Buffer]
"""A message to send: kind, body and buffers."""

Buffers = Sequence[memoryview]
"""The buffers of a message that arrived."""

encode_plain: Callable[[object], bytes] = cast("Callable[[object], bytes]", cbor2.dumps)
"""Encode what :func:`packing.pack` made, or what trusted code built of plain types."""


def printable(text: str) -> str:
    """``text`` with escapes in place of lone surrogates, which file names may hold and UTF-8 may not."""
    return text.encode(errors="backslashreplace").decode()


def decode(body: bytes, buffers: Sequence[memoryview] = ()) -> Any:
    """Decode one message body, putting ``buffers`` behind the arrays that refer to them.

    :raises ProtocolError: if the bytes are not exactly one value of the strict form
    """
    if not buffers:
        return _decode(body, _resolve_inline)
    views: list[memoryview | None] = list(buffers)  # each is taken by one array at most
    return _decode(body, lambda tag, immutable: _resolve(tag, views))


def _resolve(tag: cbor2.CBORTag, buffers: list[memoryview | None]) -> Any:
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
    """Decode one message body that may hold no arrays, and no map keys but strings; see :func:`decode`.

    A stranger's first message is one of these. Lists are hashed without a secret, so that a map of a megabyte whose
    keys are lists of one hash would take minutes.

    :raises ProtocolError: if the bytes are not exactly one value of the strict form
    """
    return _decode(body, _refuse_tag, text_keys=True)


def _refuse_tag(tag: cbor2.CBORTag, immutable: bool) -> Any:
    raise ProtocolError(f"CBOR tag {tag.tag} is not allowed here")


def _refuse_builtin(value: Any, immutable: bool) -> Any:
    raise ProtocolError("CBOR tags of the standard are not allowed here")


# Every tag that cbor2 6 decodes without asking tag_hook; a test walks all tags below 70,000.
_BUILTIN_TAGS = dict.fromkeys(
    [*range(6), 25, 28, 29, 30, 35, 36, 37, 52, 54, 100, 256, 258, 260, 261, 1004, 43000, 55799], _refuse_builtin
)

# cbor2.loads ignores bytes behind the value. So the body is decoded as the first of two items whose second is a random
# nonce: bytes too many or too few put something else, or nothing, in its place. Reading byte by byte to find the end,
# the other way, takes more than twice as long.
_NONCE = os.urandom(16)
_PAIR = b"\x82"
_END = encode_plain(_NONCE)


def _decode(body: bytes, tag_hook: cbor2.TagHook, *, text_keys: bool = False) -> Any:
    try:
        value, end = cbor2.loads(
            b"".join((_PAIR, body, _END)),
            tag_hook=tag_hook,
            semantic_decoders=_BUILTIN_TAGS,
            max_depth=MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=text_keys,
        )
    except cbor2.CBORDecodeError as error:
        cause = error.__cause__
        if isinstance(cause, ProtocolError):
            raise ProtocolError(str(cause)) from None
        if cause is not None and not isinstance(cause, Exception):
            raise cause from None  # cbor2 wraps what a signal raised while an array was made: Ctrl-C, SystemExit
        raise ProtocolError(f"not CBOR of the strict form: {excerpt(str(error), MESSAGE_LIMIT)}") from None
    if type(end) is not bytes or end != _NONCE:
        raise ProtocolError("bytes follow the CBOR value of a message")
    return value


_SCALARS = frozenset((type(None), bool, float, bytes, int, str))
_FOREIGN = (cbor2.CBORSimpleValue, type(cbor2.undefined))
_CONTAINERS = (list, dict)


def expect_value(name: str, value: object) -> None:
    """What :func:`packing.pack` can make and nothing else that CBOR knows.

    :raises ProtocolError: if ``value`` holds ``undefined``, an unassigned simple value, or a map key that is neither
        a string nor an integer
    """
    if type(value) in _SCALARS:
        return
    items: list[object]
    if type(value) is dict:
        content = cast("dict[object, object]", value)
        for kind in set(map(type, content)):
            if kind is not str and kind is not int:
                raise ProtocolError(f"{name} holds a map with a key of type {kind.__name__}")
        items = list(content.values())
    elif type(value) is list:
        items = cast("list[object]", value)
    else:
        items = [value]
    for kind in set(map(type, items)):
        if kind in _FOREIGN:
            raise ProtocolError(f"{name} holds a simple value that CBOR has and this protocol does not")
        if kind in _CONTAINERS:
            for item in items:
                if type(item) is kind:
                    expect_value(name, cast("object", item))
