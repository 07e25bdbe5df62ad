"""What the engine's machine makes of calls and messages, case by case."""

from __future__ import annotations

from typing import Any

import cbor2
import numpy
import pytest
from tests.protocol.bad_features import BAD_FEATURES, FEATURE, MISPLACED_FEATURES
from tests.protocol.machines import INFO, RANK, SESSION, TOKEN, engine_in, frames_of, snapshot
from tests.protocol.strategies import arrived

from anyengine.errors import ProtocolError, UnencodableError
from anyengine.params import SamplingParams
from anyengine.protocol.engine_machine import (
    AbortReceived,
    CallMalformed,
    CallReceived,
    EngineMachine,
    EngineState,
    InitReceived,
    PingReceived,
    RequestMalformed,
    RequestReceived,
    ShutdownReceived,
)
from anyengine.protocol.messages import PROTOCOL_VERSION, MessageLostError, decode_from_engine
from anyengine.protocol.outputs import OutputDetails, StepOutputs
from anyengine.protocol.replies import Outputs, Tokens
from anyengine.protocol.requests import Abort, Add, Init, Ping, Shutdown, Utility
from anyengine.protocol.sampling import NO_OPTIONS


def add(handle: int) -> list[bytes | memoryview]:
    return frames_of(Add(handle, [[1, 2]], None, SamplingParams(), NO_OPTIONS))


def sent(frames: Any) -> Any:
    return decode_from_engine(arrived(frames))


def test_the_handshake_gives_its_messages_and_an_event() -> None:
    machine = EngineMachine(rank=RANK, token=TOKEN)
    hello = sent(machine.hello(99))
    assert (hello.version, hello.token, hello.pid, hello.rank) == (PROTOCOL_VERSION, TOKEN, 99, RANK)
    init = machine.receive(frames_of(Init(PROTOCOL_VERSION, SESSION, "ipc:///o", "a:B", {"x": 1})))
    assert init == InitReceived("ipc:///o", "a:B", {"x": 1})
    assert sent(machine.progress("weights", 1)) == ("weights", 1.0)
    assert sent(machine.ready(INFO)).info.engine == INFO.engine


def test_an_init_of_another_version_is_refused_with_both_numbers() -> None:
    machine = engine_in(EngineState.GREETING)
    with pytest.raises(ProtocolError, match=rf"version {PROTOCOL_VERSION + 7} .*version {PROTOCOL_VERSION};"):
        machine.receive(frames_of(Init(PROTOCOL_VERSION + 7, SESSION, "", "a:B", {})))
    assert machine.state is EngineState.GREETING


def test_replies_repeat_the_session_and_count() -> None:
    machine = engine_in(EngineState.SERVING)
    first = 2  # engine_in sent two
    replies = [
        sent(machine.outputs(1, StepOutputs([1], [5]))),
        sent(machine.release(1, [1])),
        sent(machine.fail(1, [9], "no")),
        sent(machine.answer(0, "value")),
        sent(machine.stats({"running": 1})),
        sent(machine.pong(1)),
        sent(machine.dead("Error", "boom", "Traceback")),
    ]
    assert [reply.session for reply in replies] == [SESSION] * 7
    assert [reply.sequence for reply in replies] == list(range(first, first + 7))


def test_a_request_is_live_until_its_last_row() -> None:
    machine = engine_in(EngineState.SERVING)
    event = machine.receive(add(8))
    assert isinstance(event, RequestReceived)
    assert event.message.handles == range(8, 9)
    assert machine.live == {1, 8}
    machine.outputs(1, StepOutputs([8, 1], [5, 5], None, {0: OutputDetails(stop_reason=3)}))
    assert machine.live == {1, 8}
    machine.outputs(1, StepOutputs([8, 1], [5, 5], None, {0: OutputDetails(finish_reason="length")}))
    assert machine.live == {1}


