"""The engine's side of the protocol: a state machine without sockets or clocks, the counterpart of ClientMachine."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from anyengine.errors import ProtocolError
from anyengine.protocol.error_kinds import ErrorKind
from anyengine.protocol.handshake import Hello, Progress, Ready
from anyengine.protocol.messages import PROTOCOL_VERSION, MessageLostError, decode_from_client, salvage, salvage_handles
from anyengine.protocol.outputs import OutputDetails, StepOutputs, from_rows
from anyengine.protocol.replies import Dead, Goodbye, Outputs, Pong, Stats, Tokens, UtilityResult
from anyengine.protocol.requests import Abort, Add, Frames, Init, Ping, Shutdown, ShutdownMode, Utility
from anyengine.types import EngineInfo


class EngineState(enum.Enum):
    """How far the engine has come, as it knows itself."""

    __hash__: ClassVar[Callable[[Any], int]] = object.__hash__  # pyright: ignore[reportIncompatibleMethodOverride] - by identity and in C: the table is looked up for every message

    STARTING = "starting"
    GREETING = "greeting"  # HELLO sent
    LOADING = "loading"  # INIT came
    SERVING = "serving"  # READY sent
    DRAINING = "draining"  # SHUTDOWN came
    DEAD = "dead"


class EngineInput(enum.Enum):
    """What can happen to the machine: its user acts, or a message arrives."""

    __hash__: ClassVar[Callable[[Any], int]] = object.__hash__  # pyright: ignore[reportIncompatibleMethodOverride] - by identity and in C: the table is looked up for every message

    HELLO = "hello()"
    PROGRESS = "progress()"
    READY = "ready()"
    REPLY = "a reply"  # outputs(), answer(), stats(), pong()
    DEAD = "dead() or goodbye()"
    INIT = "INIT"
    REQUEST = "a request"  # ADD, UTILITY, PING
    ABORT = "ABORT"
    SHUTDOWN = "SHUTDOWN"


_S, _I = EngineState, EngineInput

TRANSITIONS: Mapping[tuple[EngineState, EngineInput], EngineState] = {
    (_S.STARTING, _I.HELLO): _S.GREETING,
    (_S.GREETING, _I.INIT): _S.LOADING,
    (_S.LOADING, _I.PROGRESS): _S.LOADING,
    (_S.LOADING, _I.READY): _S.SERVING,
    (_S.LOADING, _I.DEAD): _S.DEAD,
    (_S.SERVING, _I.REPLY): _S.SERVING,
    (_S.SERVING, _I.REQUEST): _S.SERVING,
    (_S.SERVING, _I.ABORT): _S.SERVING,
    (_S.SERVING, _I.SHUTDOWN): _S.DRAINING,
    (_S.SERVING, _I.DEAD): _S.DEAD,
    (_S.DRAINING, _I.REPLY): _S.DRAINING,
    (_S.DRAINING, _I.ABORT): _S.DRAINING,
    (_S.DRAINING, _I.DEAD): _S.DEAD,
}
"""Every transition there is; whatever is missing is a :class:`ProtocolError` and changes nothing."""


class InitReceived(NamedTuple):
    """Which engine to build; None is the one that the process was started for."""

    output_address: str
    path: str | None
    arguments: Mapping[str, Any]


class RequestReceived(NamedTuple):
    """New requests."""

    message: Add


class RequestMalformed(NamedTuple):
    """New requests that do not decode: only these fail."""

    handles: Sequence[int]
    problem: str


class AbortReceived(NamedTuple):
    """Live requests to drop; nothing of them is to be sent any more but the last rows of ``release()``."""

    handles: Sequence[int]


class CallReceived(NamedTuple):
    """A utility call."""

    call_id: int
    method: str
    args: Sequence[Any]


class CallMalformed(NamedTuple):
    """A utility call that does not decode: only this one fails."""

    call_id: int
    problem: str


class PingReceived(NamedTuple):
    """The client asks for a sign of life."""


class ShutdownReceived(NamedTuple):
    """The engine is to end."""

    mode: ShutdownMode


Event = (
    InitReceived
    | RequestReceived
    | RequestMalformed
    | AbortReceived
    | CallReceived
    | CallMalformed
    | PingReceived
    | ShutdownReceived
)


class EngineMachine:
    """The protocol of one engine. Calls turn into frames to send; frames that arrived turn into events.

    ``live`` holds the handles of requests that came and have not had their last row. Each gets exactly one.
    """

    def __init__(self, *, rank: int, token: bytes) -> None:
        self.rank = rank
        self.state: EngineState = EngineState.STARTING
        self.live: set[int] = set()
        self._token = token
        self._session = 0
        self._sequence = 0
        self._column: bytes | None = None  # the handles of the last step, if all of its requests went on
        self._received = 0

    # ---- calls ----

    def hello(self, pid: int) -> Frames:
        """The first message."""
        self.state = self._next(EngineInput.HELLO)
        return Hello(PROTOCOL_VERSION, self._token, pid, self.rank).encode()

    def progress(self, stage: str, fraction: float | None) -> Frames:
        """A sign of life while loading."""
        self._next(EngineInput.PROGRESS)
        return Progress(stage, None if fraction is None else float(fraction)).encode()

    def ready(self, info: EngineInfo) -> Frames:
        """Loading is done."""
        frames = Ready(info).encode()
        self.state = self._next(EngineInput.READY)
        return frames

    def outputs(self, step: int, outputs: StepOutputs) -> Frames:
        """One step.

        :raises UnencodableError: if a detail of a row cannot travel
        """
        self._next(EngineInput.REPLY)
        column = outputs.handle_bytes()
        if column == self._column and outputs.counts is None and not outputs.details:
            frames = Tokens(self._session, self._sequence, step, outputs.token_ids).encode()
        else:
            frames = Outputs(self._session, self._sequence, step, outputs).encode()
        self._sequence += 1
        self._column = column
        for row, more in outputs.details.items():
            if more.finish_reason is not None:
                self.live.discard(outputs.handles[row])
                self._column = None
        return frames

    def release(self, step: int, handles: Sequence[int]) -> Frames:
        """The last rows of requests that the client aborted."""
        aborted = OutputDetails(finish_reason="abort")
        return self.outputs(step, from_rows((handle, (), aborted) for handle in handles))

    def fail(self, step: int, handles: Sequence[int], problem: str, kind: ErrorKind = "failed") -> Frames:
        """The last rows of requests that ended for an error of their own."""
        failed = OutputDetails(finish_reason="error", error=problem, error_kind=kind)
        return self.outputs(step, from_rows((handle, (), failed) for handle in handles))

    def answer(self, call_id: int, value: Any, error: tuple[str, str, str | None] | None = None) -> Frames:
        """The end of a utility call; ``error`` is (type, message, traceback).

        :raises UnencodableError: if ``value`` cannot travel; the call is then still to be answered
        """
        self._next(EngineInput.REPLY)
        frames = UtilityResult(self._session, self._sequence, call_id, error, value).encode()
        self._sequence += 1
        return frames

    def stats(self, figures: Mapping[str, float]) -> Frames:
        """The engine's own figures.

        :raises UnencodableError: if a figure cannot travel
        """
        self._next(EngineInput.REPLY)
        frames = Stats(self._session, self._sequence, figures).encode()
        self._sequence += 1
        return frames

    def pong(self, steps: int) -> Frames:
        """The answer to PING."""
        self._next(EngineInput.REPLY)
        frames = Pong(self._session, self._sequence, steps).encode()
        self._sequence += 1
        return frames

    def goodbye(self) -> Frames:
        """The last message of an engine that ends without having been told to."""
        self.state = self._next(EngineInput.DEAD)
        return Goodbye(self._session, self._sequence).encode()

    def dead(self, exception_type: str, message: str, traceback: str) -> Frames:
        """The last message of an engine in which Python code raised."""
        self.state = self._next(EngineInput.DEAD)
        return Dead(self._session, self._sequence, exception_type, message, traceback).encode()

    # ---- frames that arrived ----

    def receive(self, frames: Sequence[bytes | memoryview]) -> Event | None:
        """The event in one message, or None if there is nothing to do (an abort of requests that have ended).

        :raises ProtocolError: if it is not a message, or one that may not come now
        :raises MessageLostError: if PING shows that messages before it are lost
        """
        try:
            message = decode_from_client(frames)
        except ProtocolError as error:
            # Raised from here: an error that a frame of its own traceback holds would keep the message until it is
            # collected, and large buffers with it.
            event = self._salvage(frames, str(error))
            if event is None:
                raise
            return event
        if isinstance(message, Add):
            self._count(EngineInput.REQUEST)
            if not self.live.isdisjoint(message.handles):
                raise ProtocolError(f"request {message.handle}, or one that follows it, came twice")
            self.live.update(message.handles)
            return RequestReceived(message)
        if isinstance(message, Abort):
            self._count(EngineInput.ABORT)
            handles = [handle for handle in dict.fromkeys(message.handles) if handle in self.live]
            return AbortReceived(handles) if handles else None
        if isinstance(message, Utility):
            self._count(EngineInput.REQUEST)
            return CallReceived(*message)
        if isinstance(message, Ping):
            self._next(EngineInput.REQUEST)
            if message.sent != self._received:
                raise MessageLostError(f"the client sent {message.sent} messages, but {self._received} arrived")
            return PingReceived()
        if isinstance(message, Shutdown):
            self.state = self._count(EngineInput.SHUTDOWN)
            return ShutdownReceived(message.mode)
        return self._init(message)

    def _next(self, what: EngineInput) -> EngineState:
        state = TRANSITIONS.get((self.state, what))
        if state is None:
            raise ProtocolError(f"engine {self.rank}: {what.value} cannot come in state {self.state.value}")
        return state

    def _count(self, what: EngineInput) -> EngineState:
        state = self._next(what)
        self._received += 1
        return state

    def _init(self, message: Init) -> InitReceived:
        state = self._next(EngineInput.INIT)
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the client speaks version {message.version} of the protocol and this engine version "
                f"{PROTOCOL_VERSION}; install the same anyengine on both sides"
            )
        self.state = state
        self._session = message.session
        return InitReceived(message.output_address, message.path, message.arguments)

    def _salvage(self, frames: Sequence[bytes | memoryview], problem: str) -> Event | None:
        """Fail the one request or call that is malformed, where it can be told; None if it cannot."""
        kind = bytes(frames[0]) if len(frames) >= 2 else b""
        if kind == Add.KIND:
            handles = salvage_handles(bytes(frames[1]))
            if handles is not None and self.live.isdisjoint(handles):
                self._count(EngineInput.REQUEST)
                self.live.update(handles)
                return RequestMalformed(handles, problem)
        elif kind == Utility.KIND and (call_id := salvage(bytes(frames[1]), 0)) is not None:
            self._count(EngineInput.REQUEST)
            return CallMalformed(call_id, problem)
        return None
