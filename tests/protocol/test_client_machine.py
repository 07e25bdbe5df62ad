"""What the client's machine makes of calls and messages, case by case."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.machines import (
    INFO,
    RANK,
    SESSION,
    TOKEN,
    client_in,
    frames_of,
    messages_to_client,
    snapshot,
)
from tests.protocol.strategies import arrived

from anyengine.errors import ProtocolError, UnencodableError
from anyengine.params import SamplingParams
from anyengine.protocol.client_machine import (
    CallAnswered,
    ClientMachine,
    ClientState,
    DeathAnnounced,
    HelloReceived,
    PongReceived,
    ProgressReceived,
    ReadyReceived,
    StatsReceived,
    StepReceived,
    VersionError,
)
from anyengine.protocol.handshake import Hello, Progress, Ready
from anyengine.protocol.messages import PROTOCOL_VERSION, MessageLostError, decode_from_client
from anyengine.protocol.outputs import OutputDetails, StepOutputs, from_rows
from anyengine.protocol.replies import Dead, Outputs, Pong, Stats, Tokens, UtilityResult
from anyengine.protocol.sampling import NO_OPTIONS

FINISHED = OutputDetails(finish_reason="stop", stop_reason=7)
ABORTED = OutputDetails(finish_reason="abort")


def serving(requests: int = 0) -> ClientMachine[Any]:
    """A machine that serves ``requests`` requests, 1, 2, ..., whose owners are "a", "b", ..."""
    machine: ClientMachine[Any] = ClientMachine(rank=RANK, token=TOKEN, session=SESSION, handles=itertools.count(1))
    machine.receive(frames_of(Hello(PROTOCOL_VERSION, TOKEN, 1, RANK)))
    machine.init(output_address="", path="a:B", arguments={})
    machine.receive(frames_of(Ready(INFO)))
    for index in range(requests):
        machine.add([[1]], None, SamplingParams(), NO_OPTIONS, "abcdefgh"[index])
    return machine


class Engine:
    """Numbers messages as an engine does."""

    def __init__(self, machine: ClientMachine[Any]) -> None:
        self.machine = machine
        self.sequence = 0

    def step(self, *rows: tuple[int, list[int], OutputDetails | None]) -> StepReceived[Any]:
        event = self.send(Outputs(SESSION, self.sequence, 1, from_rows(rows)))
        assert isinstance(event, StepReceived)
        return event

    def send(self, message: Any) -> Any:
        self.sequence += 1
        return self.machine.receive(frames_of(message))


def seen(event: StepReceived[Any]) -> list[tuple[Any, list[int], str | None]]:
    assert len(event.owners) == len(event.outputs)
    return [
        (owner, list(tokens), None if more is None else more.finish_reason)
        for owner, (_, tokens, more) in zip(event.owners, event.outputs.rows(), strict=True)
    ]


# ---- handshake ----


def test_the_handshake_gives_an_event_for_each_message() -> None:
    machine = client_in(ClientState.CONNECTING)
    assert machine.receive(frames_of(Hello(PROTOCOL_VERSION, TOKEN, 4321, RANK))) == HelloReceived(4321)
    init = decode_from_client(arrived(machine.init(output_address="ipc:///o", path="a:B", arguments={"x": 1})))
    assert init[:4] == (PROTOCOL_VERSION, SESSION, "ipc:///o", "a:B")
    assert machine.receive(frames_of(Progress("weights", 0.25))) == ProgressReceived("weights", 0.25)
    assert machine.receive(frames_of(Progress("warm-up", None))) == ProgressReceived("warm-up", None)
    ready = machine.receive(frames_of(Ready(INFO)))
    assert isinstance(ready, ReadyReceived)
    assert ready.info.engine == INFO.engine


def test_a_hello_of_another_version_is_refused_with_both_numbers() -> None:
    machine = client_in(ClientState.CONNECTING)
    with pytest.raises(VersionError, match=rf"version {PROTOCOL_VERSION + 7} .*version {PROTOCOL_VERSION};"):
        machine.receive(frames_of(Hello(PROTOCOL_VERSION + 7, TOKEN, 1, RANK)))
    assert machine.state is ClientState.CONNECTING


@pytest.mark.parametrize("token", [b"", TOKEN[:-1], TOKEN + b"x", bytes(len(TOKEN))])
def test_a_hello_without_the_token_is_refused_whatever_its_version(token: bytes) -> None:
    """A stranger must not be able to end an engine by claiming another version for it."""
    machine = client_in(ClientState.CONNECTING)
    for version in (PROTOCOL_VERSION, PROTOCOL_VERSION + 1):
        with pytest.raises(ProtocolError, match="token") as caught:
            machine.receive(frames_of(Hello(version, token, 1, RANK)))
        assert not isinstance(caught.value, VersionError)
    assert machine.state is ClientState.CONNECTING


def test_a_hello_of_another_rank_is_refused() -> None:
    machine = client_in(ClientState.CONNECTING)
    with pytest.raises(ProtocolError, match=f"engine {RANK} says HELLO as engine {RANK + 1}"):
        machine.receive(frames_of(Hello(PROTOCOL_VERSION, TOKEN, 1, RANK + 1)))


def test_a_death_while_loading_is_announced_and_ready_may_still_follow() -> None:
    """READY and the dead frame travel on two sockets, so either can come first."""
    machine = client_in(ClientState.LOADING)
    event = machine.receive(frames_of(Dead(SESSION, 0, "Error", "boom", "Traceback")))
    assert isinstance(event, DeathAnnounced)
    assert event.message.exception_message == "boom"
    assert isinstance(machine.receive(frames_of(Ready(INFO))), ReadyReceived)


# ---- requests ----


def test_every_row_goes_to_its_owner() -> None:
    machine = serving(3)
    engine = Engine(machine)
    event = engine.step((2, [5, 6], None), (1, [], None), (3, [7], FINISHED))
    assert seen(event) == [("b", [5, 6], None), ("a", [], None), ("c", [7], "stop")]
    assert event.released == []
    assert set(machine.requests) == {1, 2}


def test_the_same_rows_step_after_step_keep_going_to_their_owners() -> None:
    machine = serving(2)
    engine = Engine(machine)
    for token in range(5):
        assert seen(engine.step((1, [token], None), (2, [token], None))) == [("a", [token], None), ("b", [token], None)]
    assert seen(engine.step((1, [9], FINISHED), (2, [9], None))) == [("a", [9], "stop"), ("b", [9], None)]
    assert seen(engine.step((1, [10], None), (2, [10], None))) == [("b", [10], None)]


def test_nothing_is_delivered_after_the_last_row() -> None:
    machine = serving(2)
    engine = Engine(machine)
    engine.step((1, [5], FINISHED))
    assert seen(engine.step((1, [6], None))) == []
    assert seen(engine.step((1, [6], FINISHED), (2, [7], None))) == [("b", [7], None)]


def test_nothing_is_delivered_after_an_abort_but_the_release() -> None:
    machine = serving(2)
    engine = Engine(machine)
    engine.step((1, [5], None), (2, [5], None))
    abort = machine.abort([1])
    assert abort is not None
    assert list(decode_from_client(arrived(abort)).handles) == [1]
    late = engine.step((1, [6], None), (2, [6], None))
    assert (seen(late), late.released) == ([("b", [6], None)], [])
    released = engine.step((1, [], ABORTED))
    assert (seen(released), released.released) == ([], [(1, "a")])
    again = engine.step((1, [], ABORTED))
    assert (seen(again), again.released) == ([], [])
    assert machine.aborting == {}


def test_an_abort_that_crosses_the_last_row_is_released_by_it() -> None:
    machine = serving(1)
    engine = Engine(machine)
    machine.abort([1])
    event = engine.step((1, [6], FINISHED))
    assert (seen(event), event.released) == ([], [(1, "a")])
    assert snapshot(machine) == (ClientState.SERVING, {}, {}, {})


def test_an_abort_names_each_live_request_once_and_says_nothing_of_others() -> None:
    machine = serving(3)
    Engine(machine).step((3, [1], FINISHED))
    frames = machine.abort(iter([2, 1, 2, 77, 3, 1]))
    assert frames is not None
    assert list(decode_from_client(arrived(frames)).handles) == [2, 1]
    assert machine.abort([1, 2, 3, 77]) is None
    assert machine.abort([]) is None


def test_rows_of_unknown_requests_are_dropped() -> None:
    machine = serving(1)
    event = Engine(machine).step((2**64 - 1, [1], FINISHED), (1, [2], None), (0, [3, 4], None))
    assert (seen(event), event.released) == ([("a", [2], None)], [])
    assert event.outputs.counts is None


def test_handles_come_from_the_counter_that_the_engines_share() -> None:
    handles = itertools.count(7)
    machines = [serving(), serving()]
    for machine in machines:
        machine._handles = handles
    drawn = [machine.add([[1]], None, SamplingParams(), NO_OPTIONS, "x")[0] for machine in (*machines, *machines)]
    assert drawn == [range(7, 8), range(8, 9), range(9, 10), range(10, 11)]
    assert machines[0].add([[1], [2, 3], [4]], None, SamplingParams(), NO_OPTIONS, "y")[0] == range(11, 14)
    assert [machines[0].requests[handle] for handle in (11, 12, 13)] == ["y"] * 3


@pytest.mark.parametrize("ending", ["finish", "abort", "died"])
def test_the_machine_keeps_no_owner_alive_whose_request_has_ended(ending: str) -> None:
    class Owner:
        pass

    machine = serving()
    engine = Engine(machine)
    owners = [Owner(), Owner()]
    for owner in owners:
        machine.add([[1]], None, SamplingParams(), NO_OPTIONS, owner)
    engine.step((1, [1], None), (2, [1], None))
    engine.step((1, [1], None), (2, [1], None))
    watched = weakref.ref(owners[0])
    if ending == "finish":
        engine.step((1, [1], FINISHED), (2, [1], None))
    elif ending == "abort":
        machine.abort([1])
        engine.step((1, [], ABORTED))
    else:
        machine.died()
    del owner, owners
    gc.collect()
    assert watched() is None


# ---- utility calls ----


def test_an_answer_goes_to_its_call_once() -> None:
    machine = serving()
    engine = Engine(machine)
    first, _ = machine.call("method", [1], "first")
    second, _ = machine.call("method", [2], "second")
    assert engine.send(UtilityResult(SESSION, 0, second, None, [1, 2])) == CallAnswered("second", None, [1, 2])
    failure = ("ValueError", "bad", "Traceback")
    assert engine.send(UtilityResult(SESSION, 1, first, failure, None)) == CallAnswered("first", failure, None)
    assert engine.send(UtilityResult(SESSION, 2, first, None, 3)) is None
    assert machine.calls == {}


def test_a_forgotten_call_and_a_call_that_never_was_answer_to_nobody() -> None:
    machine = serving()
    engine = Engine(machine)
    call, _ = machine.call("method", [], "owner")
    machine.forget_call(call)
    machine.forget_call(call)
    machine.forget_call(99)
    assert machine.calls == {}
    assert engine.send(UtilityResult(SESSION, 0, call, None, 1)) is None
    assert engine.send(UtilityResult(SESSION, 1, 99, None, 1)) is None


@pytest.mark.parametrize(
    "value",
    [
        cbor2.CBORTag(41440, ["numpy", "|u1", [4], b"abc"]),
        cbor2.CBORTag(41440, ["numpy", "|u1", [4], 3]),
        cbor2.CBORTag(41440, []),
        cbor2.undefined,
        {None: 1},
    ],
    ids=repr,
)
def test_a_malformed_answer_fails_its_own_call_alone(value: Any) -> None:
    machine = serving()
    first, _ = machine.call("method", [], "first")
    second, _ = machine.call("method", [], "second")
    event = machine.receive([b"\x31", cbor2.dumps([SESSION, 0, second, None, value])])
    assert isinstance(event, CallAnswered)
    assert event.owner == "second"
    assert event.error is not None
    assert event.error[0] == "ProtocolError"
    assert machine.calls == {first: "first"}
    assert machine.receive(frames_of(UtilityResult(SESSION, 1, first, None, 1))) == CallAnswered("first", None, 1)


def test_a_malformed_answer_of_another_life_fails_nobody() -> None:
    machine = serving()
    call, _ = machine.call("method", [], "owner")
    assert machine.receive([b"\x31", cbor2.dumps([SESSION - 1, 0, call, None, cbor2.undefined])]) is None
    assert machine.calls == {call: "owner"}


# ---- signs of life, figures, death ----


def test_pong_stats_and_death_come_as_events() -> None:
    engine = Engine(serving())
    assert engine.send(Pong(SESSION, 0, 17)) == PongReceived(17)
    assert engine.send(Stats(SESSION, 1, {"running": 1, "cache": 0.5})) == StatsReceived({"running": 1, "cache": 0.5})
    assert isinstance(engine.send(Dead(SESSION, 2, "Error", "boom", "Traceback")), DeathAnnounced)


def test_death_gives_every_owner_back_once() -> None:
    machine = serving(3)
    machine.abort([2])
    machine.call("method", [], "call")
    assert machine.died() == (["a", "c"], ["b"], ["call"])
    assert machine.died() == ([], [], [])
    assert snapshot(machine) == (ClientState.DEAD, {}, {}, {})
    with pytest.raises(ProtocolError):
        machine.receive(frames_of(Outputs(SESSION, 0, 1, StepOutputs([1], [1]))))


# ---- what is lost, late, or from another life ----


@given(st.permutations(range(6)))
def test_messages_that_come_out_of_order_are_noticed_at_the_first(order: list[int]) -> None:
    machine = serving(1)
    messages = [frames_of(Outputs(SESSION, number, 1, StepOutputs([1], [number]))) for number in range(6)]
    for due, number in enumerate(order):
        if due == number:
            assert isinstance(machine.receive(messages[number]), StepReceived)
            continue
        before = snapshot(machine)
        with pytest.raises(MessageLostError, match=f"number {due} was due"):
            machine.receive(messages[number])
        assert snapshot(machine) == before
        break


def test_nothing_behind_a_hole_is_delivered_as_if_it_were_whole() -> None:
    machine = serving(1)
    machine.receive(frames_of(Outputs(SESSION, 0, 1, StepOutputs([1], [10]))))
    for number in range(2, 6):
        with pytest.raises(MessageLostError):
            machine.receive(frames_of(Outputs(SESSION, number, 1, StepOutputs([1], [10 + number]))))
    assert machine.requests == {1: "a"}
    assert machine.died() == (["a"], [], [])


def test_a_repeated_message_is_noticed() -> None:
    machine = serving(1)
    message = frames_of(Outputs(SESSION, 0, 1, StepOutputs([1], [10])))
    machine.receive(message)
    with pytest.raises(MessageLostError):
        machine.receive(message)


def test_a_reply_that_does_not_decode_leaves_a_hole() -> None:
    """Its tokens are gone, so what follows must not be delivered."""
    machine = serving(1)
    with pytest.raises(ProtocolError) as caught:
        machine.receive([b"\x30", cbor2.dumps([SESSION, 0, 1, b"cut", None, b"", {}])])
    assert not isinstance(caught.value, MessageLostError)
    with pytest.raises(MessageLostError):
        machine.receive(frames_of(Outputs(SESSION, 1, 1, StepOutputs([1], [10]))))


@pytest.mark.parametrize("state", ClientState)
@pytest.mark.parametrize("kind", ["OUTPUTS", "UTILITY_RESULT", "STATS", "PONG", "ENGINE_CORE_DEAD"])
def test_a_message_of_another_life_says_nothing_in_any_state(state: ClientState, kind: str) -> None:
    machine = client_in(state)
    before = vars(machine).copy(), snapshot(machine)
    for session in (0, SESSION - 1, SESSION + 1):
        for sequence in (0, 1, 2**64 - 1):
            stale = messages_to_client()[kind]._replace(session=session, sequence=sequence)
            assert machine.receive(frames_of(stale)) is None
    assert (vars(machine), snapshot(machine)) == before


# ---- what cannot be sent ----


@pytest.mark.parametrize("state", [ClientState.GREETED, ClientState.SERVING])
def test_what_cannot_travel_leaves_the_machine_as_it_was(state: ClientState) -> None:
    machine = client_in(state)
    before = {name: value for name, value in vars(machine).items() if name != "_handles"}
    tables = snapshot(machine)
    calls = (
        [lambda: machine.init(output_address="", path="a:B", arguments={"x": object()})]
        if state is ClientState.GREETED
        else [
            lambda: machine.add([[1]], None, SamplingParams(extra={"x": {1}}), NO_OPTIONS, "owner"),
            lambda: machine.add(None, object(), SamplingParams(), NO_OPTIONS, "owner"),
            lambda: machine.call("method", [lambda: None], "owner"),
            lambda: machine.call("\ud800", [], "owner"),
        ]
    )
    for call in calls:
        with pytest.raises(UnencodableError):
            call()
    for tokens in ([-1], [2**32], ["text"], 5):
        if state is ClientState.SERVING:
            with pytest.raises((OverflowError, TypeError)):
                machine.add([tokens], None, SamplingParams(), NO_OPTIONS, "owner")  # type: ignore[arg-type]
    assert {name: value for name, value in vars(machine).items() if name != "_handles"} == before
    assert snapshot(machine) == tables


def test_a_ping_says_how_many_messages_were_sent_before_it() -> None:
    machine = serving()

    def sent() -> int:
        return decode_from_client(arrived(machine.ping())).sent

    assert sent() == 0
    (handle,), _ = machine.add([[1]], None, SamplingParams(), NO_OPTIONS, "a")
    assert sent() == sent() == 1
    machine.call("method", [], "b")
    assert sent() == 2
    machine.abort([handle])
    assert sent() == 3
    machine.abort([handle])
    with pytest.raises(UnencodableError):
        machine.call("method", [object()], "c")
    assert sent() == 3


# ---- steps whose rows are those of the step before ----


def plain(engine: Engine, *tokens: int) -> Any:
    return engine.send(Tokens(SESSION, engine.sequence, 2, tokens))


def test_tokens_alone_go_to_the_rows_of_the_step_before() -> None:
    machine = serving(2)
    engine = Engine(machine)
    engine.step((2, [5, 6], None), (1, [7], None))
    for token in range(3):
        event = plain(engine, token, 10 + token)
        assert list(event.outputs.handles) == [2, 1]
        assert (event.step, seen(event)) == (2, [("b", [token], None), ("a", [10 + token], None)])


def test_tokens_after_an_abort_go_to_those_who_still_want_them() -> None:
    machine = serving(3)
    engine = Engine(machine)
    engine.step((1, [5], None), (2, [6], None), (3, [7], None))
    assert seen(plain(engine, 1, 2, 3)) == [("a", [1], None), ("b", [2], None), ("c", [3], None)]
    machine.abort([2])
    for _ in range(2):
        event = plain(engine, 1, 2, 3)
        assert list(event.outputs.handles) == [1, 3]
        assert seen(event) == [("a", [1], None), ("c", [3], None)]
    # A step in between, part of whose rows nobody wants, is the one that counts.
    engine.step((2, [6], None), (3, [7], None))
    assert seen(plain(engine, 8, 9)) == [("c", [9], None)]


def test_rows_that_somebody_left_may_come_again_and_again() -> None:
    machine = serving(3)
    engine = Engine(machine)
    rows = (1, [5], None), (2, [6], None), (3, [7], None)
    machine.abort([1])
    assert [seen(engine.step(*rows)) for _ in range(2)] == [[("b", [6], None), ("c", [7], None)]] * 2
    machine.abort([3])
    assert [seen(engine.step(*rows)) for _ in range(2)] == [[("b", [6], None)]] * 2
    last = engine.step((1, [5], ABORTED), (2, [6], FINISHED), (3, [7], None))
    assert (seen(last), last.released) == ([("b", [6], "stop")], [(1, "a")])
    assert [seen(engine.step(*rows)) for _ in range(2)] == [[], []]
    assert [seen(plain(engine, 1, 2, 3)) for _ in range(2)] == [[], []]
    last = engine.step((1, [5], ABORTED), (2, [6], FINISHED), (3, [7], ABORTED))
    assert (seen(last), last.released, machine.aborting) == ([], [(3, "c")], {})


@pytest.mark.parametrize("count", [0, 1, 3])
def test_tokens_for_another_number_of_rows_are_refused_and_change_nothing(count: int) -> None:
    machine = serving(2)
    engine = Engine(machine)
    engine.step((1, [5], None), (2, [6], None))
    with pytest.raises(ProtocolError, match=f"TOKENS of {count} rows follows a step of 2 rows"):
        plain(engine, *range(count))
    engine.sequence -= 1
    assert seen(plain(engine, 1, 2)) == [("a", [1], None), ("b", [2], None)]


def test_tokens_of_another_life_are_dropped() -> None:
    machine = serving(1)
    engine = Engine(machine)
    engine.step((1, [5], None))
    assert machine.receive(frames_of(Tokens(SESSION + 1, 1, 2, [9, 9]))) is None
    assert seen(plain(engine, 1)) == [("a", [1], None)]


def test_tokens_behind_a_loss_are_a_loss_however_many_they_are() -> None:
    machine = serving(1)
    Engine(machine).step((1, [5], None))
    for count in (0, 1, 2):
        with pytest.raises(MessageLostError, match=r"message 7 .* number 1 was due"):
            machine.receive(frames_of(Tokens(SESSION, 7, 2, range(count))))