def test_a_request_whose_handle_is_live_is_refused_and_the_live_one_goes_on() -> None:
    machine = engine_in(EngineState.SERVING)
    with pytest.raises(ProtocolError, match="came twice"):
        machine.receive(add(1))
    with pytest.raises(ProtocolError):
        machine.receive([b"\x00", cbor2.dumps([1, None, b"cut", None, {}, {}])])
    assert machine.live == {1}


def test_an_abort_gives_the_live_ones_once_each_and_nothing_if_there_are_none() -> None:
    machine = engine_in(EngineState.SERVING)
    machine.receive(add(8))
    assert machine.receive(frames_of(Abort([77, 8, 1, 8, 2]))) == AbortReceived([8, 1])
    released = sent(machine.release(3, [8, 1]))
    assert [(handle, more.finish_reason) for handle, _, more in released.outputs.rows()] == [(8, "abort"), (1, "abort")]
    assert machine.live == set()
    assert machine.receive(frames_of(Abort([8, 1]))) is None
    assert machine.receive(frames_of(Abort([]))) is None


def test_a_refused_request_gets_one_last_row_that_says_why() -> None:
    machine = engine_in(EngineState.SERVING)
    machine.receive(add(8))
    refused = sent(machine.fail(3, [8], "too long \udcff"))
    ((handle, tokens, more),) = refused.outputs.rows()
    assert (handle, list(tokens), more.finish_reason, more.error) == (8, [], "error", "too long \\udcff")
    assert machine.live == {1}


def test_calls_pings_and_shutdowns_come_as_events() -> None:
    machine = engine_in(EngineState.SERVING)
    assert machine.receive(frames_of(Utility(4, "method", [1, "two"]))) == CallReceived(4, "method", [1, "two"])
    assert machine.receive(frames_of(Ping(4))) == PingReceived()
    assert machine.receive(frames_of(Shutdown("drain"))) == ShutdownReceived("drain")


BAD_ADDS: dict[str, Any] = {
    "neither tokens nor embeddings": [9, None, None, None, {}, {}],
    "tokens and embeddings": [9, None, b"", cbor2.CBORTag(41440, ["numpy", "|u1", [1, 1], b"a"]), {}, {}],
    "tokens cut": [9, None, b"abc", None, {}, {}],
    "tokens in a buffer that is not there": [9, None, 0, None, {}, {}],
    "a tensor that disagrees with its bytes": [
        9,
        None,
        None,
        cbor2.CBORTag(41440, ["torch", "int8", [2, 2], b"abc"]),
        {},
        {},
    ],
    "an unknown parameter": [9, None, b"", None, {"temprature": 1}, {}],
    "an impossible parameter": [9, None, b"", None, {"top_p": 2}, {}],
    "a parameter of the wrong type": [9, None, b"", None, {"max_tokens": "5"}, {}],
    "a bool for a number": [9, None, b"", None, {"max_tokens": True}, {}],
    "a parameter that is not a name": [9, None, b"", None, {5: 5}, {}],
    "null for a default": [9, None, b"", None, {"seed": None}, {}],
    "NaN": [9, None, b"", None, {"temperature": float("nan")}, {}],
    "two shapes at once": [9, None, b"", None, {"structured_outputs": {"regex": "a", "grammar": "b"}}, {}],
    "no shape": [9, None, b"", None, {"structured_outputs": {}}, {}],
    "a shape that is not a map": [9, None, b"", None, {"structured_outputs": 5}, {}],
    "a shape of the wrong type": [9, None, b"", None, {"structured_outputs": {"regex": 5}}, {}],
    "choices that are not strings": [9, None, b"", None, {"structured_outputs": {"choice": ["a", 1]}}, {}],
    "a shape with a number for a name": [9, None, b"", None, {"structured_outputs": {5: "a"}}, {}],
    "sampling that is not a map": [9, None, b"", None, [], {}],
    "a field too few": [9, None, b"", None, {}],
    "lengths that are not those of the tokens": [9, b"\1\0\0\0", b"", None, {}, {}],
    "lengths cut": [9, b"\1", b"\1\0\0\0", None, {}, {}],
    "lengths of embeddings": [9, b"\1\0\0\0", None, cbor2.CBORTag(41440, ["torch", "int8", [1, 1], b"a"]), {}, {}],
    "an unknown option": [9, None, b"", None, {}, {"prio": 1}],
    "an impossible option": [9, None, b"", None, {}, {"priority": 2**40}],
    "an option of the wrong type": [9, None, b"", None, {}, {"cache_salt": 1}],
    "null for a default option": [9, None, b"", None, {}, {"lora": None}],
    "half an adapter": [9, None, b"", None, {}, {"lora": {"lora_name": "a"}}],
    "pooling with null": [9, None, b"", None, {}, {"pooling": {"dimensions": None}}],
    **{
        f"features: {name}": [9, None, bytes(12), None, {}, {"features": features}]
        for name, features in {**BAD_FEATURES, **MISPLACED_FEATURES}.items()
    },
    "features of embeddings": [
        9,
        None,
        None,
        cbor2.CBORTag(41440, ["torch", "int8", [2, 2], b"abcd"]),
        {},
        {"features": [FEATURE]},
    ],
    "options that are not a map": [9, None, b"", None, {}, []],
    "a field too many": [9, b"", None, {}, None],
}


