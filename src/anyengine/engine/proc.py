"""``EngineCoreProc``: the loop that runs an engine. One thread: take in messages, step, send; block when idle.

ZeroMQ's own I/O threads do the I/O, so there are no queues, locks or Python threads here.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import zmq

from anyengine.engine import contract
from anyengine.engine.clients import LEAVE_LIMIT, Clients
from anyengine.engine.connection import ClientConnection, slot_of
from anyengine.engine.control import SchedulerControl
from anyengine.engine.core import Deferred, EngineCore, StepOutputs
from anyengine.engine.failures import describe_failure, message_of
from anyengine.engine.figures import DELAY, Figures
from anyengine.engine.loading import build_engine
from anyengine.engine.sharing import LiveHandles
from anyengine.errors import ProtocolError, RequestError
from anyengine.notices import warn
from anyengine.protocol import engine_machine as machine
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.protocol.error_kinds import kind_of
from anyengine.protocol.messages import MessageLostError
from anyengine.protocol.requests import ShutdownMode

logger: logging.Logger = logging.getLogger("anyengine")

LOOK_INTERVAL = 0.00005
"""Seconds between two looks for messages while there is work: steps that take less do not look each time, for a message
is longer on its way than that."""

INTAKE = 0.005
"""Seconds after which a step is made, if there is one to make, though more messages wait: many prompts, or long ones,
may take an engine longer to take in than the outputs of those that run can wait."""

STAY_AWAKE = 0.001
"""Seconds for which an engine without work looks for messages before it sleeps: to wake a thread on an idle processor
takes longer than all the rest of a round trip, and a client that has just been answered often has the next thing to
ask. Where its own processor is busy, it takes several times as long as a round trip to do so."""


class Terminated(SystemExit):
    """SIGTERM came: the process ends in good order, wherever it is."""


class EngineCoreProc:
    """Runs one engine for its clients.

    The client that launched the engine, if one did, decides when it ends; others share it and come and go.

    :param owner: how the client is reached that launched the engine; it says in INIT what to build
    :param context: the ZeroMQ context to use; it stays open
    :param rank: the engine's number, where nobody launched it
    :param engine: the engine itself, loaded, where nobody launched it: then it runs until a signal ends it
    :param alone: whether this process is the engine's: then nobody else has a use for the time in which an engine
        without work looks for messages, and nothing but what the engine loaded is in the way of the garbage collector
    """

    def __init__(
        self,
        owner: Bootstrap | None,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        rank: int = 0,
        engine: EngineCore | None = None,
        alone: bool = True,
    ) -> None:
        self._clients = Clients(owner, context, rank)
        self._engine = engine
        self._steps = 0
        self._figures = Figures(self._clients.send_figures)
        self._look_at = 0.0
        self._stays_awake = False  # something was done since the last wait, for which the client may have a next thing
        self._alone = alone
        self._paused_by: ClientConnection | None = None
        self._unsettled: list[Deferred] = []  # answers of calls that are not known yet
        self._failure_fd: int | None = None
        self._ending: ShutdownMode | None = None
        self._terminated = False

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: the loop ends after this step. What a handler raises can be lost in a destructor."""
        self._terminated = True

    def run(self) -> None:
        """Greet, load, serve, end. Returns when the owner has ended the engine in good order.

        :raises Exception: what the engine's constructor, ``load`` or ``step`` raised; then :meth:`announce_death`
        """
        core = self._engine or self._load_for_owner()
        if self._alone:
            # What was loaded stays. To look through it again and again takes a tenth of a second each time with torch
            # in it, in which no step is made.
            gc.collect()
            gc.freeze()
        control = SchedulerControl(
            core,
            live=LiveHandles(self._clients.connections),
            release=self._release,
            refuse=self._refuse,
            can_wait=True,
            more={"connect_client": self.connect_client},
        )
        self._failure_fd = contract.failure_fd(core)
        if self._clients.owner is not None:
            self._clients.owner.say_ready(control.info)
        try:
            self._serve(control)
        finally:
            core.shutdown()
        self._clients.say_goodbye()
        self._clients.close()

    def announce_death(self, error: BaseException) -> None:
        """Tell the clients of what this engine dies, if they can be told."""
        self._clients.announce_death(error)

    def say_goodbye(self) -> None:
        """Leave all clients in good order, without being told to."""
        if self._clients.owner is not None:
            self._clients.owner.say_goodbye()
        self._clients.say_goodbye()
        self._clients.close()

    def connect_client(self, address: str, keys: str | None = None) -> None:
        """Let another client share this engine; see :meth:`Clients.connect`."""
        self._clients.connect(address, keys)

    def close(self) -> None:
        """Close the sockets, giving messages already handed over a moment to leave."""
        self._clients.close()

    # ---- starting ----

    def _load_for_owner(self) -> EngineCore:
        owner = self._clients.owner
        assert owner is not None
        owner.greet()
        while not isinstance(init := owner.receive(), machine.InitReceived):
            pass
        owner.open_outputs(init)
        core = build_engine(init.path or "", init.arguments)
        core.owns_process = self._alone
        contract.load(core, owner.say_progress)
        return core

    # ---- serving ----

    def _serve(self, control: SchedulerControl) -> None:
        while self._ending is None:
            if self._terminated:
                raise Terminated
            if control.has_work():
                self._work(control)
                continue
            for handle in control.forgotten():
                details = contract.forgotten(control.core)
                warn("request %d: %s", handle, details.error)
                self._clients.fail(self._steps, handle, details.error or "", "failed")
            if self._figures.are_overdue(control):
                self._figures.send(control)
            self._await_input(control)
            self._receive(control)
        if self._ending == "drain" and self._clients.owner is not None:
            # A paused engine has no work: what it holds and keeps is aborted.
            while self._clients.owner.machine.live and control.has_work():
                self._work(control)
        for connection in self._clients.connections:
            control.abort_requests(connection.live)

    def _await_input(self, control: SchedulerControl) -> None:
        """Return when a message may have come; send figures if nothing comes for a moment.

        :raises Exception: what the engine failed of, if it does meanwhile
        """
        stay_awake = STAY_AWAKE if self._alone and self._stays_awake else 0.0
        self._stays_awake = False
        what = self._clients.await_input(stay_awake, DELAY if self._figures.due else None, self._failure_fd)
        if what == "failure":
            control.core.check_health()
        elif what is None and self._figures.due:
            self._figures.send(control)

    def _receive(self, control: SchedulerControl) -> None:
        """Take in all that has come, or as much of each client as there is time for between two steps."""
        if self._unsettled:
            self._unsettled = [deferred for deferred in self._unsettled if not deferred.is_settled()]
        for connection in tuple(self._clients.connections):
            until = time.monotonic() + INTAKE
            while connection.has_input():
                if time.monotonic() >= until and control.has_work():
                    break
                try:
                    event = connection.receive()
                    if event is not None:
                        self._stays_awake = self._stays_awake or not isinstance(event, machine.PingReceived)
                        self._handle(control, connection, event)
                except (MessageLostError, zmq.ZMQError) as error:
                    if not connection.lasting:
                        raise
                    warn("the client at %s is given up: %s", connection.address, error)
                    self._part(control, connection, connection.greet)
                except ProtocolError as error:
                    warn("engine %d ignored a message: %s", self._clients.rank, error)
            if connection.lasting:
                self._look_after(control, connection)

    def _look_after(self, control: SchedulerControl, connection: ClientConnection) -> None:
        """See whether a client that comes and goes has gone, or may go now."""
        if connection.has_lost_client():
            if connection.is_served:
                logger.info("the client at %s has gone", connection.address)
            self._part(control, connection, connection.greet)
        elif connection.draining and not (connection.machine.live and control.has_work()):
            logger.info("the client at %s has left", connection.address)
            self._part(control, connection, connection.say_goodbye)
        elif connection.left_at is not None and time.monotonic() - connection.left_at > LEAVE_LIMIT:
            connection.greet()  # it left, but listens on

    def _part(self, control: SchedulerControl, connection: ClientConnection, last_word: Callable[[], None]) -> None:
        """A client goes or has gone: nothing of it stays, its pause included."""
        connection.draining = False
        control.abort_requests(connection.live)
        last_word()
        if self._paused_by is connection:
            self._paused_by = None
            control.call("wake_up" if control.is_asleep else "resume_scheduler", [])

    def _handle(self, control: SchedulerControl, connection: ClientConnection, event: machine.Event) -> None:
        protocol = connection.machine
        match event:
            case machine.RequestReceived(message) if slot_of(message.handles[-1]):
                connection.send(protocol.fail(self._steps, message.handles, "its handle has more than 56 bits"))
            case machine.RequestReceived(message):
                self._figures.due = True
                for request in connection.requests(message):
                    try:
                        control.add_request(request)
                    except Exception as error:
                        self._refuse(request.handle, error)
            case machine.RequestMalformed(handles, problem):
                connection.send(protocol.fail(self._steps, handles, problem))
            case machine.AbortReceived(handles):
                control.abort_requests([connection.internal(handle) for handle in handles])
            case machine.CallReceived(call_id, method, args):
                self._call(control, connection, call_id, method, args)
            case machine.CallMalformed(call_id, problem):
                connection.send(protocol.answer(call_id, None, ("ProtocolError", problem, None)))
            case machine.PingReceived():
                connection.send(protocol.pong(self._steps))
            case machine.ShutdownReceived(mode):
                if connection is self._clients.owner:
                    self._ending = mode
                else:
                    if mode == "abort":
                        control.abort_requests(connection.live)
                    connection.draining = True
            case machine.InitReceived():
                logger.info("a client came to %s", connection.address)
                connection.open_outputs(event)
                connection.say_ready(control.info)

    def _release(self, handles: Sequence[int]) -> None:
        self._figures.due = True
        self._clients.release(self._steps, handles)

    def _refuse(self, handle: int, error: Exception) -> None:
        if isinstance(error, RequestError):
            problem = message_of(error)
        else:
            name, message, text = describe_failure(error)
            warn("request %d failed in add_request:\n%s", handle, text)
            problem = f"{name}: {message}"
        self._clients.fail(self._steps, handle, problem, kind_of(error))

    def _call(
        self, control: SchedulerControl, connection: ClientConnection, call_id: int, method: str, args: Sequence[Any]
    ) -> None:
        answer = connection.answerer(call_id)
        if method in ("pause_scheduler", "sleep"):
            self._paused_by = connection
        try:
            value = control.call(method, args)
        except Terminated:
            raise
        except (Exception, SystemExit) as error:  # sys.exit() in a utility is that call's failure
            if control.broken:
                raise
            answer(None, error)
            return
        if isinstance(value, Deferred):
            value.on_settled(answer)
            self._unsettled.append(value)
        else:
            answer(value, None)

    def _work(self, control: SchedulerControl) -> None:
        outputs = control.step()
        self._steps += 1
        self._stays_awake = True
        if outputs is not None:
            if type(outputs) is not StepOutputs:
                contract.check_step(control.core, outputs)
            if len(outputs):
                self._clients.send_step(self._steps, outputs, control.core)
        self._figures.due = True
        now = time.monotonic()
        if now >= self._look_at:
            self._receive(control)
            self._look_at = now + LOOK_INTERVAL
        if now >= self._figures.overdue_at:
            self._figures.send(control)
