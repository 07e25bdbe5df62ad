"""The client's side of one engine's protocol: a state machine without sockets, tasks or clocks.

Calls turn into frames to send, frames that arrived turn into events. The machine owns the tables of live requests and
pending calls; each entry has an *owner*, an object of the caller's choosing that comes back with the events. An entry
leaves its table exactly once: by an event, by :meth:`ClientMachine.forget_call`, or by :meth:`ClientMachine.died`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic

from anyengine.errors import ProtocolError
from anyengine.params import RequestOptions, SamplingParams
from anyengine.protocol.client_events import (
    TRANSITIONS,
    CallAnswered,
    ClientInput,
    ClientState,
    DeathAnnounced,
    Event,
    GoodbyeReceived,
    HelloReceived,
    Owner,
    PongReceived,
    ProgressReceived,
    ReadyReceived,
    StatsReceived,
    StepReceived,
    VersionError,
)
from anyengine.protocol.handshake import Hello, Progress
from anyengine.protocol.messages import PROTOCOL_VERSION, MessageLostError, decode_from_engine, salvage
from anyengine.protocol.outputs import StepOutputs
from anyengine.protocol.replies import Dead, Goodbye, Outputs, Pong, Stats, Tokens, UtilityResult
from anyengine.protocol.requests import Abort, Add, Frames, Init, Ping, Shutdown, ShutdownMode, Utility

Reply = Outputs | Tokens | UtilityResult | Stats | Pong | Goodbye | Dead


class ClientMachine(Generic[Owner]):
    """One life of one engine. ``handles`` is shared by all engines of a client, so that a handle names one request.

    A call that raises leaves the machine as it was.
    """

    def __init__(self, *, rank: int, token: bytes, session: int, handles: Iterator[int]) -> None:
        self.rank = rank
        self.session = session
        self.state: ClientState = ClientState.CONNECTING
        self.requests: dict[int, Owner] = {}
        self.aborting: dict[int, Owner] = {}
        self.calls: dict[int, Owner] = {}
        self._token = token
        self._handles = handles
        self._next_call = 0
        self._sent = 0
        self._sequence = 0
        self._last_handles: Sequence[int] = ()  # of the last step that came, whoever still wants its rows
        # The rows of one step are most often those of the step before; then nothing has to be looked up.
        self._column: bytes | None = None
        self._column_owners: list[Owner] = []
        self._column_live: list[bool] | None = None  # which rows are of live requests; None: all

    @property
    def held(self) -> int:
        """How many requests the engine has: live ones, and aborted ones that it has not let go of."""
        return len(self.requests) + len(self.aborting)

    # ---- calls ----

    def init(self, *, output_address: str, path: str | None, arguments: Mapping[str, Any]) -> Frames:
        """Answer HELLO; ``path`` is None for an engine that knows by itself what it is.

        :raises ProtocolError: if the engine has not said HELLO, or was answered before
        :raises UnencodableError: if an argument cannot travel
        """
        state = self._next(ClientInput.INIT)
        frames = Init(PROTOCOL_VERSION, self.session, output_address, path, arguments).encode()
        self.state = state
        return frames

    def add(
        self,
        prompts: Sequence[Sequence[int]] | None,
        prompt_embeds: Any,
        sampling: SamplingParams,
        options: RequestOptions,
        owner: Owner,
    ) -> tuple[range, Frames]:
        """New requests, alike in all but their prompts; their handles come with the frames.

        Exactly one of ``prompts`` (token ids of each, :data:`MAX_PROMPTS` at most) and ``prompt_embeds`` (of one
        request) is given.

        :raises ProtocolError: if the engine does not serve
        :raises UnencodableError: if the embeddings or an extra sampling parameter cannot travel
        """
        self._next(ClientInput.REQUEST)
        # Drawn one after the other from a counter that nobody else draws from meanwhile, so they follow one another.
        drawn = [next(self._handles) for _ in range(1 if prompts is None else len(prompts))]
        message = Add(drawn[0], prompts, prompt_embeds, sampling, options)
        frames = message.encode()
        for handle in drawn:
            self.requests[handle] = owner
        self._sent += 1
        return message.handles, frames

    def abort(self, handles: Iterable[int]) -> Frames | None:
        """End these requests; their owners come back in ``StepReceived.released``. None if none of them is live.

        :raises ProtocolError: if the engine neither serves nor closes
        """
        self._next(ClientInput.ABORT)
        live = [handle for handle in dict.fromkeys(handles) if handle in self.requests]
        if not live:
            return None
        for handle in live:
            self.aborting[handle] = self.requests.pop(handle)
        self._forget_column()
        self._sent += 1
        return Abort(live).encode()

    def call(self, method: str, args: Sequence[Any], owner: Owner) -> tuple[int, Frames]:
        """A utility call; its id comes with the frames.

        :raises ProtocolError: if the engine does not serve
        :raises UnencodableError: if an argument cannot travel
        """
        self._next(ClientInput.REQUEST)
        frames = Utility(self._next_call, method, args).encode()
        call_id = self._next_call
        self._next_call += 1
        self.calls[call_id] = owner
        self._sent += 1
        return call_id, frames

    def forget_call(self, call_id: int) -> None:
        """Nobody waits for this call any more; its late answer will be ignored."""
        self.calls.pop(call_id, None)

    def ping(self) -> Frames:
        """Ask for a sign of life.

        :raises ProtocolError: if the engine does not serve
        """
        self._next(ClientInput.REQUEST)
        return Ping(self._sent).encode()

    def shutdown(self, mode: ShutdownMode) -> Frames:
        """Tell the engine to end.

        :raises ProtocolError: if the engine does not serve
        """
        self.state = self._next(ClientInput.SHUTDOWN)
        self._sent += 1
        return Shutdown(mode).encode()

    def died(self) -> tuple[list[Owner], list[Owner], list[Owner]]:
        """The engine is gone: the owners of live requests, aborting requests and pending calls. All tables empty."""
        self.state = ClientState.DEAD
        owners = list(self.requests.values()), list(self.aborting.values()), list(self.calls.values())
        self.requests.clear()
        self.aborting.clear()
        self.calls.clear()
        self._forget_column()
        return owners

    # ---- frames that arrived ----

    def receive(self, frames: Sequence[bytes | memoryview]) -> Event[Owner] | None:
        """The event in one message, or None if it says nothing new (a late answer, another session).

        :raises ProtocolError: if it is not a message, or one that may not come now
        :raises MessageLostError: if messages before it are missing
        :raises VersionError: if it is the HELLO of another protocol version
        """
        try:
            message = decode_from_engine(frames)
        except ProtocolError as error:
            # Raised from here: an error that a frame of its own traceback holds is in a cycle, with the message.
            message = self._salvage(frames, str(error))
            if message is None:
                raise
        if isinstance(message, Tokens):
            return self._tokens(message)
        if isinstance(message, Outputs):
            if not self._follows(ClientInput.REPLY, message):
                return None
            self._last_handles = message.outputs.handles
            return self._outputs(message.step, message.outputs)
        if isinstance(message, UtilityResult):
            return self._result(message) if self._follows(ClientInput.REPLY, message) else None
        if isinstance(message, Pong):
            return PongReceived(message.steps) if self._follows(ClientInput.REPLY, message) else None
        if isinstance(message, Stats):
            return StatsReceived(message.figures) if self._follows(ClientInput.REPLY, message) else None
        if isinstance(message, Dead):
            return DeathAnnounced(message) if self._follows(ClientInput.LAST_MESSAGE, message) else None
        if isinstance(message, Goodbye):
            return GoodbyeReceived() if self._follows(ClientInput.LAST_MESSAGE, message) else None
        if isinstance(message, Hello):
            return self._hello(message)
        if isinstance(message, Progress):
            self.state = self._next(ClientInput.PROGRESS)
            return ProgressReceived(*message)
        self.state = self._next(ClientInput.READY)
        return ReadyReceived(message.info)

    def recognizes(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Whether a message is the HELLO of an engine that has this one's rank and token; changes nothing."""
        try:
            message = decode_from_engine(frames)
        except ProtocolError:
            return False
        return isinstance(message, Hello) and message.rank == self.rank and message.token == self._token

    def _next(self, what: ClientInput) -> ClientState:
        state = TRANSITIONS.get((self.state, what))
        if state is None:
            raise ProtocolError(f"engine {self.rank}: {what.value} cannot come in state {self.state.value}")
        return state

    def _follows(self, what: ClientInput, message: Reply) -> bool:
        """Whether a reply belongs to this life of the engine; counts it if so."""
        if message.session != self.session:
            return False
        self._next(what)
        if message.sequence != self._sequence:
            # The number stays where it is: nothing behind a hole is delivered as if it were whole.
            raise MessageLostError(
                f"message {message.sequence} of engine {self.rank} came where number {self._sequence} was due: "
                f"messages were lost, refused or repeated on the way"
            )
        self._sequence += 1
        return True

    def _hello(self, message: Hello) -> HelloReceived:
        if message.token != self._token:
            raise ProtocolError(f"a HELLO for rank {self.rank} without this engine's token was refused")
        if message.version != PROTOCOL_VERSION:
            raise VersionError(
                f"the engine speaks version {message.version} of the protocol and this client version "
                f"{PROTOCOL_VERSION}; install the same anyengine on both sides"
            )
        if message.rank != self.rank:
            raise ProtocolError(f"engine {self.rank} says HELLO as engine {message.rank}")
        self.state = self._next(ClientInput.HELLO)
        return HelloReceived(message.pid)

    def _tokens(self, message: Tokens) -> StepReceived[Owner] | None:
        if message.session != self.session:
            return None
        handles = self._last_handles
        if len(message.token_ids) != len(handles) and message.sequence == self._sequence:
            raise ProtocolError(f"TOKENS of {len(message.token_ids)} rows follows a step of {len(handles)} rows")
        self._follows(ClientInput.REPLY, message)
        outputs = StepOutputs(handles, message.token_ids)
        if self._column is None or self._column_live is not None:
            return self._outputs(message.step, outputs)
        return StepReceived(message.step, outputs, self._column_owners, ())

    def _outputs(self, step: int, outputs: StepOutputs) -> StepReceived[Owner]:
        column = outputs.handle_bytes()
        if column != self._column:
            requests = self.requests
            found = [requests.get(handle) for handle in outputs.handles]
            owners = [owner for owner in found if owner is not None]
            live = None if len(owners) == len(found) else [owner is not None for owner in found]
            self._column, self._column_owners, self._column_live = column, owners, live
        owners, live = self._column_owners, self._column_live
        released: list[tuple[int, Owner]] = []
        if live is not None:
            for row, more in outputs.details.items():
                if more.finish_reason is not None:
                    handle = outputs.handles[row]
                    owner = self.aborting.pop(handle, None)
                    if owner is not None:
                        released.append((handle, owner))
            outputs = outputs.select(live) if owners else StepOutputs((), ())
        for row, more in outputs.details.items():
            if more.finish_reason is not None:
                self.requests.pop(outputs.handles[row], None)
                self._forget_column()
        return StepReceived(step, outputs, owners, released)

    def _forget_column(self) -> None:
        # A new list: the old one may be on its way in an event.
        self._column, self._column_owners, self._column_live = None, [], None

    def _result(self, message: UtilityResult) -> CallAnswered[Owner] | None:
        owner = self.calls.pop(message.call_id, None)
        return None if owner is None else CallAnswered(owner, message.error, message.value)

    def _salvage(self, frames: Sequence[bytes | memoryview], problem: str) -> UtilityResult | None:
        """The failure of the one call whose answer is malformed; None if it cannot be told which."""
        if len(frames) < 2 or bytes(frames[0]) != UtilityResult.KIND:
            return None
        session, sequence, call_id = (salvage(bytes(frames[1]), index) for index in range(3))
        if session is None or sequence is None or call_id is None:
            return None
        return UtilityResult(session, sequence, call_id, ("ProtocolError", problem, None), None)
