"""The states and the events of the client's side of the protocol, and the table of its transitions."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from anyengine.errors import ProtocolError
from anyengine.protocol.outputs import StepOutputs
from anyengine.protocol.replies import Dead
from anyengine.types import EngineInfo

Owner = TypeVar("Owner")


class ClientState(enum.Enum):
    """How far one engine has come, as its client knows it."""

    __hash__: ClassVar[Callable[[Any], int]] = object.__hash__  # pyright: ignore[reportIncompatibleMethodOverride] - by identity and in C: the table is looked up for every message

    CONNECTING = "connecting"  # nothing heard yet
    GREETED = "greeted"  # HELLO came
    LOADING = "loading"  # INIT sent
    SERVING = "serving"  # READY came
    CLOSING = "closing"  # SHUTDOWN sent
    DEAD = "dead"


class ClientInput(enum.Enum):
    """What can happen to the machine: a message arrives, or its user acts."""

    __hash__: ClassVar[Callable[[Any], int]] = object.__hash__  # pyright: ignore[reportIncompatibleMethodOverride] - by identity and in C: the table is looked up for every message

    HELLO = "HELLO"
    PROGRESS = "PROGRESS"
    READY = "READY"
    REPLY = "a reply"  # OUTPUTS, TOKENS, UTILITY_RESULT, STATS, PONG
    LAST_MESSAGE = "ENGINE_CORE_DEAD or GOODBYE"
    INIT = "init()"
    REQUEST = "a request"  # add(), call(), ping()
    ABORT = "abort()"
    SHUTDOWN = "shutdown()"
    DIED = "died()"


_S, _I = ClientState, ClientInput

TRANSITIONS: Mapping[tuple[ClientState, ClientInput], ClientState] = {
    (_S.CONNECTING, _I.HELLO): _S.GREETED,
    (_S.GREETED, _I.INIT): _S.LOADING,
    (_S.LOADING, _I.PROGRESS): _S.LOADING,
    (_S.LOADING, _I.REPLY): _S.LOADING,  # it comes on another socket than READY, and may overtake it
    (_S.LOADING, _I.LAST_MESSAGE): _S.LOADING,
    (_S.LOADING, _I.READY): _S.SERVING,
    (_S.SERVING, _I.REPLY): _S.SERVING,
    (_S.SERVING, _I.LAST_MESSAGE): _S.SERVING,
    (_S.SERVING, _I.REQUEST): _S.SERVING,
    (_S.SERVING, _I.ABORT): _S.SERVING,
    (_S.SERVING, _I.SHUTDOWN): _S.CLOSING,
    (_S.CLOSING, _I.REPLY): _S.CLOSING,
    (_S.CLOSING, _I.LAST_MESSAGE): _S.CLOSING,
    (_S.CLOSING, _I.ABORT): _S.CLOSING,
    **{(state, _I.DIED): _S.DEAD for state in _S},
}
"""Every transition there is; whatever is missing is a :class:`ProtocolError` and changes nothing."""


class HelloReceived(NamedTuple):
    """The engine's process speaks; answer with :meth:`ClientMachine.init`."""

    pid: int


class ProgressReceived(NamedTuple):
    """Loading goes on."""

    stage: str
    fraction: float | None


class ReadyReceived(NamedTuple):
    """The engine serves."""

    info: EngineInfo


class StepReceived(NamedTuple, Generic[Owner]):
    """One step's outputs for live requests; ``owners`` has one entry per row and must not be changed.

    ``released`` are the aborted requests that the engine has let go of in this step: handles, and owners.
    """

    step: int
    outputs: StepOutputs
    owners: Sequence[Owner]
    released: Sequence[tuple[int, Owner]]


class CallAnswered(NamedTuple, Generic[Owner]):
    """A utility call came to its end: ``error`` is (type, message, traceback), or None and ``value`` counts."""

    owner: Owner
    error: tuple[str, str, str | None] | None
    value: Any


class StatsReceived(NamedTuple):
    """The engine's figures."""

    figures: Mapping[str, float]


class PongReceived(NamedTuple):
    """A sign of life."""

    steps: int


class DeathAnnounced(NamedTuple):
    """The engine says that it dies, and of what; its process may take a moment."""

    message: Dead


class GoodbyeReceived(NamedTuple):
    """The engine ends in good order, though nobody here told it to."""


Event = (
    HelloReceived
    | ProgressReceived
    | ReadyReceived
    | StepReceived[Owner]
    | CallAnswered[Owner]
    | StatsReceived
    | PongReceived
    | DeathAnnounced
    | GoodbyeReceived
)


class VersionError(ProtocolError):
    """The engine speaks another version of the protocol."""
