"""Every message comes out as it went in, and is what ``schema.cddl`` says."""

from __future__ import annotations

import dataclasses
from array import array
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import cbor2
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol import strategies
from tests.protocol.cddl import validate_message, validate_record
from tests.protocol.strategies import arrived, canonical, examples

from anyengine.errors import ProtocolError, UnencodableError
from anyengine.params import SamplingParams, StructuredOutputs
from anyengine.protocol.arrays import INLINE_LIMIT
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.protocol.handshake import Progress, Ready
from anyengine.protocol.messages import decode_from_client, decode_from_engine
from anyengine.protocol.outputs import OutputDetails, StepOutputs, from_rows
from anyengine.protocol.replies import Dead, Outputs, Stats, UtilityResult
from anyengine.protocol.requests import Abort, Add, Init, Utility
from anyengine.protocol.sampling import NO_OPTIONS
from anyengine.types import EngineInfo

offsets = st.integers(0, 17)

TO_ENGINE = {
    "ADD": strategies.adds,
    "ABORT": strategies.aborts,
    "UTILITY": strategies.utilities,
    "INIT": strategies.inits,
    "SHUTDOWN": strategies.shutdowns,
    "PING": strategies.pings,
}
TO_CLIENT = {
    "HELLO": strategies.hellos,
    "PROGRESS": strategies.progresses,
    "READY": strategies.readies,
    "OUTPUTS": strategies.outputs,
    "TOKENS": strategies.tokens,
    "UTILITY_RESULT": strategies.utility_results,
    "STATS": strategies.stats,
    "PONG": strategies.pongs,
    "ENGINE_CORE_DEAD": strategies.deads,
}


def round_trip_to_engine(message: Any, offset: int = 0) -> Any:
    frames = message.encode()
    validate_message(frames, "to_engine")
    return decode_from_client(arrived(frames, offset))


def round_trip_to_client(message: Any, offset: int = 0) -> Any:
    frames = message.encode()
    validate_message(frames, "to_client")
    return decode_from_engine(arrived(frames, offset))


@pytest.mark.parametrize("kind", TO_ENGINE)
@given(data=st.data())
def test_what_a_client_sends_arrives_equal_and_follows_the_schema(kind: str, data: st.DataObject) -> None:
    message = data.draw(TO_ENGINE[kind])
    assert canonical(round_trip_to_engine(message)) == canonical(message)


@pytest.mark.parametrize("kind", TO_CLIENT)
@given(data=st.data())
def test_what_an_engine_sends_arrives_equal_and_follows_the_schema(kind: str, data: st.DataObject) -> None:
    message = data.draw(TO_CLIENT[kind])
    assert canonical(round_trip_to_client(message)) == canonical(message)


@examples(15)
@given(
    st.lists(strategies.large_arrays | strategies.arrays(), min_size=1, max_size=4),
    st.sampled_from([0, 100, INLINE_LIMIT]),
    offsets,
)
def test_large_and_small_arrays_in_one_message_keep_their_places(arrays: list[Any], extra: int, offset: int) -> None:
    sampling = SamplingParams(extra={"a": arrays[0], "bytes": bytes(extra)})
    add = Add(1, None, numpy.ones((200, 300), dtype="<f8"), sampling, NO_OPTIONS)
    assert canonical(round_trip_to_engine(add, offset)) == canonical(add)
    call = Utility(2, "method", [arrays, {"again": arrays}])
    assert canonical(round_trip_to_engine(call, offset)) == canonical(call)
    result = UtilityResult(1, 2, 3, None, {"arrays": arrays, 5: bytes(extra)})
    assert canonical(round_trip_to_client(result, offset)) == canonical(result)
    details = {
        0: OutputDetails(pooling_output=arrays[0], events=arrays),
        2: OutputDetails(kv_transfer_params={1: arrays}),
    }
    outputs = Outputs(1, 2, 3, StepOutputs([7, 8, 9], [1, 2, 3], None, details))
    assert canonical(round_trip_to_client(outputs, offset)) == canonical(outputs)
    init = Init(1, 2, "ipc:///x", "a:B", {"weights": arrays})
    assert canonical(round_trip_to_engine(init, offset)) == canonical(init)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 16384, 16385, 40000])
@pytest.mark.parametrize("offset", [0, 1])
def test_columns_travel_in_the_body_or_in_buffers(rows: int, offset: int) -> None:
    outputs = Outputs(1, 2, 3, strategies.large_step(rows))
    assert canonical(round_trip_to_client(outputs, offset)) == canonical(outputs)
    add = Add(1, [range(rows)], None, SamplingParams(), NO_OPTIONS)
    assert canonical(round_trip_to_engine(add, offset).prompts[0]) == canonical(list(range(rows)))
    abort = Abort(range(rows))
    assert canonical(round_trip_to_engine(abort, offset).handles) == canonical(list(range(rows)))


