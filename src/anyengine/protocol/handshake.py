"""What an engine says on its DEALER until it serves: HELLO, PROGRESS, READY."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

from anyengine.brief import brief
from anyengine.errors import ProtocolError, UnencodableError
from anyengine.excerpts import MESSAGE_LIMIT, NAME_LIMIT, excerpt
from anyengine.protocol import cbor, packing
from anyengine.protocol.cbor import Buffers as Buffers
from anyengine.protocol.cbor import Frames as Frames
from anyengine.protocol.checks import expect_array, expect_type, expect_u16, expect_u64
from anyengine.types import EngineInfo


class Hello(NamedTuple):
    """The engine's first message. The layout of these four fields stays the same in every protocol version."""

    KIND = b"\x20"

    version: int
    token: bytes
    pid: int
    rank: int

    def encode(self) -> Frames:
        return [self.KIND, cbor.encode_plain([self.version, self.token, self.pid, self.rank])]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Hello:
        version, token, pid, rank = expect_array("HELLO", cbor.decode_plain(body), 4)
        expect_u64("HELLO version", version)
        expect_type("HELLO token", token, bytes)
        expect_u64("HELLO pid", pid)
        expect_u16("HELLO rank", rank)
        return cls(version, token, pid, rank)


class Progress(NamedTuple):
    """A sign of life while loading: what is being done, and which part of it is done (0.0 to 1.0, None if unknown)."""

    KIND = b"\x21"

    stage: str
    fraction: float | None

    def encode(self) -> Frames:
        return [self.KIND, cbor.encode_plain([excerpt(cbor.printable(self.stage), MESSAGE_LIMIT), self.fraction])]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Progress:
        stage, fraction = expect_array("PROGRESS", cbor.decode_plain(body), 2)
        expect_type("PROGRESS stage", stage, str)
        if fraction is not None:
            expect_type("PROGRESS fraction", fraction, float)
        return cls(excerpt(stage, MESSAGE_LIMIT), fraction)


class Ready(NamedTuple):
    """The engine takes requests from now on."""

    KIND = b"\x22"

    info: EngineInfo

    def encode(self) -> Frames:
        fields = {field.name: getattr(self.info, field.name) for field in dataclasses.fields(EngineInfo)}
        packed = packing.pack(fields, [], path="EngineInfo")
        for name, value in packed.items():
            if (problem := _problem(name, value)) is not None:
                raise UnencodableError(f"EngineInfo.{name}", problem)
        return [self.KIND, cbor.encode_plain(packed)]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Ready:
        fields = cbor.decode_plain(body)
        expect_type("READY", fields, dict)
        try:
            info = EngineInfo(**fields)
        except TypeError as error:
            raise ProtocolError(f"READY does not describe an engine: {excerpt(str(error), MESSAGE_LIMIT)}") from None
        for name, value in fields.items():
            if (problem := _problem(name, value)) is not None:
                raise ProtocolError(f"READY field {name}: {problem}")
        return cls(info)


_OPTIONAL_INT = (int, type(None))
_INFO_TYPES: dict[str, tuple[type, ...]] = {
    "engine": (str,),
    "version": (str,),
    "max_model_len": (int,),
    "vocab_size": _OPTIONAL_INT,
    "dtype": (str, type(None)),
    "num_gpu_blocks": _OPTIONAL_INT,
    "block_size": _OPTIONAL_INT,
    "kv_cache_size_tokens": _OPTIONAL_INT,
    "kv_cache_max_concurrency": (float, int, type(None)),
    "world_size": (int,),
    "data_parallel_size": (int,),
    "data_parallel_rank": (int,),
    "supported_tasks": (list,),
    "sampling_parameters": (list,),
    "request_options": (list,),
    "prompt_embeds": (bool,),
    "max_logprobs": (int,),
    "utilities": (list,),
}
_LEAST = {"max_logprobs": -1}


def _problem(name: str, value: object) -> str | None:
    """What is wrong with a field of READY as it travels, if something is."""
    if type(value) is int and value < (least := _LEAST.get(name, 0)):
        return f"{brief(value)} is below {least}"
    if type(value) not in _INFO_TYPES[name]:
        return f"{brief(value)} is not {' or '.join(kind.__name__ for kind in _INFO_TYPES[name])}"
    if type(value) is str and len(value) > NAME_LIMIT:
        return f"{brief(value)} has more than {NAME_LIMIT} characters"
    if type(value) is list and not all(type(entry) is str for entry in cast("list[object]", value)):
        return f"{brief(value)} holds something that is not a string"
    return None
