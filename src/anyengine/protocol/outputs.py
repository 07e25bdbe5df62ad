"""One engine step as columns: which requests, how many tokens each, the tokens, and details of the few that have any.

The body of an OUTPUTS message is ``[session, sequence, step, handles, counts, token_ids, details]``. ``handles`` holds
u64, ``counts`` and ``token_ids`` u32, all little-endian; ``counts`` is null when every row has one token. ``details``
maps a row's index to a map with only what that row has. A column above the inline limit travels as a buffer.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, cast

from anyengine.brief import brief
from anyengine.errors import ProtocolError, RequestError, UnencodableError
from anyengine.excerpts import MESSAGE_LIMIT, excerpt
from anyengine.protocol import arrays, cbor, packing
from anyengine.protocol.error_kinds import ERROR_KINDS, ErrorKind, request_error
from anyengine.types import FinishReason, TokenLogprobs

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputDetails:
    """What few rows of a step have: the end of the request, or more than tokens.

    ``error`` goes with the finish reason ``"error"`` and says in a sentence what went wrong; ``error_kind`` says whose
    fault that was, None being ``"failed"``. :meth:`to_error` makes the error of both.
    """

    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    pooling_output: Any = None
    kv_transfer_params: Mapping[str, Any] | None = None
    events: Sequence[Any] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but a reason for the end of the request, as on most last rows."""
        return (
            self.stop_reason
            is self.error
            is self.error_kind
            is self.logprobs
            is self.prompt_logprobs
            is self.pooling_output
            is self.kv_transfer_params
            is self.events
            is None
        )

    def to_error(self, request_id: object) -> RequestError:
        """What is raised for a request that ended with the finish reason ``"error"``."""
        problem = excerpt(self.error or "failed in the engine", MESSAGE_LIMIT)
        return request_error(self.error_kind or "failed", f"request {request_id}: {problem}")


_ENDINGS: Mapping[object, OutputDetails] = {reason: OutputDetails(finish_reason=reason) for reason in FINISH_REASONS}


class StepOutputs:
    """What one step of an engine brought, in columns that all have the same order.

    ``handles`` names the request of each row, ``counts`` its number of tokens (None: one each), ``token_ids`` the
    tokens of all rows one after the other, and ``details`` maps the indices of some rows to the rest.

    :raises ValueError: if the columns disagree in length
    """

    __slots__ = ("counts", "details", "handles", "token_ids")

    def __init__(
        self,
        handles: Sequence[int],
        token_ids: Sequence[int],
        counts: Sequence[int] | None = None,
        details: Mapping[int, OutputDetails] | None = None,
    ) -> None:
        self.handles: Sequence[int] = handles
        self.token_ids: Sequence[int] = token_ids
        self.counts: Sequence[int] | None = counts
        self.details: Mapping[int, OutputDetails] = {} if details is None else details
        if counts is None:
            if len(token_ids) != len(handles):
                raise ValueError(f"{len(handles)} rows of one token each, but {len(token_ids)} tokens")
        elif len(counts) != len(handles) or sum(counts) != len(token_ids):
            raise ValueError(f"{len(handles)} rows, {len(counts)} counts, {len(token_ids)} tokens")
        for row in self.details:
            if not 0 <= row < len(handles):
                raise ValueError(f"details of row {row}, but there are {len(handles)} rows")

    def __len__(self) -> int:
        return len(self.handles)

    def __repr__(self) -> str:
        return f"<StepOutputs rows={len(self.handles)} tokens={len(self.token_ids)} details={len(self.details)}>"

    def handle_bytes(self) -> bytes:
        """The column of handles as it travels: u64, little-endian."""
        handles = cast("Any", self.handles)
        column_type = getattr(handles, "typecode", None) or getattr(handles, "format", None)  # of array and memoryview
        return (handles if column_type == "Q" else array("Q", handles)).tobytes()

    def rows(self) -> Iterator[tuple[int, Sequence[int], OutputDetails | None]]:
        """Row by row: handle, token ids, details."""
        if self.counts is None:
            for row, handle in enumerate(self.handles):
                yield handle, self.token_ids[row : row + 1], self.details.get(row)
            return
        start = 0
        for row, (handle, count) in enumerate(zip(self.handles, self.counts, strict=True)):
            yield handle, self.token_ids[start : start + count], self.details.get(row)
            start += count

    def check_endings(self) -> None:
        """:raises ValueError: if requests end in this step and some request has more than one row"""
        if not self.details or len(set(self.handles)) == len(self.handles):
            return
        if any(more.finish_reason is not None for more in self.details.values()):
            raise ValueError("a request has more than one row in a step in which requests end")

    def select(self, keep: Sequence[bool]) -> StepOutputs:
        """The rows for which ``keep`` is true.

        :raises ValueError: if ``keep`` has not one entry a row
        """
        if len(keep) != len(self.handles):
            raise ValueError(f"{len(self.handles)} rows, but {len(keep)} entries that say which of them to keep")
        if self.counts is not None:
            return from_rows(compress(self.rows(), keep))
        # No work per row in Python: after an abort the engine may have sent thousands of steps that nobody wants.
        details: dict[int, OutputDetails] = {}
        if self.details:
            places = {row: place for place, row in enumerate(compress(range(len(keep)), keep))}
            details = {places[row]: more for row, more in self.details.items() if keep[row]}
        token_ids = array("I", compress(self.token_ids, keep))
        return StepOutputs(array("Q", compress(self.handles, keep)), token_ids, None, details)


