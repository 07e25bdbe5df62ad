"""What runs behind a client: the readers of its two sockets, the pulse, and the passing on of the child's output."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any, cast

import anyio
import zmq
from anyio.lowlevel import checkpoint

from anyengine.client.limits import MOMENT, STANDSTILL
from anyengine.client.session import EngineSession
from anyengine.client.waiters import PendingCall
from anyengine.errors import ProtocolError
from anyengine.frames import connection_event
from anyengine.notices import warn
from anyengine.process.remote_engine import RemoteEngine
from anyengine.process.threads import run_in_thread
from anyengine.protocol.client_events import (
    CallAnswered,
    ClientState,
    DeathAnnounced,
    Event,
    GoodbyeReceived,
    HelloReceived,
    PongReceived,
    ProgressReceived,
    ReadyReceived,
    StatsReceived,
    StepReceived,
    VersionError,
)
from anyengine.protocol.messages import MessageLostError
from anyengine.transport.sockets import Socket

READ_SLICE = 0.001
"""Seconds for which one turn of the event loop reads messages. Who waits for a turn may wait for two, and for what the
readers of streams do in between: this keeps it well under 10 ms.
"""

LAST_READ_SLICE = 0.004
"""The same for an engine that has ended, whose last outputs wake nobody."""

PULSE = 0.5
"""Seconds between two PINGs."""

LOOKS = (0.0, 0.001, 0.005, 0.02)
"""Seconds between the looks for an engine after a connection has ended."""

UNREACHABLE_PULSES = 2
"""Pulses for which a live process may be without its socket."""

CATCH_UP_LIMIT = 1.0
"""Seconds for which one engine's messages are read before a limit is believed: there may always be more."""


def read_outputs(session: EngineSession, seconds: float = READ_SLICE) -> bool:
    """Read from the PULL socket until it is empty or ``seconds`` are over; whether there may be more to do."""
    pull, machine = session.endpoints.pull, session.link.machine
    deadline = 0.0
    while (frames := pull.receive_nowait()) is not None:
        try:
            event = machine.receive(frames)
        except ProtocolError as error:
            _refuse(session, error)
        else:
            if type(event) is StepReceived:
                session.link.heard(event.step)
                session.deliver(event)
            elif event is not None:
                _handle(session, event)
        if deadline:
            if time.perf_counter() >= deadline:
                session.delivery.wake_readers()
                return True
        elif not pull.has_input():  # as most often; it is told sooner than by a receive that fails
            break
        else:
            deadline = time.perf_counter() + seconds
    return session.delivery.wake_readers()


def _handle(session: EngineSession, event: Event[Any]) -> None:
    link = session.link
    if isinstance(event, CallAnswered):
        link.heard()
        cast("PendingCall", event.owner).answer(event.error, event.value)
    elif isinstance(event, PongReceived):
        link.heard(event.steps)
    elif isinstance(event, StatsReceived):
        link.engine_figures = dict(event.figures)
    elif isinstance(event, DeathAnnounced):
        link.death_message = event.message
        link.announced.set()
    elif isinstance(event, GoodbyeReceived) and isinstance(link.host, RemoteEngine):
        link.host.end("goodbye")


def _refuse(session: EngineSession, error: ProtocolError) -> None:
    if isinstance(error, MessageLostError):
        session.link.fail(str(error))
        return
    if session.link.machine.state is ClientState.DEAD:
        return  # the rest of what the engine sent, which came too late
    session.refused_messages += 1
    # Whoever floods the socket with garbage does not flood the log with it: 1, 2, 4, 8, ...
    if session.refused_messages & (session.refused_messages - 1) == 0:
        warn("message ignored (%d so far): %s", session.refused_messages, error)


async def read_pull(session: EngineSession) -> None:
    """Own the PULL socket: read whenever something comes."""
    while True:
        pull = session.endpoints.pull
        try:
            await pull.serve(functools.partial(read_outputs, session))
        except anyio.ClosedResourceError:
            if pull is session.endpoints.pull:
                raise
            # The engine's next life has another one.


async def read_router(session: EngineSession) -> None:
    """Own the ROUTER socket: the handshake comes here, and whatever strangers send."""
    while True:
        await session.endpoints.router.wait_readable()
        _read_handshakes(session)
        await checkpoint()


def _read_handshakes(session: EngineSession) -> bool:
    """Read from the ROUTER socket; whether there may be more."""
    for _ in range(100):
        if (frames := session.endpoints.router.receive_nowait()) is None:
            return False
        _take_handshake(session, frames)
    return True


async def keep_limits(session: EngineSession) -> None:
    """Count the limits that run."""

    async def catch_up() -> None:
        with anyio.move_on_after(CATCH_UP_LIMIT):
            while _read_handshakes(session) or read_outputs(session):
                await checkpoint()
        session.endpoints.router.wake()
        session.endpoints.pull.wake()
        # A task that is woken in this turn has its own in the next one; trio shuffles those of one turn.
        await checkpoint()
        await checkpoint()

    await session.limits.run(catch_up)


