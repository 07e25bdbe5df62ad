"""What an engine sends on its PUSH while it serves.

Each body begins with the session, which names one life of one engine, and a sequence number, by which a lost message
shows.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from anyengine.brief import brief
from anyengine.errors import CrashReport, ProtocolError, UnencodableError
from anyengine.excerpts import MESSAGE_LIMIT, NAME_LIMIT, excerpt, trace_excerpt
from anyengine.protocol import cbor, packing
from anyengine.protocol.cbor import Buffers as Buffers
from anyengine.protocol.cbor import Frames as Frames
from anyengine.protocol.checks import expect_array, expect_counts, expect_type
from anyengine.protocol.outputs import (
    OutputDetails,
    StepOutputs,
    decode_column,
    decode_details,
    encode_column,
    encode_details,
    u32_bytes,
)

DEAD = b"ENGINE_CORE_DEAD"
"""The kind frame of an engine's last message, spelled as vLLM spells it."""


class Outputs(NamedTuple):
    """One step; see :mod:`anyengine.protocol.outputs` for its columns."""

    KIND = b"\x30"

    session: int
    sequence: int
    step: int
    outputs: StepOutputs

    def encode(self) -> Frames:
        buffers: Frames = []
        session, sequence, step, outputs = self
        handles = encode_column("Q", outputs.handles, buffers)
        counts = None if outputs.counts is None else encode_column("I", outputs.counts, buffers)
        token_ids = encode_column("I", outputs.token_ids, buffers)
        details: dict[int, object] = {}
        if outputs.details:
            outputs.check_endings()
            for row, more in outputs.details.items():
                details[int(row)] = encode_details(more, buffers, f"outputs[{row}]")
        body = cbor.encode_plain([session, sequence, step, handles, counts, token_ids, details])
        return [self.KIND, body, *buffers]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Outputs:
        fields = expect_array("OUTPUTS", cbor.decode(body, buffers), 7)
        session, sequence, step, handles, counts, token_ids, details = fields
        expect_counts("OUTPUTS", session, sequence, step)
        if type(details) is not dict:
            raise ProtocolError("OUTPUTS ends with a map of details")
        rows: dict[int, OutputDetails] = {}
        for row, more in cast("dict[object, object]", details).items():
            if type(row) is not int:
                raise ProtocolError(f"OUTPUTS has details of row {brief(row)}")
            rows[row] = decode_details(more)
        try:
            outputs = StepOutputs(
                decode_column("Q", handles, buffers, "handles"),
                decode_column("I", token_ids, buffers, "token_ids"),
                None if counts is None else decode_column("I", counts, buffers, "counts"),
                rows,
            )
            outputs.check_endings()
        except ValueError as error:
            raise ProtocolError(f"OUTPUTS has impossible columns: {error}") from None
        return cls(session, sequence, step, outputs)


_TOKENS = struct.Struct("<cQQQ")


class Tokens(NamedTuple):
    """A step whose rows are those of the step before, in the same order, with one token each and nothing else.

    Most steps of a busy engine are like that, so this message is one frame without CBOR: its kind, then session,
    sequence and step as u64, then the token ids as u32, all little-endian.
    """

    KIND = b"\x36"

    session: int
    sequence: int
    step: int
    token_ids: Sequence[int]

    def encode(self) -> Frames:
        session, sequence, step, token_ids = self
        return [_TOKENS.pack(self.KIND, session, sequence, step) + u32_bytes(token_ids)]

    @classmethod
    def decode(cls, frame: bytes | memoryview) -> Tokens:
        if len(frame) < _TOKENS.size or (len(frame) - _TOKENS.size) % 4:
            raise ProtocolError(f"TOKENS of {len(frame)} bytes is cut")
        kind, session, sequence, step = _TOKENS.unpack_from(frame)
        if kind != cls.KIND:
            raise ProtocolError(f"a message of one frame is TOKENS; kind {kind!r} came")
        return cls(session, sequence, step, memoryview(frame)[_TOKENS.size :].cast("I"))


def _printable(text: str | None) -> str | None:
    return None if text is None else cbor.printable(text)


def _bounded(kind: Any, message: Any, traceback: Any) -> tuple[str, str, str | None]:
    """A failure as it travels and is kept: an engine of somebody else's need not know the limits."""
    return (
        excerpt(kind, NAME_LIMIT),
        excerpt(message, MESSAGE_LIMIT),
        None if traceback is None else trace_excerpt(traceback),
    )