def from_rows(rows: Iterable[tuple[int, Sequence[int], OutputDetails | None]]) -> StepOutputs:
    """Columns from rows of handle, token ids and details."""
    handles, counts, token_ids = array("Q"), array("I"), array("I")
    details: dict[int, OutputDetails] = {}
    for row, (handle, tokens, more) in enumerate(rows):
        handles.append(handle)
        counts.append(len(tokens))
        token_ids.extend(tokens)
        if more is not None:
            details[row] = more
    single = len(token_ids) == len(handles) and all(count == 1 for count in counts)
    return StepOutputs(handles, token_ids, None if single else counts, details)


def u32_bytes(values: Sequence[int]) -> bytes:
    """A column of u32 as it travels."""
    return _column_bytes("I", values)


def _column_bytes(typecode: str, values: Sequence[int]) -> bytes:
    column = cast("array[int] | memoryview", values)
    if type(column) is array and column.typecode == typecode:
        return column.tobytes()
    if type(column) is memoryview and column.format == typecode:
        # A view of all of a byte string is that string: a long prompt is not copied.
        whole = column.obj
        return whole if type(whole) is bytes and len(whole) == column.nbytes else column.tobytes()
    return array(typecode, values).tobytes()


def encode_column(typecode: str, values: Sequence[int], buffers: list[cbor.Buffer]) -> bytes | int:
    """A column of u32 (``"I"``) or u64 (``"Q"``) as bytes, or as the index of the buffer that now holds them."""
    data = _column_bytes(typecode, values)
    if len(data) <= arrays.INLINE_LIMIT:
        return data
    buffers.append(data)
    return len(buffers) - 1


def decode_column(typecode: str, data: object, buffers: Sequence[memoryview], name: str) -> memoryview:
    """The column that :func:`encode_column` made, without a copy.

    :raises ProtocolError: if it is neither bytes nor a buffer's index, or is cut in the middle of a number
    """
    if type(data) is bytes:
        view = memoryview(data)
    elif type(data) is int and 0 <= data < len(buffers):
        view = buffers[data]
    else:
        raise ProtocolError(f"column {name} is neither bytes nor the index of one of {len(buffers)} buffers")
    try:
        return cast("memoryview", view.cast(cast("Any", typecode)))
    except TypeError:
        raise ProtocolError(f"column {name} of {len(view)} bytes is cut in the middle of a number") from None


def encode_details(details: OutputDetails, buffers: list[cbor.Buffer], path: str) -> dict[str, object]:
    """The map that travels for one row: only the fields that are set.

    :raises UnencodableError: if a field cannot travel, or is not what it should be
    """
    if details.is_plain and details.finish_reason in FINISH_REASONS:
        return {"finish_reason": details.finish_reason}
    wire: dict[str, object] = {}
    if details.finish_reason is not None:
        wire["finish_reason"] = details.finish_reason
    if details.error is not None:
        text = details.error
        wire["error"] = excerpt(cbor.printable(text), MESSAGE_LIMIT) if type(text) is str else text
    for name in ("logprobs", "prompt_logprobs"):
        positions = getattr(details, name)
        if positions is not None:
            wire[name] = _encode_logprobs(positions, f"{path}.{name}")
    for name in ("stop_reason", "error_kind", "pooling_output", "kv_transfer_params", "events"):
        value = getattr(details, name)
        if value is not None:
            wire[name] = packing.pack(value, buffers, path=f"{path}.{name}")
    for name, value in wire.items():
        if (problem := _problem(name, value)) is not None:
            raise UnencodableError(f"{path}.{name}", problem)
    return wire


