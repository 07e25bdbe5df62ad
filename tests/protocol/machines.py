"""Both machines in every state, reached by real calls and real messages only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from anyengine.params import SamplingParams
from anyengine.protocol.client_machine import ClientMachine, ClientState
from anyengine.protocol.engine_machine import EngineMachine, EngineState
from anyengine.protocol.handshake import Hello, Progress, Ready
from anyengine.protocol.messages import PROTOCOL_VERSION
from anyengine.protocol.outputs import StepOutputs
from anyengine.protocol.replies import Dead, Goodbye, Outputs, Pong, Stats, UtilityResult
from anyengine.protocol.requests import Abort, Add, Init, Ping, Shutdown, Utility
from anyengine.protocol.sampling import NO_OPTIONS
from anyengine.types import EngineInfo

TOKEN = b"sixteen bytes...."
SESSION = 2**64 - 3
RANK = 3
INFO = EngineInfo(engine="scripted", version="1", max_model_len=100)


def client_in(state: ClientState) -> ClientMachine[str]:
    """A client's machine in ``state``; where it can, it holds request 1, request 2 being aborted, and call 0."""
    machine: ClientMachine[str] = ClientMachine(rank=RANK, token=TOKEN, session=SESSION, handles=itertools.count(1))
    if state is ClientState.CONNECTING:
        return machine
    machine.receive(frames_of(Hello(PROTOCOL_VERSION, TOKEN, 1234, RANK)))
    if state is ClientState.GREETED:
        return machine
    machine.init(output_address="ipc:///x", path="a:B", arguments={})
    if state is ClientState.LOADING:
        return machine
    machine.receive(frames_of(Ready(INFO)))
    machine.add([[1, 2, 3]], None, SamplingParams(), NO_OPTIONS, "request 1")
    machine.add([[1, 2, 3]], None, SamplingParams(), NO_OPTIONS, "request 2")
    machine.call("method", [], "call 0")
    machine.abort([2])
    if state is ClientState.SERVING:
        return machine
    if state is ClientState.CLOSING:
        machine.shutdown("drain")
        return machine
    machine.died()
    return machine


def engine_in(state: EngineState) -> EngineMachine:
    """An engine's machine in ``state``; where it can, it holds request 1, and has received three messages."""
    machine = EngineMachine(rank=RANK, token=TOKEN)
    if state is EngineState.STARTING:
        return machine
    machine.hello(1234)
    if state is EngineState.GREETING:
        return machine
    machine.receive(frames_of(Init(PROTOCOL_VERSION, SESSION, "ipc:///x", "a:B", {})))
    if state is EngineState.LOADING:
        return machine
    machine.ready(INFO)
    machine.receive(frames_of(Add(1, [[1, 2, 3]], None, SamplingParams(), NO_OPTIONS)))
    machine.receive(frames_of(Add(2, [[1, 2, 3]], None, SamplingParams(), NO_OPTIONS)))
    machine.receive(frames_of(Utility(0, "method", [])))
    machine.outputs(1, StepOutputs([1], [7]))
    machine.release(1, [2])
    if state is EngineState.SERVING:
        return machine
    if state is EngineState.DRAINING:
        machine.receive(frames_of(Shutdown("drain")))
        return machine
    machine.dead("RuntimeError", "boom", "Traceback ...")
    return machine


def frames_of(message: Any) -> list[bytes | memoryview]:
    """``message`` as it arrives."""
    frames: Sequence[Any] = message.encode()
    return [bytes(frame) for frame in frames[:2]] + [memoryview(bytearray(frame)) for frame in frames[2:]]


def snapshot(machine: ClientMachine[Any] | EngineMachine) -> Any:
    """State and tables, to be compared with a later look."""
    if isinstance(machine, ClientMachine):
        return machine.state, dict(machine.requests), dict(machine.aborting), dict(machine.calls)
    return machine.state, set(machine.live)


def messages_to_client(sequence: int = 0) -> dict[str, Any]:
    """One good message of each kind for :func:`client_in`."""
    return {
        "HELLO": Hello(PROTOCOL_VERSION, TOKEN, 1234, RANK),
        "PROGRESS": Progress("loading", 0.5),
        "READY": Ready(INFO),
        "OUTPUTS": Outputs(SESSION, sequence, 5, StepOutputs([1], [9])),
        "UTILITY_RESULT": UtilityResult(SESSION, sequence, 0, None, {"answer": [1, 2.5, None]}),
        "STATS": Stats(SESSION, sequence, {"running": 1, "cache": 0.5}),
        "PONG": Pong(SESSION, sequence, 5),
        "GOODBYE": Goodbye(SESSION, sequence),
        "ENGINE_CORE_DEAD": Dead(SESSION, sequence, "RuntimeError", "boom", "Traceback ..."),
    }


def messages_to_engine() -> dict[str, Any]:
    """One good message of each kind for :func:`engine_in`."""
    return {
        "ADD": Add(5, [[1, 2, 3]], None, SamplingParams(max_tokens=5, stop_token_ids=[1], extra={"a": 1}), NO_OPTIONS),
        "ABORT": Abort([1, 2, 77]),
        "UTILITY": Utility(1, "method", [1, {"a": [None, 2.5]}]),
        "INIT": Init(PROTOCOL_VERSION, SESSION, "ipc:///x", "a:B", {"argument": 1}),
        "SHUTDOWN": Shutdown("abort"),
        "PING": Ping(3),
    }
