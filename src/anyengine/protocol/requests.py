"""What a client sends, on its ROUTER, to an engine's DEALER."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from anyengine.brief import brief
from anyengine.errors import ProtocolError, RequestRefusedError
from anyengine.multimodal import check_places
from anyengine.params import RequestOptions, SamplingParams
from anyengine.protocol import cbor, packing
from anyengine.protocol.arrays import is_array
from anyengine.protocol.cbor import Buffers as Buffers
from anyengine.protocol.cbor import Frames as Frames
from anyengine.protocol.checks import expect_array, expect_type, expect_u64
from anyengine.protocol.outputs import decode_column, encode_column, u32_bytes
from anyengine.protocol.sampling import decode_options, decode_sampling, encode_options, encode_sampling

ShutdownMode = Literal["abort", "drain"]

MAX_PROMPTS = 1024
"""Requests in one message."""


class Add(NamedTuple):
    """New requests, alike in all but their prompts. Their handles are ``handle`` and the numbers that follow it.

    Exactly one of ``prompts`` (token ids, u32, of each request) and ``prompt_embeds`` (tokens x hidden size, of the one
    request) is set.
    """

    KIND = b"\x00"

    handle: int
    prompts: Sequence[Sequence[int]] | None
    prompt_embeds: Any
    sampling: SamplingParams
    options: RequestOptions

    @property
    def handles(self) -> range:
        """The handles of all its requests."""
        return range(self.handle, self.handle + (1 if self.prompts is None else len(self.prompts)))

    def encode(self) -> Frames:
        buffers: Frames = []
        lengths = tokens = embeds = None
        prompts = self.prompts
        if prompts is None:
            embeds = packing.pack(self.prompt_embeds, buffers, path="prompt_embeds")
        elif len(prompts) == 1:
            tokens = encode_column("I", prompts[0], buffers)
        else:
            lengths = array("I", map(len, prompts)).tobytes()
            joined = b"".join(map(u32_bytes, prompts))
            tokens = encode_column("I", memoryview(joined).cast("I"), buffers)
        sampling = encode_sampling(self.sampling, buffers)
        body = [self.handle, lengths, tokens, embeds, sampling, encode_options(self.options, buffers)]
        return [self.KIND, cbor.encode_plain(body), *buffers]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Add:
        handle, lengths, tokens, embeds, sampling, options = expect_array("ADD", cbor.decode(body, buffers), 6)
        expect_u64("ADD handle", handle)
        if (tokens is None) == (embeds is None):
            raise ProtocolError("ADD carries either token ids or prompt_embeds")
        prompts = None
        if tokens is not None:
            column = decode_column("I", tokens, buffers, "prompt_token_ids")
            prompts = [column] if lengths is None else _cut(column, lengths)
        elif lengths is not None:
            raise ProtocolError("ADD carries lengths of prompts, but prompt_embeds")
        elif not is_array(embeds) or len(embeds.shape) != 2:
            raise ProtocolError("ADD prompt_embeds is not an array of tokens x hidden size")
        add = cls(handle, prompts, embeds, decode_sampling(sampling), decode_options(options))
        expect_u64("ADD last handle", add.handles[-1])
        if add.options.features:
            if prompts is None or len(prompts) != 1:
                raise ProtocolError("ADD carries features, but not the token ids of one prompt")
            try:
                check_places(add.options.features, len(prompts[0]))
            except RequestRefusedError as error:
                raise ProtocolError(f"ADD carries impossible features: {error}") from None
        return add


def _cut(column: memoryview, lengths: object) -> Sequence[Sequence[int]]:
    """The prompts that stand in ``column`` one after the other."""
    numbers = decode_column("I", lengths, (), "lengths")
    if not 1 <= len(numbers) <= MAX_PROMPTS or sum(numbers) != len(column):
        raise ProtocolError(f"ADD carries {len(column)} tokens, but {len(numbers)} lengths whose sum is {sum(numbers)}")
    ends = itertools.accumulate(numbers)
    return [column[end - length : end] for length, end in zip(numbers, ends, strict=True)]


class Abort(NamedTuple):
    """These requests are to end now; the engine answers with a last row for each that it still has."""

    KIND = b"\x01"

    handles: Sequence[int]

    def encode(self) -> Frames:
        buffers: Frames = []
        return [self.KIND, cbor.encode_plain([encode_column("Q", self.handles, buffers)]), *buffers]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Abort:
        (handles,) = expect_array("ABORT", cbor.decode_plain(body), 1)
        return cls(decode_column("Q", handles, buffers, "handles"))


class Utility(NamedTuple):
    """A utility call: ``method`` must be marked ``@utility`` in the engine."""

    KIND = b"\x03"

    call_id: int
    method: str
    args: Sequence[Any]

    def encode(self) -> Frames:
        buffers: Frames = []
        args = packing.pack(self.args, buffers, path="args")
        method = packing.pack(self.method, [], path="method")
        return [self.KIND, cbor.encode_plain([self.call_id, method, args]), *buffers]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Utility:
        call_id, method, args = expect_array("UTILITY", cbor.decode(body, buffers), 3)
        expect_u64("UTILITY call id", call_id)
        expect_type("UTILITY method", method, str)
        expect_type("UTILITY args", args, list)
        cbor.expect_value("UTILITY args", args)
        return cls(call_id, method, args)


class Init(NamedTuple):
    """The answer to HELLO: which engine to build (None: what the process was started for), and where outputs go."""

    KIND = b"\x10"

    version: int
    session: int
    output_address: str
    path: str | None
    arguments: Mapping[str, Any]

    def encode(self) -> Frames:
        buffers: Frames = []
        arguments = packing.pack(self.arguments, buffers, path="EngineSpec.arguments")
        body = [self.version, self.session, self.output_address, self.path, arguments]
        return [self.KIND, cbor.encode_plain(body), *buffers]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Init:
        version, session, address, path, arguments = expect_array("INIT", cbor.decode(body, buffers), 5)
        expect_u64("INIT version", version)
        expect_u64("INIT session", session)
        expect_type("INIT output address", address, str)
        if path is not None:
            expect_type("INIT path", path, str)
        expect_type("INIT arguments", arguments, dict)
        cbor.expect_value("INIT arguments", arguments)
        if not all(type(name) is str for name in arguments):
            raise ProtocolError("INIT arguments have a name that is not a string")
        return cls(version, session, address, path, arguments)


class Shutdown(NamedTuple):
    """The engine is to end: at once (``"abort"``) or when its requests have finished (``"drain"``)."""

    KIND = b"\x11"

    mode: ShutdownMode

    def encode(self) -> Frames:
        return [self.KIND, cbor.encode_plain([self.mode])]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Shutdown:
        (mode,) = expect_array("SHUTDOWN", cbor.decode_plain(body), 1)
        if mode not in ("abort", "drain"):
            raise ProtocolError(f"unknown shutdown mode {brief(mode)}")
        return cls(mode)


class Ping(NamedTuple):
    """A sign of life is asked for. ``sent`` counts the client's messages before this one, so that a lost one shows."""

    KIND = b"\x12"

    sent: int

    def encode(self) -> Frames:
        return [self.KIND, cbor.encode_plain([self.sent])]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Ping:
        (sent,) = expect_array("PING", cbor.decode_plain(body), 1)
        expect_u64("PING count", sent)
        return cls(sent)