def decode_details(wire: object) -> OutputDetails:
    """The details that :func:`encode_details` made.

    :raises ProtocolError: if the map has an unknown key or a value of the wrong type
    """
    if not isinstance(wire, dict):
        raise ProtocolError("the details of a row are not a map")
    fields = cast("dict[str, Any]", wire)
    if len(fields) == 1 and type(reason := fields.get("finish_reason")) is str and reason in _ENDINGS:
        return _ENDINGS[reason]
    for name, value in fields.items():
        if (problem := _problem(name, value)) is not None:
            raise ProtocolError(f"the details of a row hold {brief(name)}: {problem}")
        if name in _OPEN_DETAILS:
            cbor.expect_value(name, value)
    if "error" in fields:
        fields["error"] = excerpt(fields["error"], MESSAGE_LIMIT)
    for name in ("logprobs", "prompt_logprobs"):
        if name in fields:
            fields[name] = _decode_logprobs(fields[name])
    return OutputDetails(**fields)


_DETAIL_TYPES: dict[str, tuple[type, ...] | None] = {
    "finish_reason": (str,),
    "stop_reason": (int, str),
    "error": (str,),
    "error_kind": (str,),
    "logprobs": (list,),
    "prompt_logprobs": (list,),
    "pooling_output": None,
    "kv_transfer_params": (dict,),
    "events": (list,),
}
_OPEN_DETAILS = frozenset({"pooling_output", "kv_transfer_params", "events"})


def _problem(name: str, value: object) -> str | None:
    """What is wrong with one field of a row's details as it travels, if something is."""
    if name not in _DETAIL_TYPES:
        return "there is no such field"
    accepted = _DETAIL_TYPES[name]
    if value is None or (accepted is not None and type(value) not in accepted):
        return f"unexpected {type(value).__name__}"
    if name == "finish_reason" and value not in FINISH_REASONS:
        return f"{brief(value)} is not one of {', '.join(FINISH_REASONS)}"
    if name == "error_kind" and value not in ERROR_KINDS:
        return f"{brief(value)} is not one of {', '.join(ERROR_KINDS)}"
    return None


def _encode_logprobs(positions: Sequence[TokenLogprobs], path: str) -> list[bytes]:
    """Three columns: entries per position (u32), token ids (u32), log-probabilities (f32)."""
    counts, tokens, values = array("I"), array("I"), array("f")
    try:
        for position in positions:
            counts.append(len(position))
            tokens.extend(position.keys())
            values.extend(position.values())
    except (TypeError, AttributeError, OverflowError) as error:
        problem = f"not a list of mappings from u32 token ids to numbers: {error}"
        raise UnencodableError(f"{path}[{max(len(counts) - 1, 0)}]", problem) from error
    return [counts.tobytes(), tokens.tobytes(), values.tobytes()]


def _decode_logprobs(wire: object) -> list[TokenLogprobs]:
    columns = cast("list[object]", wire)
    if len(columns) != 3:
        raise ProtocolError("logprobs are three columns")
    counts = decode_column("I", columns[0], (), "logprob counts")
    tokens = decode_column("I", columns[1], (), "logprob tokens").tolist()
    values = decode_column("f", columns[2], (), "logprob values").tolist()
    if sum(counts) != len(tokens) or len(tokens) != len(values):
        raise ProtocolError(f"logprobs of {sum(counts)} entries have {len(tokens)} tokens and {len(values)} values")
    positions: list[TokenLogprobs] = []
    start = 0
    for count in counts:
        position = dict(zip(tokens[start : start + count], values[start : start + count], strict=True))
        if len(position) != count:
            raise ProtocolError("logprobs name a token twice at one position")
        positions.append(position)
        start += count
    return positions
