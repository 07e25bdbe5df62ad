"""What runs behind a client: the readers of its two sockets, the pulse, and the passing on of the child's output."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint

from anyengine.client.session import EngineSession
from anyengine.client.waiters import PendingCall
from anyengine.errors import ProtocolError
from anyengine.protocol.client_events import (
    CallAnswered,
    ClientState,
    DeathAnnounced,
    Event,
    HelloReceived,
    PongReceived,
    ProgressReceived,
    ReadyReceived,
    StatsReceived,
    StepReceived,
    VersionError,
)
from anyengine.protocol.messages import MessageLostError
from anyengine.types import EngineSpec

logger: logging.Logger = logging.getLogger("anyengine")

READ_SLICE = 0.001
"""Seconds for which one turn of the event loop reads messages. Who waits for a turn may wait for two, and for what the
readers of streams do in between: this keeps it well under 10 ms.
"""

LAST_READ_SLICE = 0.004
"""The same for an engine that has ended, whose last outputs wake nobody."""

PULSE = 0.5
"""Seconds between two PINGs."""

UNREACHABLE_LIMIT = 1.0
"""Seconds for which a live process may be without its socket."""

ProgressCallback = Callable[[str, float | None], None]
FailEngine = Callable[[str], None]


def read_outputs(session: EngineSession, seconds: float = READ_SLICE) -> bool:
    """Read from the PULL socket until it is empty or ``seconds`` are over; whether there may be more to do."""
    more = _read(session, seconds)
    return session.wake_readers() or more


def _read(session: EngineSession, seconds: float) -> bool:
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
                return True
        elif not pull.has_input():  # as most often; it is told sooner than by a receive that fails
            return False
        else:
            deadline = time.perf_counter() + seconds
    return False


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


def _refuse(session: EngineSession, error: ProtocolError) -> None:
    if isinstance(error, MessageLostError):
        session.link.fail(str(error))
        return
    if session.link.machine.state is ClientState.DEAD:
        return  # the rest of what the engine sent, which came too late
    session.refused_messages += 1
    # Whoever floods the socket with garbage does not flood the log with it: 1, 2, 4, 8, ...
    if session.refused_messages & (session.refused_messages - 1) == 0:
        logger.warning("message ignored (%d so far): %s", session.refused_messages, error)


async def read_pull(session: EngineSession) -> None:
    """Own the PULL socket: read whenever something comes."""
    await session.endpoints.pull.serve(functools.partial(read_outputs, session))


async def read_router(session: EngineSession, spec: EngineSpec, on_progress: ProgressCallback | None) -> None:
    """Own the ROUTER socket: the handshake comes here, and whatever strangers send."""
    router = session.endpoints.router
    while True:
        await router.wait_readable()
        for _ in range(100):
            frames = router.receive_nowait()
            if frames is None:
                break
            try:
                _handshake(session, frames, spec, on_progress)
            except VersionError as error:
                session.link.fail(str(error))
            except ProtocolError as error:
                _refuse(session, error)
        await checkpoint()


def _handshake(
    session: EngineSession,
    frames: Sequence[bytes | memoryview],
    spec: EngineSpec,
    on_progress: ProgressCallback | None,
) -> None:
    link = session.link
    if frames[0] != link.identity:
        raise ProtocolError(f"a stranger on the request socket calls itself {bytes(frames[0])[:16]!r}")
    event = link.machine.receive(frames[1:])
    if isinstance(event, HelloReceived):
        link.phase = "load"
        session.send(
            link.machine.init(output_address=session.endpoints.output_address, path=spec.path, arguments=spec.arguments)
        )
        link.greeted.set()
    elif isinstance(event, ProgressReceived):
        link.extend_start_limit()
        if on_progress is not None:
            try:
                on_progress(event.stage, event.fraction)
            except BaseException as error:  # the application's own error: it ends the start, not this reader
                link.callback_error = error
                link.ready.set()
    elif isinstance(event, ReadyReceived):
        link.info = event.info
        link.ready.set()


async def keep_pulse(session: EngineSession) -> None:
    """Ask for a sign of life now and then, and note what the answers say."""
    while True:
        await anyio.sleep(PULSE)
        link = session.link
        drained = not read_outputs(session)
        if not drained:
            session.endpoints.pull.wake()
        if link.machine.state is not ClientState.SERVING:
            continue
        if drained:
            link.looked()
        while session.endpoints.disconnections.receive_nowait() is not None:
            pass  # strangers that came and went; what counts is the end of a connection after the engine's death
        session.send(link.machine.ping())
        link.pinged()
        if link.unreachable_since is not None and time.monotonic() - link.unreachable_since > UNREACHABLE_LIMIT:
            link.fail(f"its socket has been gone for {UNREACHABLE_LIMIT} s, though its process lives")


async def show_output(session: EngineSession) -> None:
    """Pass on what the child prints to this process's stderr, from a thread: a terminal may block."""
    while True:
        await show_new_output(session)
        await anyio.sleep(PULSE if session.link.ready.is_set() else PULSE / 10)


async def show_new_output(session: EngineSession) -> None:
    """Pass on what is there now."""
    host = session.link.host
    if host is None or host.output is None:
        return
    # Whoever closes waits for what another task is passing on at that moment.
    async with session.showing:
        while text := host.output.read_new():
            await to_thread.run_sync(_write, text, abandon_on_cancel=True, limiter=session.limiter)


def _write(text: str) -> None:
    # A stderr that is closed, full or narrow must not end an engine. The crash report has the last lines all the same.
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
