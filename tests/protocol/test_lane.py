"""The list in front of a message of which buffers went by the lane."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol import hostile
from tests.protocol.cddl import validate_record

from anyengine.errors import ProtocolError
from anyengine.protocol.lane import Passed, decode_passed, encode_passed

numbers = st.integers(0, 2**64 - 1)
sizes = st.integers(0, 2**63 - 1)
lists = st.lists(st.builds(Passed, numbers, numbers, sizes, st.integers(1, 2**63 - 1), st.booleans()), min_size=1)


@given(lists)
def test_it_arrives_as_it_was_and_follows_the_schema(passed: list[Passed]) -> None:
    body = encode_passed(passed)
    validate_record("lane", body)
    assert decode_passed(body) == passed


@given(st.binary(max_size=40) | hostile.items)
def test_arbitrary_bytes_decode_or_are_refused(body: bytes) -> None:
    try:
        passed = decode_passed(body)
    except ProtocolError:
        return
    if passed:
        validate_record("lane", body)


@pytest.mark.parametrize(
    "item", [(0, 0, 0, 0, True), (0, 0, 2**63, 1, True), (0, 0, 0, 2**63, True), (-1, 0, 0, 1, True), (0, 0, 0, 1, 1)]
)
def test_what_is_no_part_of_a_file_is_refused(item: tuple[int, int, int, int, bool]) -> None:
    with pytest.raises(ProtocolError, match="LANE"):
        decode_passed(encode_passed([Passed(*item)]))