def take_early_hello(session: EngineSession) -> None:
    """Answer an engine that came before this client was ready for it."""
    if session.early_hello is not None:
        frames, session.early_hello = session.early_hello, None
        _take_handshake(session, frames)


def _take_handshake(session: EngineSession, frames: Sequence[bytes | memoryview]) -> None:
    try:
        _handshake(session, frames)
    except VersionError as error:
        session.link.fail(str(error))
    except ProtocolError as error:
        _refuse(session, error)


def _handshake(session: EngineSession, frames: Sequence[bytes | memoryview]) -> None:
    link = session.link
    identity, message = bytes(frames[0]), frames[1:]
    if identity != link.identity and (link.host is None or link.machine.state is not ClientState.CONNECTING):
        # An engine that comes by itself may come while the life before it is being cleared away.
        if not link.machine.recognizes(message):
            raise ProtocolError(f"a stranger on the request socket calls itself {identity[:16]!r}")
        session.early_hello = frames
        return
    event = link.machine.receive(message)
    if isinstance(event, HelloReceived):
        link.identity = identity
        if isinstance(link.host, RemoteEngine):
            link.host.greeted(event.pid)
        link.phase = "load"
        link.greeted.set()
    elif isinstance(event, ProgressReceived):
        link.extend_start_limit()
        if session.on_progress is not None:
            try:
                session.on_progress(event.stage, event.fraction)
            except BaseException as error:  # the application's own error: it ends the start, not this reader
                link.callback_error = error
                link.ready.set()
    elif isinstance(event, ReadyReceived):
        link.info = event.info
        link.ready.set()


async def watch_connections(session: EngineSession, connections: Socket) -> None:
    """Follow the connections to the request socket, where engines that somebody else starts come and go."""
    established = refused = unestablished_ends = 0
    while True:
        await connections.wait_readable()
        ended = False
        while (message := connections.receive_nowait()) is not None:
            what = connection_event(message)
            if what == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                established += 1
            elif what != zmq.EVENT_DISCONNECTED:
                # The end of a connection that never came about follows, and concerns nobody.
                unestablished_ends += 1
                if what != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or session.endpoints.keys is not None:
                    refused += 1
                    _log_refusal(session, refused)
            elif unestablished_ends:
                unestablished_ends -= 1
            else:
                established -= 1
                ended = True
        if ended:
            await _look_for_engine(session, established)


def _log_refusal(session: EngineSession, number: int) -> None:
    # As for messages: whoever tries again and again does not flood the log. 1, 2, 4, 8, ...
    if number & (number - 1) == 0:
        where = session.endpoints.input_address
        warn("a peer without the right keys was refused at %s (%d so far)", where, number)


async def _look_for_engine(session: EngineSession, established: int) -> None:
    """A connection has ended: see whether it was the engine's."""
    link = session.link
    if link.machine.state is not ClientState.SERVING:
        if established <= 0 and link.identity is not None and isinstance(link.host, RemoteEngine):
            link.host.end("lost")
        return
    # Sending tells whether the engine can be reached; ZeroMQ may need a moment to know.
    for pause in LOOKS:
        await anyio.sleep(pause)
        if session.link is not link or link.machine.state is not ClientState.SERVING or link.ended.is_set():
            return
        session.send(link.machine.ping())


async def keep_pulse(session: EngineSession) -> None:
    """Ask for a sign of life now and then, and note what the answers say."""
    while True:
        slept_at = time.monotonic()
        await anyio.sleep(PULSE)
        late = time.monotonic() - slept_at - PULSE
        if late > STANDSTILL:
            session.link.stood_still(late)
            await anyio.sleep(MOMENT)
        link = session.link
        drained = not read_outputs(session)
        if not drained:
            session.endpoints.pull.wake()
        if link.machine.state is not ClientState.SERVING:
            continue
        if drained:
            link.looked()
        session.endpoints.output_connections.follow()
        link.is_unreachable = False
        session.send(link.machine.ping())
        link.pinged()
        if link.lane is not None and link.lane.pool.needs_trim:
            with contextlib.suppress(OSError):  # no thread to be had: later
                await run_in_thread(link.lane.pool.trim, name="trim")
        link.unreachable_pulses = link.unreachable_pulses + 1 if link.is_unreachable else 0
        if link.unreachable_pulses > UNREACHABLE_PULSES:
            link.fail(f"its socket has been gone for {PULSE * UNREACHABLE_PULSES} s, though its process lives")


async def show_output(session: EngineSession) -> None:
    """Pass on what the child prints to this process's stderr."""
    while True:
        host = session.link.host
        if host is not None and host.output is not None:
            with contextlib.suppress(OSError):  # no thread to be had: later
                await session.relay.show(host.output)
        await anyio.sleep(PULSE if session.link.ready.is_set() else PULSE / 10)