@pytest.mark.parametrize("body", BAD_ADDS.values(), ids=BAD_ADDS)
def test_a_malformed_request_fails_alone(body: Any) -> None:
    machine = engine_in(EngineState.SERVING)
    event = machine.receive([b"\x00", cbor2.dumps(body)])
    assert isinstance(event, RequestMalformed)
    assert event.handles == range(9, 10)
    assert event.problem
    assert machine.live == {1, 9}
    row = sent(machine.fail(1, event.handles, event.problem)).outputs.details[0]
    assert (row.finish_reason, row.error) == ("error", event.problem)
    assert machine.live == {1}
    assert machine.receive(frames_of(Ping(4))) == PingReceived(), "it counts as a message that came"


def test_features_of_several_prompts_are_refused_for_all_of_them() -> None:
    body = [9, bytes.fromhex("0200000001000000"), bytes(12), None, {}, {"features": [FEATURE]}]
    event = engine_in(EngineState.SERVING).receive([b"\x00", cbor2.dumps(body)])
    assert isinstance(event, RequestMalformed)
    assert event.handles == range(9, 11)
    assert event.problem == "ADD carries features, but not the token ids of one prompt"


BAD_CALLS: dict[str, Any] = {
    "a method that is no name": [9, 5, []],
    "arguments that are no list": [9, "method", {}],
    "a tensor that disagrees with its bytes": [9, "method", [cbor2.CBORTag(41440, ["torch", "int8", [4], b"abc"])]],
    "undefined": [9, "method", [cbor2.undefined]],
    "a field too few": [9, "method"],
}