@pytest.mark.parametrize(
    "column",
    [
        array("Q", [1, 2**32 - 1]),
        array("q", [1, 2**32 - 1]),
        array("I", [1, 2**32 - 1]),
        array("L", [1, 2**32 - 1]),
        memoryview(array("Q", [1, 2**32 - 1])),
        numpy.array([1, 2**32 - 1]),
        numpy.array([1, 5, 2**32 - 1, 5])[::2],
        memoryview(numpy.array([1, 2**32 - 1])),
        [1, 2**32 - 1],
        (1, 2**32 - 1),
    ],
    ids=lambda column: f"{type(column).__name__}",
)
def test_a_column_of_another_width_is_converted_and_not_taken_for_bytes(column: Any) -> None:
    outputs = round_trip_to_client(Outputs(1, 2, 3, StepOutputs(column, column)))
    assert list(outputs.outputs.handles) == [1, 2**32 - 1]
    assert list(outputs.outputs.token_ids) == [1, 2**32 - 1]
    add = round_trip_to_engine(Add(1, [column], None, SamplingParams(), NO_OPTIONS))
    assert list(add.prompts[0]) == [1, 2**32 - 1]


@pytest.mark.parametrize("column", [[-1], [2**64], array("b", [-1]), [1.5], ["1"]], ids=repr)
def test_a_column_that_holds_something_else_is_refused_where_it_is_encoded(column: Any) -> None:
    with pytest.raises((OverflowError, TypeError)):
        Abort(column).encode()


def test_nothing_but_what_differs_from_its_default_travels_as_sampling_parameter() -> None:
    assert len(Add(1, [[1]], None, SamplingParams(), NO_OPTIONS).encode()[1]) == len(
        b"\x86\x01\xf6\x44\1\0\0\0\xf6\xa0\xa0"
    )


def test_numbers_that_are_subclasses_of_float_travel_as_sampling_parameters() -> None:
    sampling = SamplingParams(temperature=numpy.float64(0.25), logit_bias={1: numpy.float64(0.5)})
    received = round_trip_to_engine(Add(1, [[1]], None, sampling, NO_OPTIONS)).sampling
    assert received.temperature == 0.25
    assert type(received.temperature) is float


class Size(IntEnum):
    """Integers by another name."""

    SMALL = 3


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=Size.SMALL),
        SamplingParams(seed=Size.SMALL),
        SamplingParams(logit_bias={Size.SMALL: 1}),
    ],
    ids=["max_tokens", "seed", "logit_bias"],
)
def test_numbers_that_are_subclasses_of_int_travel_as_sampling_parameters(sampling: SamplingParams) -> None:
    received = round_trip_to_engine(Add(1, [[1]], None, sampling, NO_OPTIONS)).sampling
    assert received == sampling
    assert type(received.max_tokens) is int


def test_a_json_schema_may_be_any_mapping() -> None:
    schema = MappingProxyType({"type": "object", "required": ("a",)})
    sampling = SamplingParams(structured_outputs=StructuredOutputs(json=schema), extra=MappingProxyType({"a": schema}))
    received = round_trip_to_engine(Add(1, [[1]], None, sampling, NO_OPTIONS)).sampling
    assert received.structured_outputs == StructuredOutputs(json={"type": "object", "required": ["a"]})
    assert received.extra == {"a": {"type": "object", "required": ["a"]}}


def test_an_engine_that_describes_itself_by_the_essential_gets_the_defaults() -> None:
    info = EngineInfo(engine="scripted", version="1", max_model_len=100)
    received = round_trip_to_client(Ready(info)).info
    assert canonical(received) == canonical(info)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", None),
        ("max_model_len", 100.0),
        ("max_model_len", True),
        ("max_model_len", -1),
        ("max_model_len", numpy.int64(100)),
        ("vocab_size", "32000"),
        ("dtype", torch.bfloat16),
        ("kv_cache_max_concurrency", "2"),
        ("supported_tasks", "generate"),
        ("supported_tasks", ["generate", 5]),
        ("utilities", {"sleep"}),
        ("prompt_embeds", 1),
        ("max_logprobs", -2),
        ("max_logprobs", None),
    ],
)
def test_an_engine_that_describes_itself_wrongly_is_told_so_before_its_client_waits(field: str, value: Any) -> None:
    """The client would refuse such a READY and go on waiting for a good one."""
    info = dataclasses.replace(EngineInfo(engine="scripted", version="1", max_model_len=100), **{field: value})
    with pytest.raises(UnencodableError, match=rf"EngineInfo(\.|\['){field}"):
        Ready(info).encode()


@given(strategies.bootstraps)
def test_the_bootstrap_record_arrives_equal_and_follows_the_schema(bootstrap: Bootstrap) -> None:
    body = bootstrap.encode()
    validate_record("bootstrap", body)
    assert Bootstrap.decode(body) == bootstrap


LONE = "file \udcff name"
ESCAPED = "file \\udcff name"


