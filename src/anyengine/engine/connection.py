"""One client as its engine sees it: two sockets and a protocol machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq

from anyengine import frames
from anyengine.addresses import seen_from_engine
from anyengine.brief import brief
from anyengine.engine import contract
from anyengine.engine.core import EngineCore, EngineRequest, engine_request
from anyengine.engine.failures import describe_failure, message_of
from anyengine.engine.lane import EngineLane
from anyengine.errors import AddressError, UnencodableError
from anyengine.notices import warn
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.protocol.cbor import Buffer
from anyengine.protocol.engine_machine import EngineMachine, EngineState, Event, InitReceived
from anyengine.protocol.outputs import StepOutputs
from anyengine.protocol.requests import Add
from anyengine.types import EngineInfo

GOODBYE_LINGER = 2000
"""Milliseconds for which the last messages may wait to be read when the process ends."""

SLOT_BITS = 56
"""Bits of a request's handle that its client draws; above them stands the slot of the client's connection."""

_CLIENT_BITS = (1 << SLOT_BITS) - 1


class ClientConnection:
    """The connection to one client.

    A client that launched this engine is there once. One whose connection is ``lasting`` comes and goes: when it has
    gone, :meth:`greet` begins anew, and whoever then listens at that address is the next client.

    :param slot: tells this client's requests from those of others; 0 to 255
    """

    def __init__(
        self, bootstrap: Bootstrap, context: zmq.Context[zmq.Socket[bytes]], *, slot: int, lasting: bool
    ) -> None:
        self.slot = slot
        self.lasting = lasting
        self.draining: bool = False
        self.machine: EngineMachine = EngineMachine(rank=bootstrap.rank, token=bootstrap.token)
        self.dealer: zmq.Socket[bytes]
        self._lane = None if bootstrap.lane is None else EngineLane(bootstrap.lane)
        self._bootstrap = bootstrap
        self._context = context
        self._push: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._is_connected = False
        self._keys_refused = False
        self._is_open = False
        self.left_at: float | None = None  # when it was told goodbye, if it has not gone yet

    @property
    def address(self) -> str:
        """Where the client listens."""
        return self._bootstrap.address

    # ---- coming and going ----

    def greet(self) -> None:
        """Connect, now or when there is somebody, and say HELLO."""
        self.close()
        bootstrap = self._bootstrap
        self.draining = False
        self.machine = EngineMachine(rank=bootstrap.rank, token=bootstrap.token)
        self.left_at = None
        self.dealer = self._socket(zmq.DEALER)
        self._is_open = True
        # A name of its own for each life: the router may not have noticed yet that the one before is gone.
        identity = bootstrap.rank.to_bytes(2, "little") + os.urandom(6)
        if self.lasting:
            self._monitor = self.dealer.get_monitor_socket(frames.CONNECTION_EVENTS)
            self._is_connected = False
        self.dealer.setsockopt(zmq.IDENTITY, identity)
        try:
            self.dealer.connect(bootstrap.address)
        except zmq.ZMQError as error:
            self.close()
            raise AddressError(
                f"address={brief(bootstrap.address)} cannot be connected to: {error.strerror}"
            ) from error
        self.dealer.send_multipart(self.machine.hello(os.getpid()))

    def open_outputs(self, init: InitReceived) -> None:
        """The client has answered: connect to where its outputs go."""
        self._push = self._socket(zmq.PUSH)
        self._push.setsockopt(zmq.LINGER, 0 if self.lasting else GOODBYE_LINGER)
        address = init.output_address
        self._push.connect(seen_from_engine(address, self._bootstrap.address) if self.lasting else address)

    def say_ready(self, info: EngineInfo) -> None:
        """From now on the client's requests are served."""
        self.dealer.send_multipart(self.machine.ready(info))

    def say_progress(self, stage: str, fraction: float | None = None) -> None:
        """The engine loads and gets on with it."""
        self.dealer.send_multipart(self.machine.progress(stage, fraction))

    def say_dead(self, exception_type: str, message: str, traceback: str) -> None:
        """The engine dies of an exception; tell the client, if it can be told."""
        if self._push is not None and self.machine.state is not EngineState.DEAD:
            self._push.setsockopt(zmq.LINGER, GOODBYE_LINGER)
            self._push.send_multipart(self.machine.dead(exception_type, message, traceback))

    def say_goodbye(self) -> None:
        """Leave the client in good order, if it can be told."""
        if self._push is not None and self.machine.state is not EngineState.DEAD:
            self._push.setsockopt(zmq.LINGER, GOODBYE_LINGER)
            self.send(self.machine.goodbye())
            self.left_at = time.monotonic()

    def close(self) -> None:
        """Close the sockets, giving messages already handed over a moment to leave."""
        if self._monitor is not None:
            # Not left to the collector: what a signal raises in there is lost.
            monitor, self._monitor = self._monitor, None
            self.dealer.disable_monitor()
            monitor.close(linger=0)
        if self._is_open:
            self._is_open = False
            self.dealer.close()
            if self._lane is not None:  # of the one client that does not come again
                self._lane.close()
        if self._push is not None:
            self._push.close()
            self._push = None

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        keys = self._bootstrap.keys
        if keys is not None:
            socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server_public)
            socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        if self.lasting and self._bootstrap.address.startswith("tcp:"):
            socket.setsockopt(zmq.IPV6, 1)
            frames.notice_silence(socket)
        return socket

    # ---- messages ----

    @property
    def is_served(self) -> bool:
        """Whether the client has been told READY and not left."""
        return self.machine.state in (EngineState.SERVING, EngineState.DRAINING)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """What to poll when there is nothing else to do."""
        return [self.dealer] if self._monitor is None else [self.dealer, self._monitor]

    def has_input(self) -> bool:
        """Whether a message waits."""
        return frames.has_input(self.dealer)

    def receive(self) -> Event | None:
        """The event in the next message; waits for one.

        :raises ProtocolError: if the message is none that may come now
        :raises MessageLostError: if messages before it are missing
        """
        message: Sequence[bytes | memoryview] = frames.receive(self.dealer)
        if self._lane is not None:
            message = self._lane.unwrap(message)
        return self.machine.receive(message)

    def has_lost_client(self) -> bool:
        """Whether the connection that HELLO was said on has ended."""
        lost = False
        while self._monitor is not None and frames.has_input(self._monitor):
            event = frames.connection_event(frames.receive_nowait(self._monitor))
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                lost = lost or self._is_connected
            elif self._bootstrap.keys is not None and not self._keys_refused:
                self._keys_refused = True
                warn("the client at %s does not accept this engine's keys", self.address)
        return lost

    def send(self, message: Sequence[Buffer]) -> None:
        """Send to the client's output socket."""
        assert self._push is not None
        frames.send_copied(self._push, message)

    def send_step(self, step: int, outputs: StepOutputs, core: EngineCore) -> None:
        """Send the rows of this client in one step of ``core``, if it is still there.

        A request of which something cannot travel is aborted and fails, so that the step's other rows can.

        :raises EngineContractError: if it cannot be told which requests these are
        """
        if not self.is_served:
            return
        try:
            message = self.machine.outputs(step, outputs)
        except contract.UNSOUND:
            message = self.machine.outputs(step, contract.sound(core, outputs, self.internal))
        self.send(message)

    def answerer(self, call_id: int) -> Callable[[Any, BaseException | None], None]:
        """What answers a call with its value or its error, now or later, unless the client has gone by then."""
        machine = self.machine

        def answer(value: Any, error: BaseException | None) -> None:
            if self.machine is not machine or not self.is_served:
                return
            failure: tuple[str, str, str | None]
            if error is None:
                try:
                    self.send(machine.answer(call_id, value))
                    return
                except UnencodableError as refused:
                    failure = type(refused).__name__, message_of(refused), None
            else:
                failure = describe_failure(error)
            self.send(machine.answer(call_id, None, failure))

        return answer

    # ---- handles ----

    def internal(self, handle: int) -> int:
        """The engine's handle for a request of this client."""
        return self.slot << SLOT_BITS | handle

    def requests(self, message: Add) -> Iterator[EngineRequest]:
        """The requests of one message, as they are for the engine."""
        prompts: Sequence[Sequence[int] | None] = [None] if message.prompts is None else message.prompts
        for handle, prompt in zip(message.handles, prompts, strict=True):
            yield engine_request(
                self.internal(handle), prompt, message.prompt_embeds, message.sampling, message.options
            )

    @property
    def live(self) -> Sequence[int]:
        """The engine's handles of this client's live requests."""
        return [self.internal(handle) for handle in self.machine.live]


def external(handle: int) -> int:
    """The client's handle for what the engine calls ``handle``."""
    return handle & _CLIENT_BITS


def slot_of(handle: int) -> int:
    """The slot of the client whose request the engine calls ``handle``."""
    return handle >> SLOT_BITS
