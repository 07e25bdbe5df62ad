"""What stands in front of a message of which buffers went another way: as descriptors of shared memory.

The message itself is what it would be without, with an empty frame in the place of each such buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anyengine.errors import ProtocolError
from anyengine.protocol import cbor
from anyengine.protocol.checks import expect_array, expect_type, expect_u64

LANE_KIND = b"\x1f"
"""The first frame of such a message. Its second is the list of :class:`Passed`; then kind, body and buffers follow."""

_MAX_SIZE = 2**63 - 1


class Passed(NamedTuple):
    """One buffer that went by the lane: its index in the message, and where its bytes are.

    ``number`` counts the descriptors of this lane. The bytes lie at ``offset`` of the file. A block that is ``lent``
    is told when it is not needed any more; any other file is only read, and what is written to it stays private.
    """

    buffer: int
    number: int
    offset: int
    size: int
    lent: bool


def encode_passed(passed: Sequence[Passed]) -> bytes:
    """The list as bytes."""
    return cbor.encode_plain([list(item) for item in passed])


def decode_passed(body: bytes) -> list[Passed]:
    """The list that :func:`encode_passed` made.

    :raises ProtocolError: if it is not such a list
    """
    items = cbor.decode_plain(body)
    expect_type("LANE", items, list)
    result: list[Passed] = []
    for item in items:
        buffer, number, offset, size, lent = expect_array("LANE item", item, 5)
        expect_u64("LANE buffer", buffer)
        expect_u64("LANE number", number)
        expect_u64("LANE offset", offset)
        expect_u64("LANE size", size)
        expect_type("LANE lent", lent, bool)
        if offset > _MAX_SIZE or not 0 < size <= _MAX_SIZE:
            raise ProtocolError(f"LANE item of {size} bytes at {offset}: not a part of a file")
        result.append(Passed(buffer, number, offset, size, lent))
    return result
