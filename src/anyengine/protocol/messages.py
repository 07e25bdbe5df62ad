"""The messages of both directions in one table each. ``schema.cddl`` beside this file describes the same.

A message is a list of frames: its kind (one byte), its body (CBOR), and the buffers that the body refers to; TOKENS
alone is a single frame. Messages from the client go to the engine's DEALER socket; HELLO, PROGRESS and READY come back
the same way, everything else over the engine's PUSH socket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from anyengine.errors import ProtocolError
from anyengine.protocol import cbor
from anyengine.protocol.handshake import Hello, Progress, Ready
from anyengine.protocol.replies import Dead, Goodbye, Outputs, Pong, Stats, Tokens, UtilityResult
from anyengine.protocol.requests import MAX_PROMPTS, Abort, Add, Init, Ping, Shutdown, Utility
from anyengine.types import U64_MAX

PROTOCOL_VERSION = 1

FromClient = Add | Abort | Utility | Init | Shutdown | Ping
FromEngine = Hello | Progress | Ready | Outputs | Tokens | UtilityResult | Stats | Pong | Goodbye | Dead

_FROM_CLIENT: dict[bytes, type[FromClient]] = {m.KIND: m for m in (Add, Abort, Utility, Init, Shutdown, Ping)}
_FROM_ENGINE: dict[bytes, type[FromEngine]] = {
    m.KIND: m for m in (Hello, Progress, Ready, Outputs, UtilityResult, Stats, Pong, Goodbye, Dead)
}


class MessageLostError(ProtocolError):
    """What the other side sent did not all arrive, so what it says has a hole.

    It is final: every later message of this life of the engine raises it again.
    """


def decode_from_client(frames: Sequence[bytes | memoryview]) -> FromClient:
    """The message that a client sent; ``frames`` begin with the kind.

    :raises ProtocolError: if it is not a message of this version
    """
    return _decode(frames, _FROM_CLIENT)


def decode_from_engine(frames: Sequence[bytes | memoryview]) -> FromEngine:
    """The message that an engine sent; ``frames`` begin with the kind.

    :raises ProtocolError: if it is not a message of this version
    """
    if len(frames) == 1:
        return Tokens.decode(frames[0])
    return _decode(frames, _FROM_ENGINE)


def _decode(frames: Sequence[bytes | memoryview], table: Mapping[bytes, type[Any]]) -> Any:
    if len(frames) < 2:
        raise ProtocolError(f"a message has at least two frames, kind and body; {len(frames)} came")
    kind = bytes(frames[0])
    message = table.get(kind)
    if message is None:
        raise ProtocolError(f"unknown message kind {kind[:16]!r}")
    buffers = [memoryview(frame).cast("B") for frame in frames[2:]] if len(frames) > 2 else ()
    return message.decode(bytes(frames[1]), buffers)


def salvage(body: bytes, index: int) -> int | None:
    """The number at ``index`` of a body that does not decode as a message, so that one call can be told."""
    fields = _outline(body)
    if len(fields) > index:
        number = fields[index]
        if type(number) is int and 0 <= number <= U64_MAX:
            return number
    return None


def salvage_handles(body: bytes) -> range | None:
    """The handles of an ADD that does not decode, so that its requests alone fail; None if they cannot be told."""
    handle = salvage(body, 0)
    fields = _outline(body)
    lengths = fields[1] if len(fields) > 1 else None
    count = len(lengths) // 4 if type(lengths) is bytes else 1
    if not 1 <= count <= MAX_PROMPTS:
        count = 1
    if handle is None or handle + count - 1 > U64_MAX:
        return None
    return range(handle, handle + count)


def _outline(body: bytes) -> list[object]:
    try:
        fields = cbor.decode_outline(body)
    except ProtocolError:
        return []
    return cast("list[object]", fields) if isinstance(fields, list) else []
