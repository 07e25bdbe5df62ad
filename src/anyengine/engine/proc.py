"""``EngineCoreProc``: the loop that runs an engine. One thread: drain the DEALER, step, send; block when idle.

ZeroMQ's own I/O threads do the I/O, so there are no queues, locks or Python threads here.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import zmq

from anyengine import frames
from anyengine.engine.control import SchedulerControl, SchedulerState
from anyengine.engine.core import Deferred, EngineCore, EngineRequest
from anyengine.engine.failures import describe_failure, message_of
from anyengine.errors import ProtocolError, RequestError, UnencodableError
from anyengine.protocol import engine_machine as machine
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.protocol.messages import MessageLostError
from anyengine.protocol.outputs import OutputDetails, StepOutputs, encode_details
from anyengine.protocol.requests import ShutdownMode

logger: logging.Logger = logging.getLogger("anyengine")

STATS_INTERVAL = 1.0
"""Seconds between two STATS messages while there is work."""

LOOK_INTERVAL = 0.00005
"""Seconds between two looks for messages while there is work: steps that take less do not look each time, for a message
is longer on its way than that."""

STAY_AWAKE = 0.0002
"""Seconds for which an engine without work looks for messages before it sleeps: to wake a thread on an idle processor
takes longer than all the rest of a round trip, and whoever has just been answered often has the next thing to ask."""

GOODBYE_LINGER = 2000
"""Milliseconds for which the last messages may wait to be read when the process ends."""


class Terminated(SystemExit):
    """SIGTERM came: the process ends in good order, wherever it is."""


class EngineCoreProc:
    """Runs one engine for one client until the client ends it.

    :param bootstrap: how the client is reached
    :param context: the ZeroMQ context to use; it stays open
    :param stay_awake: seconds for which an engine without work looks for messages before it sleeps; 0 where that would
        keep other threads of the process from running
    """

    def __init__(
        self, bootstrap: Bootstrap, context: zmq.Context[zmq.Socket[bytes]], *, stay_awake: float = STAY_AWAKE
    ) -> None:
        self._bootstrap = bootstrap
        self._context = context
        self._protocol = machine.EngineMachine(rank=bootstrap.rank, token=bootstrap.token)
        self._dealer = self._socket(zmq.DEALER, linger=0)
        self._push: zmq.Socket[bytes] | None = None
        self._steps = 0
        self._stats_sent_at = 0.0
        self._stats_due = False
        self._stats_were_empty = True
        self._state_told = SchedulerState.RUNNING
        self._look_at = 0.0
        self._stay_awake = stay_awake
        self._ending: ShutdownMode | None = None

    def run(self) -> None:
        """Greet, load, serve, end. Returns when the client has ended the engine in good order.

        :raises Exception: what the engine's constructor, ``load`` or ``step`` raised; then :meth:`announce_death`
        """
        self._dealer.setsockopt(zmq.IDENTITY, self._bootstrap.rank.to_bytes(2, "little"))
        self._dealer.connect(self._bootstrap.address)
        self._dealer.send_multipart(self._protocol.hello(os.getpid()))
        control = self._load(self._await_init())
        try:
            self._serve(control)
        finally:
            control.core.shutdown()
        self.close()

    def close(self) -> None:
        """Close the sockets, giving messages already handed over a moment to leave."""
        self._dealer.close()
        if self._push is not None:
            self._push.close()

    def announce_death(self, error: BaseException) -> None:
        """Tell the client of what this engine dies, if it can be told."""
        if self._push is not None and self._protocol.state is not machine.EngineState.DEAD:
            self._push.send_multipart(self._protocol.dead(*describe_failure(error)))
        self.close()

    # ---- starting ----

    def _socket(self, kind: int, *, linger: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, linger)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        keys = self._bootstrap.keys
        if keys is not None:
            socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server_public)
            socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        return socket

    def _await_init(self) -> machine.InitReceived:
        while True:
            event = self._protocol.receive(frames.receive(self._dealer))
            if isinstance(event, machine.InitReceived):
                return event

    def _load(self, init: machine.InitReceived) -> SchedulerControl:
        self._push = self._socket(zmq.PUSH, linger=GOODBYE_LINGER)
        self._push.connect(init.output_address)
        module, _, name = init.path.partition(":")
        engine_class = getattr(importlib.import_module(module), name)
        if not (isinstance(engine_class, type) and issubclass(engine_class, EngineCore)):
            raise TypeError(f"{init.path} is not a subclass of anyengine.engine.EngineCore")
        core = engine_class(**init.arguments)
        core.load(self._report_progress)
        control = SchedulerControl(
            core, live=self._protocol.live, release=self._release, refuse=self._refuse, can_wait=True
        )
        self._dealer.send_multipart(self._protocol.ready(control.info))
        return control

    def _report_progress(self, stage: str, fraction: float | None = None) -> None:
        self._dealer.send_multipart(self._protocol.progress(stage, fraction))

    # ---- serving ----

    def _serve(self, control: SchedulerControl) -> None:
        while self._ending is None:
            if control.has_work():
                self._work(control)
                continue
            if self._stats_due or control.state is not self._state_told:
                self._send_stats(control)
            self._receive(control, wait=True)
        if self._ending == "drain":
            # A paused engine has no work: what it holds and keeps is aborted.
            while self._protocol.live and control.has_work():
                self._work(control)
        control.abort_requests(list(self._protocol.live))

    def _receive(self, control: SchedulerControl, *, wait: bool = False) -> None:
        """Take in all that has come; with ``wait``, at least one message."""
        if wait:
            sleep_at = time.perf_counter() + self._stay_awake
            while not frames.has_input(self._dealer) and time.perf_counter() < sleep_at:
                pass
        while wait or frames.has_input(self._dealer):
            message = frames.receive(self._dealer) if wait else frames.receive_nowait(self._dealer)
            wait = False
            try:
                event = self._protocol.receive(message)
            except MessageLostError:
                raise
            except ProtocolError as error:
                logger.warning("engine %d ignored a message: %s", self._bootstrap.rank, error)
                continue
            if event is not None:
                self._handle(control, event)

    def _handle(self, control: SchedulerControl, event: machine.Event) -> None:
        protocol = self._protocol
        match event:
            case machine.RequestReceived(message):
                request = EngineRequest(
                    handle=message.handle,
                    prompt_token_ids=message.prompt_token_ids,
                    prompt_embeds=message.prompt_embeds,
                    sampling=message.sampling,
                )
                self._stats_due = True
                try:
                    control.add_request(request)
                except Exception as error:
                    self._refuse(message.handle, error)
            case machine.RequestMalformed(handle, problem):
                self._send(protocol.refuse(self._steps, handle, problem))
            case machine.AbortReceived(handles):
                control.abort_requests(handles)
            case machine.CallReceived(call_id, method, args):
                self._call(control, call_id, method, args)
            case machine.CallMalformed(call_id, problem):
                self._send(protocol.answer(call_id, None, ("ProtocolError", problem, None)))
            case machine.PingReceived():
                self._send(protocol.pong(self._steps))
            case machine.ShutdownReceived(mode):
                self._ending = mode
            case machine.InitReceived():
                raise AssertionError("the protocol takes INIT once")

    def _send(self, message: Sequence[bytes | bytearray | memoryview]) -> None:
        assert self._push is not None
        frames.send_copied(self._push, message)

    def _release(self, handles: Sequence[int]) -> None:
        self._stats_due = True
        self._send(self._protocol.release(self._steps, handles))

    def _refuse(self, handle: int, error: Exception) -> None:
        if isinstance(error, RequestError):
            problem = message_of(error)
        else:
            kind, message, text = describe_failure(error)
            logger.warning("request %d failed in add_request:\n%s", handle, text)
            problem = f"{kind}: {message}"
        self._send(self._protocol.refuse(self._steps, handle, problem))

    def _call(self, control: SchedulerControl, call_id: int, method: str, args: Sequence[Any]) -> None:
        answer = functools.partial(self._answer, call_id)
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
        else:
            answer(value, None)

    def _answer(self, call_id: int, value: Any, error: BaseException | None) -> None:
        if error is None:
            try:
                self._send(self._protocol.answer(call_id, value))
                return
            except UnencodableError as refused:
                failure = type(refused).__name__, str(refused), None
        else:
            failure = describe_failure(error)
        self._send(self._protocol.answer(call_id, None, failure))

    def _work(self, control: SchedulerControl) -> None:
        self._step(control)
        now = time.monotonic()
        if now >= self._look_at:
            self._receive(control)
            self._look_at = now + LOOK_INTERVAL
        if now - self._stats_sent_at >= STATS_INTERVAL:
            self._send_stats(control)

    def _step(self, control: SchedulerControl) -> None:
        outputs = control.step()
        self._steps += 1
        if outputs is not None and len(outputs):
            try:
                message = self._protocol.outputs(self._steps, outputs)
            except UnencodableError:
                message = self._protocol.outputs(self._steps, self._replace_unencodable(control, outputs))
            self._send(message)
        self._stats_due = True

    def _replace_unencodable(self, control: SchedulerControl, outputs: StepOutputs) -> StepOutputs:
        """End the requests whose details cannot travel, so that the step's other rows can."""
        details = dict(outputs.details)
        for row, more in outputs.details.items():
            try:
                encode_details(more, [], f"outputs[{row}]")
            except UnencodableError as error:
                if more.finish_reason is None:
                    control.core.abort_requests([outputs.handles[row]])
                details[row] = OutputDetails(finish_reason="error", error=str(error))
        return StepOutputs(outputs.handles, outputs.token_ids, outputs.counts, details)

    def _send_stats(self, control: SchedulerControl) -> None:
        self._stats_due = False
        self._stats_sent_at = time.monotonic()
        self._state_told = control.state
        figures = control.statistics()
        if figures or not self._stats_were_empty:  # empty figures take back those of before
            self._stats_were_empty = not figures
            try:
                self._send(self._protocol.stats(figures))
            except UnencodableError as error:
                logger.warning("engine %d: figures that cannot travel were dropped: %s", self._bootstrap.rank, error)
