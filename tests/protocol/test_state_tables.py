"""Every (state, input) pair of both machines: the table says what happens, and whatever it lacks changes nothing.

The inputs are real calls and real messages, so that the tables are compared with what the machines do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.protocol.machines import (
    INFO,
    client_in,
    engine_in,
    frames_of,
    messages_to_client,
    messages_to_engine,
    snapshot,
)

from anyengine.errors import ProtocolError
from anyengine.params import SamplingParams
from anyengine.protocol import client_machine, engine_machine
from anyengine.protocol.client_machine import ClientInput, ClientMachine, ClientState
from anyengine.protocol.engine_machine import EngineInput, EngineMachine, EngineState
from anyengine.protocol.outputs import StepOutputs
from anyengine.protocol.sampling import NO_OPTIONS

Act = Callable[[Any], Any]


def _message(name: str) -> Act:
    table = {**messages_to_client(), **messages_to_engine()}
    return lambda machine: machine.receive(frames_of(table[name]))


CLIENT_ACTS: dict[ClientInput, dict[str, Act]] = {
    ClientInput.HELLO: {"HELLO": _message("HELLO")},
    ClientInput.PROGRESS: {"PROGRESS": _message("PROGRESS")},
    ClientInput.READY: {"READY": _message("READY")},
    ClientInput.REPLY: {
        "OUTPUTS": _message("OUTPUTS"),
        "UTILITY_RESULT": _message("UTILITY_RESULT"),
        "STATS": _message("STATS"),
        "PONG": _message("PONG"),
        "a malformed UTILITY_RESULT": lambda machine: machine.receive(_malformed_result()),
    },
    ClientInput.LAST_MESSAGE: {name: _message(name) for name in ("ENGINE_CORE_DEAD", "GOODBYE")},
    ClientInput.INIT: {"init": lambda machine: machine.init(output_address="ipc:///y", path="a:B", arguments={"x": 1})},
    ClientInput.REQUEST: {
        "add": lambda machine: machine.add([[1]], None, SamplingParams(), NO_OPTIONS, "another"),
        "call": lambda machine: machine.call("method", [1], "another"),
        "ping": lambda machine: machine.ping(),
    },
    ClientInput.ABORT: {
        "abort of a live request": lambda machine: machine.abort([1]),
        "abort of a request that is being aborted": lambda machine: machine.abort([2]),
        "abort of an unknown request": lambda machine: machine.abort([77]),
        "abort of nothing": lambda machine: machine.abort([]),
    },
    ClientInput.SHUTDOWN: {
        "shutdown at once": lambda machine: machine.shutdown("abort"),
        "shutdown when drained": lambda machine: machine.shutdown("drain"),
    },
    ClientInput.DIED: {"died": lambda machine: machine.died()},
}

ENGINE_ACTS: dict[EngineInput, dict[str, Act]] = {
    EngineInput.HELLO: {"hello": lambda machine: machine.hello(1)},
    EngineInput.PROGRESS: {"progress": lambda machine: machine.progress("loading", 0.5)},
    EngineInput.READY: {"ready": lambda machine: machine.ready(INFO)},
    EngineInput.REPLY: {
        "outputs": lambda machine: machine.outputs(1, StepOutputs([1], [5])),
        "release": lambda machine: machine.release(1, [1]),
        "fail": lambda machine: machine.fail(1, [1], "no"),
        "answer": lambda machine: machine.answer(0, "value"),
        "answer with an error": lambda machine: machine.answer(0, None, ("Error", "boom", None)),
        "stats": lambda machine: machine.stats({"running": 1}),
        "pong": lambda machine: machine.pong(1),
    },
    EngineInput.DEAD: {
        "dead": lambda machine: machine.dead("Error", "boom", "Traceback"),
        "goodbye": lambda machine: machine.goodbye(),
    },
    EngineInput.INIT: {"INIT": _message("INIT")},
    EngineInput.REQUEST: {
        "ADD": _message("ADD"),
        "UTILITY": _message("UTILITY"),
        "PING": _message("PING"),
        "a malformed ADD": lambda machine: machine.receive([b"\x00", b"\x81\x09"]),
        "a malformed UTILITY": lambda machine: machine.receive([b"\x03", b"\x81\x09"]),
    },
    EngineInput.ABORT: {"ABORT": _message("ABORT")},
    EngineInput.SHUTDOWN: {"SHUTDOWN": _message("SHUTDOWN")},
}


def _malformed_result() -> list[bytes | memoryview]:
    kind, body = frames_of(messages_to_client()["UTILITY_RESULT"])
    return [kind, b"\x86" + bytes(body)[1:] + b"\xf6"]


CLIENT_CASES = [(state, what, name) for state in ClientState for what, acts in CLIENT_ACTS.items() for name in acts]
ENGINE_CASES = [(state, what, name) for state in EngineState for what, acts in ENGINE_ACTS.items() for name in acts]


def test_the_cases_below_cover_every_state_and_input() -> None:
    assert set(CLIENT_ACTS) == set(ClientInput)
    assert set(ENGINE_ACTS) == set(EngineInput)
    assert {client_in(state).state for state in ClientState} == set(ClientState)
    assert {engine_in(state).state for state in EngineState} == set(EngineState)
    for state, what in client_machine.TRANSITIONS:
        assert (state, what) in {(case[0], case[1]) for case in CLIENT_CASES}
    for state, what in engine_machine.TRANSITIONS:
        assert (state, what) in {(case[0], case[1]) for case in ENGINE_CASES}


@pytest.mark.parametrize(("state", "what", "name"), CLIENT_CASES, ids=lambda value: getattr(value, "name", value))
def test_a_client_does_what_its_table_says(state: ClientState, what: ClientInput, name: str) -> None:
    machine = client_in(state)
    _drive(machine, CLIENT_ACTS[what][name], client_machine.TRANSITIONS.get((state, what)))


@pytest.mark.parametrize(("state", "what", "name"), ENGINE_CASES, ids=lambda value: getattr(value, "name", value))
def test_an_engine_does_what_its_table_says(state: EngineState, what: EngineInput, name: str) -> None:
    machine = engine_in(state)
    _drive(machine, ENGINE_ACTS[what][name], engine_machine.TRANSITIONS.get((state, what)))


def _drive(machine: ClientMachine[str] | EngineMachine, act: Act, expected: Any) -> None:
    before = snapshot(machine)
    if expected is None:
        with pytest.raises(ProtocolError):
            act(machine)
        assert snapshot(machine) == before
    else:
        act(machine)
        assert machine.state is expected


@pytest.mark.parametrize("state", ClientState)
def test_a_refused_input_leaves_a_client_able_to_go_on(state: ClientState) -> None:
    """Not only the tables: the numbers that count messages are as they were, too."""
    refused, undisturbed = client_in(state), client_in(state)
    for what, acts in CLIENT_ACTS.items():
        if (state, what) in client_machine.TRANSITIONS:
            continue
        for act in acts.values():
            with pytest.raises(ProtocolError):
                act(refused)
    assert vars_of(refused) == vars_of(undisturbed)


@pytest.mark.parametrize("state", EngineState)
def test_a_refused_input_leaves_an_engine_able_to_go_on(state: EngineState) -> None:
    refused, undisturbed = engine_in(state), engine_in(state)
    for what, acts in ENGINE_ACTS.items():
        if (state, what) in engine_machine.TRANSITIONS:
            continue
        for act in acts.values():
            with pytest.raises(ProtocolError):
                act(refused)
    assert vars_of(refused) == vars_of(undisturbed)


def vars_of(machine: Any) -> dict[str, Any]:
    """Everything in the machine but the counter of handles, whose numbers mean nothing."""
    return {name: value for name, value in vars(machine).items() if name != "_handles"}