def test_text_about_a_failure_may_hold_what_utf8_cannot() -> None:
    """Messages of OSError hold file names, and those hold lone surrogates; a failure must not fail on its report."""
    dead = round_trip_to_client(Dead(1, 2, LONE, LONE, LONE))
    assert (dead.exception_type, dead.exception_message, dead.traceback) == (ESCAPED, ESCAPED, ESCAPED)
    result = round_trip_to_client(UtilityResult(1, 2, 3, (LONE, LONE, LONE), None))
    assert result.error == (ESCAPED, ESCAPED, ESCAPED)
    refused = from_rows([(1, (), OutputDetails(finish_reason="error", error=LONE))])
    assert round_trip_to_client(Outputs(1, 2, 3, refused)).outputs.details[0].error == ESCAPED
    assert round_trip_to_client(Progress(LONE, None)).stage == ESCAPED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("finish_reason", "finished"),
        ("finish_reason", 1),
        ("stop_reason", numpy.int64(3)),
        ("stop_reason", 1.5),
        ("stop_reason", True),
        ("stop_reason", "\ud800"),
        ("error", b"bytes"),
        ("logprobs", [{-1: 0.5}]),
        ("logprobs", [{1: 0.5}, {2**32: 0.5}]),
        ("logprobs", [{1: "high"}]),
        ("logprobs", [0.5]),
        ("prompt_logprobs", 5),
        ("pooling_output", {1, 2}),
        ("kv_transfer_params", [1]),
        ("events", {"a": 1}),
        ("events", [object()]),
    ],
)
def test_a_detail_that_the_client_would_refuse_is_refused_by_the_engine_with_its_place(field: str, value: Any) -> None:
    details = OutputDetails(**{field: value})
    with pytest.raises(UnencodableError) as caught:
        Outputs(1, 2, 3, StepOutputs([7, 8], [1, 2], None, {1: details})).encode()
    assert caught.value.path.startswith(f"outputs[1].{field}")


ONE, TWO = (number.to_bytes(4, "little") for number in (1, 2))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([TWO, ONE + ONE, bytes(8)], "twice"),
        ([TWO, ONE, bytes(8)], "2 entries have 1 tokens and 2 values"),
        ([TWO, ONE + TWO, bytes(4)], "2 entries have 2 tokens and 1 values"),
        ([ONE, ONE + TWO, bytes(8)], "1 entries have 2 tokens"),
        ([b"\xff" * 8, ONE, bytes(4)], "entries have 1 tokens"),
        ([b"", b"", b"", b""], "three columns"),
        ([b"", b""], "three columns"),
        ([b"cut", b"", b""], "middle of a number"),
        ([b"", b"cut", b""], "middle of a number"),
        ([b"", b"", b"cut"], "middle of a number"),
        ([0, b"", b""], "neither bytes nor"),
        (["", "", ""], "neither bytes nor"),
        ([[], [], []], "neither bytes nor"),
    ],
)
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_whose_columns_disagree_are_refused(field: str, columns: Any, words: str) -> None:
    body = cbor2.dumps([1, 2, 3, bytes(8), None, bytes(4), {0: {field: columns}}])
    with pytest.raises(ProtocolError, match=words):
        decode_from_engine([b"\x30", body, bytes(4)])


@pytest.mark.parametrize(
    "figures", [{"a": "1"}, {"a": True}, {"a": None}, {1: 1}, {"a": numpy.float64(1)}, {"a": 2**64}]
)
def test_figures_that_the_client_would_refuse_are_refused_by_the_engine(figures: Any) -> None:
    with pytest.raises(UnencodableError, match="statistics"):
        Stats(1, 2, figures).encode()


def test_a_method_name_that_cannot_travel_is_named() -> None:
    with pytest.raises(UnencodableError, match="method"):
        Utility(1, "\ud800", []).encode()


def test_a_request_may_not_have_two_rows_in_the_step_that_ends_it() -> None:
    twice = StepOutputs([7, 8, 7], [1, 2, 3], None, {0: OutputDetails(finish_reason="stop")})
    with pytest.raises(ValueError, match="more than one row"):
        Outputs(1, 2, 3, twice).encode()
    harmless = StepOutputs(
        [7, 8, 7], [1, 2, 3], None, {0: OutputDetails(finish_reason="stop"), 1: OutputDetails(error="x")}
    )
    frames = Outputs(1, 2, 3, StepOutputs([7, 8, 9], [1, 2, 3], None, harmless.details)).encode()
    frames[1] = bytes(frames[1]).replace((9).to_bytes(8, "little"), (7).to_bytes(8, "little"))
    with pytest.raises(ProtocolError, match="more than one row"):
        decode_from_engine(arrived(frames))


@pytest.mark.parametrize("embeds", ["text", [1.0, 2.0], numpy.zeros(3), torch.zeros(1, 2, 3), {"a": 1}], ids=repr)
def test_prompt_embeddings_that_are_no_matrix_are_refused(embeds: Any) -> None:
    frames = Add(1, None, embeds, SamplingParams(), NO_OPTIONS).encode()
    with pytest.raises(ProtocolError, match="tokens x hidden size"):
        decode_from_client(arrived(frames))