class UtilityResult(NamedTuple):
    """The answer to a utility call: its value, or the exception that it raised (type, message, traceback)."""

    KIND = b"\x31"

    session: int
    sequence: int
    call_id: int
    error: tuple[str, str, str | None] | None
    value: Any

    def encode(self) -> Frames:
        buffers: Frames = []
        value = packing.pack(self.value, buffers, path="result")
        error = None
        if self.error is not None:
            error = _bounded(*map(_printable, self.error))
        return [self.KIND, cbor.encode_plain([self.session, self.sequence, self.call_id, error, value]), *buffers]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> UtilityResult:
        session, sequence, call_id, error, value = expect_array("UTILITY_RESULT", cbor.decode(body, buffers), 5)
        expect_counts("UTILITY_RESULT", session, sequence, call_id)
        if error is not None:
            kind, message, traceback = expect_array("UTILITY_RESULT error", error, 3)
            expect_type("UTILITY_RESULT error type", kind, str)
            expect_type("UTILITY_RESULT error message", message, str)
            if traceback is not None:
                expect_type("UTILITY_RESULT error traceback", traceback, str)
            if value is not None:
                raise ProtocolError("UTILITY_RESULT has both an error and a value")
            error = _bounded(kind, message, traceback)
        cbor.expect_value("UTILITY_RESULT value", value)
        return cls(session, sequence, call_id, error, value)


class Stats(NamedTuple):
    """The engine's own figures, by name."""

    KIND = b"\x33"

    session: int
    sequence: int
    figures: Mapping[str, float]

    def encode(self) -> Frames:
        for name, figure in self.figures.items():
            if type(name) is not str or type(figure) not in (int, float):
                raise UnencodableError("statistics", f"{brief(name)}: {brief(figure)} is not a name with a number")
        figures = packing.pack(self.figures, [], path="statistics")
        return [self.KIND, cbor.encode_plain([self.session, self.sequence, figures])]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Stats:
        session, sequence, figures = expect_array("STATS", cbor.decode_plain(body), 3)
        expect_counts("STATS", session, sequence)
        expect_type("STATS figures", figures, dict)
        for name, figure in figures.items():
            if type(name) is not str or type(figure) not in (int, float):
                raise ProtocolError(f"STATS has {brief(name)}: {brief(figure)}")
        return cls(session, sequence, figures)


class Pong(NamedTuple):
    """The answer to PING: how many steps the engine has made in its life."""

    KIND = b"\x34"

    session: int
    sequence: int
    steps: int

    def encode(self) -> Frames:
        return [self.KIND, cbor.encode_plain([self.session, self.sequence, self.steps])]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Pong:
        fields = expect_array("PONG", cbor.decode_plain(body), 3)
        expect_counts("PONG", *fields)
        return cls(*fields)


class Goodbye(NamedTuple):
    """The last message of an engine that ends in good order without having been told to by this client."""

    KIND = b"\x35"

    session: int
    sequence: int

    def encode(self) -> Frames:
        return [self.KIND, cbor.encode_plain([self.session, self.sequence])]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Goodbye:
        fields = expect_array("GOODBYE", cbor.decode_plain(body), 2)
        expect_counts("GOODBYE", *fields)
        return cls(*fields)


class Dead(NamedTuple):
    """The engine's last message when Python code in it raised: what it can say of its own death."""

    KIND = DEAD

    session: int
    sequence: int
    exception_type: str
    exception_message: str
    traceback: str

    def encode(self) -> Frames:
        texts = _bounded(*map(_printable, (self.exception_type, self.exception_message, self.traceback)))
        return [self.KIND, cbor.encode_plain([self.session, self.sequence, *texts])]

    @classmethod
    def decode(cls, body: bytes, buffers: Buffers) -> Dead:
        session, sequence, *texts = expect_array("ENGINE_CORE_DEAD", cbor.decode_plain(body), 5)
        expect_counts("ENGINE_CORE_DEAD", session, sequence)
        for text in texts:
            expect_type("ENGINE_CORE_DEAD report", text, str)
        kind, message, traceback = _bounded(*texts)
        return cls(session, sequence, kind, message, traceback or "")

    def amend(self, report: CrashReport) -> CrashReport:
        """``report`` with what this message adds."""
        return dataclasses.replace(
            report,
            exception_type=self.exception_type,
            exception_message=self.exception_message,
            traceback=self.traceback,
        )
