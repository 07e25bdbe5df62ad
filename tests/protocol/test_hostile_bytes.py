"""Whatever arrives, it decodes or raises ProtocolError, and what decodes is what the schema says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol import hostile, strategies
from tests.protocol.cddl import RULES, Direction, validate_message, validate_record
from tests.protocol.machines import (
    SESSION,
    client_in,
    engine_in,
    messages_to_client,
    messages_to_engine,
    snapshot,
)
from tests.protocol.strategies import THOROUGHNESS, arrived, examples

from anyengine.errors import ProtocolError
from anyengine.multimodal import MultiModalFeature, MultiModalField
from anyengine.params import RequestOptions, SamplingParams, StructuredOutputs
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.protocol.client_machine import ClientMachine, ClientState
from anyengine.protocol.engine_machine import EngineMachine, EngineState
from anyengine.protocol.messages import decode_from_client, decode_from_engine
from anyengine.protocol.outputs import OutputDetails, StepOutputs
from anyengine.protocol.replies import Outputs, UtilityResult
from anyengine.protocol.requests import Add, Init, Utility
from anyengine.protocol.sampling import NO_OPTIONS

DECODERS: dict[Direction, Callable[..., Any]] = {"to_engine": decode_from_client, "to_client": decode_from_engine}
DIRECTIONS: list[Direction] = ["to_engine", "to_client"]

RICH_SAMPLING = SamplingParams(
    max_tokens=5,
    temperature=0.5,
    stop_token_ids=[1, 2],
    logit_bias={1: 0.5},
    structured_outputs=StructuredOutputs(choice=["a", "b"]),
    extra={"array": numpy.arange(3), "more": [1, None, {"a": 1.5}]},
)
RICH_OPTIONS = RequestOptions(
    cache_salt="salt",
    features=[
        MultiModalFeature(
            modality="image",
            identifier="a",
            offset=1,
            length=2,
            fields={"x": MultiModalField(data=[torch.ones(2), 1], batching="flat", dim=1, keep_on_cpu=True)},
            is_embed=torch.tensor([True, False]),
        )
    ],
)
RICH_DETAILS = OutputDetails(
    finish_reason="stop",
    stop_reason="x",
    logprobs=[{1: 0.5, 2: 0.25}],
    pooling_output=torch.ones(2, 2),
    kv_transfer_params={"a": b"xyz"},
    events=[1, {"b": None}],
)
LARGE_ARRAY = numpy.zeros(2**17, dtype="u1")
LARGE: dict[Direction, list[Any]] = {
    "to_engine": [
        Add(5, [range(20000)], None, RICH_SAMPLING, NO_OPTIONS),
        Add(5, None, numpy.zeros((200, 200)), SamplingParams(extra={"a": LARGE_ARRAY}), NO_OPTIONS),
        Utility(1, "method", [LARGE_ARRAY, torch.zeros(2**15), LARGE_ARRAY]),
        Init(1, SESSION, "ipc:///x", "a:B", {"array": LARGE_ARRAY}),
    ],
    "to_client": [
        Outputs(SESSION, 0, 1, strategies.large_step(20000)),
        Outputs(SESSION, 0, 1, StepOutputs([1, 2], [1, 2], None, {1: OutputDetails(pooling_output=LARGE_ARRAY)})),
        UtilityResult(SESSION, 0, 0, None, [LARGE_ARRAY, LARGE_ARRAY]),
    ],
}
STRATEGIES = {"to_engine": strategies.to_engine, "to_client": strategies.to_client}
SAMPLES: dict[Direction, list[Any]] = {
    "to_engine": [
        *messages_to_engine().values(),
        Add(5, [[1]], None, RICH_SAMPLING, NO_OPTIONS),
        Add(5, [[1, 2, 3]], None, SamplingParams(), RICH_OPTIONS),
        Add(
            5,
            None,
            torch.zeros(2, 3),
            SamplingParams(structured_outputs=StructuredOutputs(json={"a": [1]})),
            NO_OPTIONS,
        ),
    ],
    "to_client": [
        *messages_to_client().values(),
        Outputs(SESSION, 0, 1, StepOutputs([1, 2], [1, 2, 3], [1, 2], {1: RICH_DETAILS, 0: OutputDetails(error="e")})),
        UtilityResult(SESSION, 0, 0, ("Error", "boom", None), None),
        UtilityResult(SESSION, 0, 0, None, [torch.ones(2), numpy.ones(3), {1: "a", "b": b"c"}]),
    ],
}
_HEADS = bytes.fromhex("00 17 18 1b 20 40 5b 60 80 9b a0 bb c1 d9 f4 f6 f7 fb ff")
CASES = [(direction, message) for direction in DIRECTIONS for message in SAMPLES[direction]]
CASE_IDS = [f"{type(message).__name__}-{index}" for index, (_, message) in enumerate(CASES)]


def decodes(direction: Direction, frames: list[bytes], *, against_schema: bool = True) -> bool:
    """Whether ``frames`` are a message; if they are, they must follow the schema."""
    try:
        DECODERS[direction](arrived(frames))
    except ProtocolError as error:
        assert str(error)
        return False
    if len(frames) == 1:
        validate_message(frames, direction)
    elif against_schema:
        validate_record(RULES[direction][frames[0]], frames[1])
    return True


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(data=st.data())
def test_arbitrary_frames_decode_or_are_refused(direction: Direction, data: st.DataObject) -> None:
    kinds = st.sampled_from(sorted(RULES[direction])) | st.binary(max_size=3)
    bodies = st.binary(max_size=30) | hostile.items
    frames = data.draw(st.lists(kinds | bodies, max_size=4))
    decodes(direction, frames)


@pytest.mark.parametrize("direction", DIRECTIONS)
@examples(200)
@given(data=st.data())
def test_arbitrary_items_in_the_fields_of_a_message_decode_or_are_refused(
    direction: Direction, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(RULES[direction])))
    length = data.draw(st.integers(0, 8))
    fields = data.draw(st.lists(hostile.items, min_size=length, max_size=length))
    buffers = data.draw(st.lists(st.binary(), max_size=2))
    decodes(direction, [kind, hostile.head(4, length) + b"".join(fields), *buffers])


@pytest.mark.parametrize("direction", DIRECTIONS)
@examples(300)
@given(data=st.data())
def test_mutated_messages_decode_to_what_the_schema_allows_or_are_refused(
    direction: Direction, data: st.DataObject
) -> None:
    messages = st.one_of(STRATEGIES[direction], st.sampled_from(SAMPLES[direction]))
    decodes(direction, data.draw(hostile.mutated(messages)))


@pytest.mark.parametrize("direction", DIRECTIONS)
@examples(100)
@given(data=st.data())
def test_mutated_messages_with_buffers_decode_or_are_refused(direction: Direction, data: st.DataObject) -> None:
    frames = data.draw(hostile.mutated(st.sampled_from(LARGE[direction])))
    decodes(direction, frames, against_schema=False)


@pytest.mark.parametrize(("direction", "message"), CASES, ids=CASE_IDS)
def test_every_change_of_one_byte_decodes_or_is_refused(direction: Direction, message: Any) -> None:
    kind, body = (bytes(frame) for frame in message.encode())
    assert decodes(direction, [kind, body])
    decode = DECODERS[direction]
    for position, byte in enumerate(body):
        flips = [byte ^ 1 << bit for bit in range(8)]
        for changed in {*flips, *_HEADS} if THOROUGHNESS == 1 else range(256):
            with contextlib.suppress(ProtocolError):
                decode([kind, body[:position] + bytes([changed]) + body[position + 1 :]])


@pytest.mark.parametrize(("direction", "message"), CASES, ids=CASE_IDS)
def test_every_cut_is_refused_and_every_inserted_or_removed_byte_decodes_or_is_refused(
    direction: Direction, message: Any
) -> None:
    kind, body = (bytes(frame) for frame in message.encode())
    for position in range(len(body)):
        assert not decodes(direction, [kind, body[:position]])
        decodes(direction, [kind, body[:position] + body[position + 1 :]])
        for byte in (0x00, 0x40, 0x60, 0x80, 0xA0, 0xC1, 0xF6, 0xF7, 0xFF):
            decodes(direction, [kind, body[:position] + bytes([byte]) + body[position:]])
    assert not decodes(direction, [kind])
    assert not decodes(direction, [])


@given(st.binary(max_size=40), st.sampled_from([b"", b"\x36", b"\x36" + bytes(24)]))
def test_a_single_frame_decodes_as_tokens_or_is_refused(frame: bytes, head: bytes) -> None:
    assert not decodes("to_engine", [head + frame])
    fits = (head + frame)[:1] == b"\x36" and len(head + frame) % 4 == 25 % 4 and len(head + frame) >= 25
    assert decodes("to_client", [head + frame]) == fits
    receive_or_refuse(client_in(ClientState.SERVING), [head + frame])


FOREIGN_ITEMS = [
    bytes.fromhex(item)
    for line in (
        "00 20 f4 f5 f6 f7 e0 f97e00 f93c00 40 4100 60 6161 80 8100 a0 a10001 a1616100 a14000 a1f97e0000 a18000",
        "1bffffffffffffffff 3bffffffffffffffff c249010000000000000000 d81c80 d81d00",
        "d9a1e084656e756d7079637c7531810141ff d9a1e08465746f7263686575696e7438804101",
    )
    for item in line.split()
]


@pytest.mark.parametrize(("direction", "message"), CASES, ids=CASE_IDS)
def test_each_item_in_the_place_of_each_other_decodes_to_what_the_schema_allows_or_is_refused(
    direction: Direction, message: Any
) -> None:
    """Text where bytes belong, a bool for a number, an array for a key, and so on, exhaustively."""
    kind, body = (bytes(frame) for frame in message.encode())
    accepted = 0
    for start, end in hostile.spans(body):
        for item in FOREIGN_ITEMS:
            accepted += decodes(direction, [kind, body[:start] + item + body[end:]])
    assert accepted < len(hostile.spans(body)) * len(FOREIGN_ITEMS)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("index", range(4))
def test_dropped_repeated_reordered_and_resized_frames_decode_or_are_refused(direction: Direction, index: int) -> None:
    if index >= len(LARGE[direction]):
        return
    frames = [bytes(frame) for frame in LARGE[direction][index].encode()]
    assert decodes(direction, frames)
    for position in range(len(frames)):
        assert not decodes(direction, frames[:position])
        assert not decodes(direction, frames[:position] + frames[position + 1 :])
        repeated = [*frames[: position + 1], *frames[position:]]
        decodes(direction, repeated, against_schema=False)
        for other in range(len(frames)):
            swapped = list(frames)
            swapped[position], swapped[other] = swapped[other], swapped[position]
            decodes(direction, swapped, against_schema=False)
    for position in range(2, len(frames)):
        buffer = frames[position]
        for changed in (buffer[:-1], buffer + b"\0", b"", buffer[: len(buffer) // 2]):
            resized = [*frames[:position], changed, *frames[position + 1 :]]
            decodes(direction, resized, against_schema=False)
        assert not decodes(direction, [*frames[:position], buffer[:-1], *frames[position + 1 :]])


@given(st.binary(max_size=60) | hostile.items | hostile.mutated(strategies.pings).map(lambda frames: b"".join(frames)))
def test_an_arbitrary_bootstrap_record_decodes_or_is_refused(body: bytes) -> None:
    try:
        Bootstrap.decode(body)
    except ProtocolError:
        return
    validate_record("bootstrap", body)


class _Record:
    def __init__(self, bootstrap: Bootstrap) -> None:
        self.body = bootstrap.encode()

    def encode(self) -> list[bytes]:
        return [b"", self.body]


@given(hostile.mutated(strategies.bootstraps.map(_Record)))
def test_a_mutated_bootstrap_record_decodes_to_what_the_schema_allows_or_is_refused(frames: list[bytes]) -> None:
    if len(frames) < 2:
        return
    try:
        Bootstrap.decode(frames[1])
    except ProtocolError:
        return
    validate_record("bootstrap", frames[1])


# ---- the machines ----


def receive_or_refuse(machine: ClientMachine[Any] | EngineMachine, frames: list[bytes]) -> None:
    """A message that is refused leaves state and tables as they were."""
    before = snapshot(machine)
    try:
        machine.receive(arrived(frames))
    except ProtocolError:
        assert snapshot(machine) == before
    else:
        assert isinstance(machine.state, type(before[0]))


@pytest.mark.parametrize("state", ClientState)
@examples(60)
@given(data=st.data())
def test_a_client_in_any_state_takes_or_refuses_whatever_comes(state: ClientState, data: st.DataObject) -> None:
    machine = client_in(state)
    real = st.sampled_from([*messages_to_client().values(), *SAMPLES["to_client"], *LARGE["to_client"]])
    frames = (
        hostile.mutated(real) | hostile.mutated(strategies.to_client) | st.lists(st.binary(max_size=20), max_size=3)
    )
    for message in data.draw(st.lists(frames, min_size=1, max_size=3)):
        receive_or_refuse(machine, message)


@pytest.mark.parametrize("state", EngineState)
@examples(60)
@given(data=st.data())
def test_an_engine_in_any_state_takes_or_refuses_whatever_comes(state: EngineState, data: st.DataObject) -> None:
    machine = engine_in(state)
    real = st.sampled_from([*messages_to_engine().values(), *SAMPLES["to_engine"], *LARGE["to_engine"]])
    frames = (
        hostile.mutated(real) | hostile.mutated(strategies.to_engine) | st.lists(st.binary(max_size=20), max_size=3)
    )
    for message in data.draw(st.lists(frames, min_size=1, max_size=3)):
        receive_or_refuse(machine, message)


@pytest.mark.parametrize("state", [ClientState.LOADING, ClientState.SERVING])
def test_every_foreign_item_in_every_field_leaves_a_client_whole(state: ClientState) -> None:
    for message in SAMPLES["to_client"]:
        kind, body = (bytes(frame) for frame in message.encode())
        for start, end in hostile.spans(body):
            for item in FOREIGN_ITEMS:
                receive_or_refuse(client_in(state), [kind, body[:start] + item + body[end:]])


@pytest.mark.parametrize("state", [EngineState.GREETING, EngineState.SERVING])
def test_every_foreign_item_in_every_field_leaves_an_engine_whole(state: EngineState) -> None:
    for message in SAMPLES["to_engine"]:
        kind, body = (bytes(frame) for frame in message.encode())
        for start, end in hostile.spans(body):
            for item in FOREIGN_ITEMS:
                receive_or_refuse(engine_in(state), [kind, body[:start] + item + body[end:]])
