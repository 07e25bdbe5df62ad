"""A step's columns: lengths that agree, rows in and out, and the choice of some of them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.strategies import canonical, details, step_outputs, u32, u64

from anyengine.errors import ProtocolError
from anyengine.protocol.outputs import OutputDetails, StepOutputs, decode_column, encode_column, from_rows

Row = tuple[int, list[int], OutputDetails | None]
rows = st.lists(st.tuples(u64, st.lists(u32, max_size=3), st.none() | details), max_size=6)


def rows_of(outputs: StepOutputs) -> list[Any]:
    return [(handle, list(tokens), canonical(more)) for handle, tokens, more in outputs.rows()]


def shown(given_rows: list[Row]) -> list[Any]:
    return [(handle, list(tokens), canonical(more)) for handle, tokens, more in given_rows]


@given(rows)
def test_rows_that_go_in_come_out(given_rows: list[Row]) -> None:
    outputs = from_rows(given_rows)
    assert len(outputs) == len(given_rows)
    assert rows_of(outputs) == shown(given_rows)
    assert list(outputs.token_ids) == [token for _, tokens, _ in given_rows for token in tokens]
    assert set(outputs.details) == {index for index, (_, _, more) in enumerate(given_rows) if more is not None}


@given(rows)
def test_counts_are_left_out_exactly_when_every_row_has_one_token(given_rows: list[Row]) -> None:
    outputs = from_rows(given_rows)
    assert (outputs.counts is None) == all(len(tokens) == 1 for _, tokens, _ in given_rows)
    if outputs.counts is not None:
        assert list(outputs.counts) == [len(tokens) for _, tokens, _ in given_rows]


@given(step_outputs())
def test_columns_that_go_in_come_out_as_rows(outputs: StepOutputs) -> None:
    assert [handle for handle, _, _ in outputs.rows()] == list(outputs.handles)
    assert [token for _, tokens, _ in outputs.rows() for token in tokens] == list(outputs.token_ids)
    assert rows_of(from_rows(outputs.rows())) == rows_of(outputs)


@given(step_outputs(), st.data())
def test_selecting_keeps_the_rows_that_are_kept_in_their_order(outputs: StepOutputs, data: st.DataObject) -> None:
    keep = data.draw(st.lists(st.booleans(), min_size=len(outputs), max_size=len(outputs)))
    kept = outputs.select(keep)
    assert rows_of(kept) == [row for row, wanted in zip(rows_of(outputs), keep, strict=True) if wanted]


@given(step_outputs())
def test_selecting_all_or_none_is_the_step_or_nothing(outputs: StepOutputs) -> None:
    assert rows_of(outputs.select([True] * len(outputs))) == rows_of(outputs)
    assert rows_of(outputs.select([False] * len(outputs))) == []


@given(step_outputs().filter(len), st.integers(-1, 1).filter(bool))
def test_selecting_needs_an_entry_for_each_row(outputs: StepOutputs, difference: int) -> None:
    with pytest.raises(ValueError):
        outputs.select([True] * (len(outputs) + difference))


@given(st.integers(0, 4), st.integers(0, 6), st.none() | st.lists(st.integers(0, 3), max_size=5))
def test_columns_of_lengths_that_disagree_are_refused(handles: int, tokens: int, counts: list[int] | None) -> None:
    agree = tokens == handles if counts is None else len(counts) == handles and sum(counts) == tokens
    try:
        outputs = StepOutputs(range(handles), range(tokens), counts)
    except ValueError as error:
        assert not agree
        assert str(handles) in str(error)
    else:
        assert agree
        assert len(outputs) == handles


@pytest.mark.parametrize("row", [-1, 2, 2**40])
def test_details_of_a_row_that_is_not_there_are_refused(row: int) -> None:
    with pytest.raises(ValueError, match="there are 2 rows"):
        StepOutputs([1, 2], [1, 2], None, {row: OutputDetails()})


def test_a_step_without_rows_is_a_step() -> None:
    outputs = StepOutputs((), ())
    assert len(outputs) == 0
    assert list(outputs.rows()) == []
    assert "rows=0" in repr(outputs)


@pytest.mark.parametrize("values", [array("Q"), array("Q", [1]), array("Q", range(8192)), array("Q", range(8193))])
def test_a_column_is_in_the_body_up_to_64_kib_and_in_a_buffer_above(values: Any) -> None:
    buffers: list[Any] = [b"another"]
    data = encode_column("Q", values, buffers)
    assert (len(buffers) == 2) == (len(values) > 8192)
    views = [memoryview(buffer) for buffer in buffers]
    assert decode_column("Q", data, views, "handles").tolist() == values.tolist()


@given(st.binary(max_size=40), st.sampled_from(["I", "Q", "f"]))
def test_a_column_that_is_cut_in_the_middle_of_a_number_is_refused(data: bytes, typecode: str) -> None:
    width = array(typecode).itemsize
    if len(data) % width:
        with pytest.raises(ProtocolError, match="middle of a number"):
            decode_column(typecode, data, (), "column")
    else:
        assert decode_column(typecode, data, (), "column").nbytes == len(data)


@pytest.mark.parametrize("data", [2, 3, -1, True, False, None, 1.0, "text", [1], bytearray(4)], ids=repr)
def test_a_column_is_bytes_or_the_index_of_a_buffer_that_came(data: Any) -> None:
    with pytest.raises(ProtocolError, match="neither bytes nor the index of one of 2 buffers"):
        decode_column("I", data, [memoryview(bytes(4)), memoryview(bytes(4))], "column")


@given(st.lists(u64, unique=True, max_size=5), st.data())
def test_only_steps_that_end_requests_need_distinct_rows(handles: list[int], data: st.DataObject) -> None:
    repeated = [*handles, *data.draw(st.lists(st.sampled_from(handles), max_size=3) if handles else st.just([]))]
    reason = data.draw(st.sampled_from([None, "stop"]))
    row = {data.draw(st.integers(0, len(repeated) - 1)): OutputDetails(finish_reason=reason)} if repeated else {}
    outputs = StepOutputs(repeated, [0] * len(repeated), None, row)
    if reason is not None and len(repeated) > len(handles):
        with pytest.raises(ValueError, match="more than one row"):
            outputs.check_endings()
    else:
        outputs.check_endings()