@pytest.mark.parametrize("body", BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_malformed_call_fails_alone(body: Any) -> None:
    machine = engine_in(EngineState.SERVING)
    event = machine.receive([b"\x03", cbor2.dumps(body)])
    assert isinstance(event, CallMalformed)
    assert event.call_id == 9
    assert machine.receive(frames_of(Ping(4))) == PingReceived()


@pytest.mark.parametrize("kind", [b"\x00", b"\x03"])
@pytest.mark.parametrize("first", [None, -1, True, "9", 1.0, [9]], ids=repr)
def test_a_malformed_message_that_names_nobody_is_refused(kind: bytes, first: Any) -> None:
    machine = engine_in(EngineState.SERVING)
    before = snapshot(machine)
    with pytest.raises(ProtocolError):
        machine.receive([kind, cbor2.dumps([first, "cut"])])
    assert snapshot(machine) == before


@pytest.mark.parametrize("difference", [-3, -1, 1, 1000])
def test_a_ping_whose_count_differs_shows_that_messages_were_lost(difference: int) -> None:
    machine = engine_in(EngineState.SERVING)
    with pytest.raises(MessageLostError, match=f"sent {3 + difference} messages, but 3 arrived"):
        machine.receive(frames_of(Ping(3 + difference)))
    assert machine.receive(frames_of(Ping(3))) == PingReceived()


def test_an_answer_that_cannot_travel_leaves_the_call_to_be_answered() -> None:
    machine = engine_in(EngineState.SERVING)
    with pytest.raises(UnencodableError, match=r"result\['x'\]"):
        machine.answer(0, {"x": object()})
    reply = sent(machine.answer(0, None, ("UnencodableError", "result['x'] ...", None)))
    assert (reply.sequence, reply.call_id) == (2, 0)


def test_outputs_that_cannot_travel_leave_the_machine_as_it_was() -> None:
    machine = engine_in(EngineState.SERVING)
    before = snapshot(machine)
    bad = StepOutputs([1], [5], None, {0: OutputDetails(finish_reason="stop", pooling_output={1})})
    with pytest.raises(UnencodableError, match=r"outputs\[0\]\.pooling_output"):
        machine.outputs(1, bad)
    with pytest.raises(UnencodableError):
        machine.stats({"running": numpy.int64(1)})  # type: ignore[dict-item]
    with pytest.raises(OverflowError):
        machine.outputs(1, StepOutputs([1], [-5], None, {0: OutputDetails(finish_reason="stop")}))
    assert snapshot(machine) == before
    assert sent(machine.pong(1)).sequence == 2


def test_the_last_message_gets_out_whatever_the_error_says() -> None:
    machine = engine_in(EngineState.SERVING)
    dead = sent(machine.dead("OSError", "no such file: '\udcff'", "Traceback '\udcff'"))
    assert dead.exception_message == "no such file: '\\udcff'"
    assert machine.state is EngineState.DEAD


def test_a_step_like_the_one_before_is_tokens_alone() -> None:
    machine = engine_in(EngineState.SERVING)
    machine.receive(add(8))
    rows = [8, 1]

    def kind(outputs: StepOutputs) -> type:
        return type(sent(machine.outputs(1, outputs)))

    assert kind(StepOutputs(rows, [1, 2])) is Outputs
    assert kind(StepOutputs(rows, [1, 2])) is Tokens
    assert kind(StepOutputs(rows, [1, 2, 3], [2, 1])) is Outputs, "two tokens of one request"
    assert kind(StepOutputs(rows, [1, 2])) is Tokens
    assert kind(StepOutputs([1, 8], [1, 2])) is Outputs, "another order"
    assert kind(StepOutputs([1, 8], [1, 2], None, {0: OutputDetails(stop_reason=5)})) is Outputs
    assert kind(StepOutputs([1, 8], [1, 2])) is Tokens
    assert kind(StepOutputs([1, 8], [1, 2], None, {0: OutputDetails(finish_reason="stop")})) is Outputs
    assert kind(StepOutputs([1, 8], [1, 2])) is Outputs, "a request of the step before has ended"
    assert kind(StepOutputs([], [])) is Outputs
    assert kind(StepOutputs([], [])) is Tokens


def test_tokens_that_are_no_u32_are_refused_and_take_no_number() -> None:
    machine = engine_in(EngineState.SERVING)
    first = sent(machine.outputs(1, StepOutputs([1], [1])))
    for token in (-1, 2**32, "a"):
        with pytest.raises((OverflowError, TypeError)):
            machine.outputs(1, StepOutputs([1], [token]))  # type: ignore[list-item]
    assert sent(machine.outputs(1, StepOutputs([1], [1]))).sequence == first.sequence + 1
