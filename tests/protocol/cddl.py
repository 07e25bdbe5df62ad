"""Messages against ``schema.cddl``, for every tier of tests: hand recorded frames to :func:`validate_message`.

The validator's time doubles with each map inside a map; keep values in validated messages shallower than six.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from cddl_verifier import Validator

import anyengine.protocol

Direction = Literal["to_engine", "to_client"]
"""``"to_engine"`` is what the ROUTER sends, ``"to_client"`` what comes from the DEALER and the PUSH."""

SCHEMA = Path(anyengine.protocol.__file__).with_name("schema.cddl")

RULES: dict[Direction, dict[bytes, str]] = {
    "to_engine": {
        b"\x00": "add",
        b"\x01": "abort",
        b"\x03": "utility",
        b"\x10": "init",
        b"\x11": "shutdown",
        b"\x12": "ping",
    },
    "to_client": {
        b"\x20": "hello",
        b"\x21": "progress",
        b"\x22": "ready",
        b"\x30": "outputs",
        b"\x31": "utility-result",
        b"\x33": "stats",
        b"\x34": "pong",
        b"\x35": "goodbye",
        b"ENGINE_CORE_DEAD": "dead",
    },
}
"""The rule of each kind of message, written down here once more so that a changed kind shows."""

# What CDDL cannot say: where the columns are, and what their length must be a multiple of.
_COLUMNS: dict[str, dict[int, int]] = {"add": {1: 4, 2: 4}, "abort": {0: 8}, "outputs": {3: 8, 4: 4, 5: 4}}


class SchemaViolation(AssertionError):
    """A message that is not what the schema says."""


@functools.cache
def schema() -> Validator:
    """The parsed schema."""
    return Validator(SCHEMA)


def validate_record(rule: str, body: bytes) -> Any:
    """``body`` decoded by the validator's own decoder, which shares no code with anyengine's.

    :raises SchemaViolation: if it does not follow ``rule``
    """
    result = schema().validate(body, root_type=rule)
    if not result.valid:
        raise SchemaViolation(f"{rule}: {result.format(verbose=True)}")
    return result.data


def validate_message(frames: Sequence[Any], direction: Direction) -> None:
    """Check one whole message: ``frames`` are kind, body and buffers, without a ROUTER's identity.

    :raises SchemaViolation: if it does not follow the rule of its kind, or does not use each of its buffers once
    """
    if len(frames) < 2:
        raise SchemaViolation(f"a message of {len(frames)} frames")
    rule = RULES[direction].get(bytes(frames[0]))
    if rule is None:
        raise SchemaViolation(f"kind {bytes(frames[0])[:16]!r} is not in the table of {direction}")
    data = validate_record(rule, bytes(frames[1]))
    sizes = [memoryview(frame).nbytes for frame in frames[2:]]
    used: list[int] = []
    for position, width in _COLUMNS.get(rule, {}).items():
        column = data[position]
        if isinstance(column, int):
            used.append(column)
        size = sizes[column] if isinstance(column, int) and column < len(sizes) else len(column or b"")
        if size % width:
            raise SchemaViolation(f"{rule}: column {position} has {size} bytes, which is no multiple of {width}")
    used += _array_buffers(data)
    if sorted(used) != list(range(len(sizes))):
        raise SchemaViolation(f"{rule}: the body uses the buffers {sorted(used)}, but {len(sizes)} came")


def _array_buffers(data: Any) -> Iterator[int]:
    """The buffers that the arrays in ``data`` refer to."""
    if isinstance(data, dict):
        for value in data.values():
            yield from _array_buffers(value)
    elif isinstance(data, list):
        for value in data:
            yield from _array_buffers(value)
    elif hasattr(data, "tag"):
        where = data.value[3]
        if isinstance(where, int):
            yield where
