"""One engine's life: launch, handshake, watch, end. Every step is bounded, and each names itself when it fails."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from anyengine.brief import brief
from anyengine.client.checks import check_seconds
from anyengine.client.services import LAST_READ_SLICE, read_outputs, take_early_hello
from anyengine.client.session import EngineSession
from anyengine.client.staging import release
from anyengine.engine.failures import describe_failure
from anyengine.errors import CrashReport, EngineClosedError, EngineStartError
from anyengine.notices import warn
from anyengine.process.blocks import Lease
from anyengine.process.host import EngineHost, Launcher
from anyengine.process.threads import run_in_thread, run_surely
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.protocol.client_events import ClientState

LAST_OUTPUTS_LIMIT = 0.025
"""Seconds after a death in which the connection must end; a forked grandchild may hold it open."""

CLOSING_OUTPUTS_LIMIT = 0.4
"""The same while the client is closed and requests wait for their last outputs: a busy machine may be late."""

STATUS_LIMIT = 0.5
"""Seconds to wait for the exit status of an engine that failed to start or that the client had to kill."""

LOOK = 0.05
"""Seconds between two looks at a process that is expected to end."""

WATCH_LIMIT = 0.5
"""Seconds that the watch may take to tell everybody, after the end of the process."""

GONE_LIMIT = 2.0
"""Seconds for a process group that was killed to be gone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartLimits:
    """Seconds that each step of the start may take; None for no limit. A death ends the wait at once in any case.

    ``hello`` runs from the start of the process to its first message. ``silence`` runs while the engine loads and
    starts anew with each progress report, so that a slow engine is not taken for a stalled one. Time in which this
    process is stopped, or its event loop blocked, does not count.

    :raises TypeError: if a limit is neither a number nor None
    :raises ValueError: if a limit is not above 0
    """

    hello: float | None = 60.0
    silence: float | None = 600.0

    def __post_init__(self) -> None:
        for name in ("hello", "silence"):
            if getattr(self, name) is not None:
                check_seconds(f"StartLimits.{name}", getattr(self, name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownPolicy:
    """How the client's block ends its engine; each wait is cut short when the process ends.

    In mode ``"abort"`` open requests end with the finish reason ``"abort"``, in mode ``"drain"`` they may run on for
    ``drain_limit`` seconds. After that the process has ``grace`` seconds to end on its own, then ``terminate`` seconds
    after SIGTERM, then it is killed with its whole group.

    :raises TypeError: if a limit is not a number
    :raises ValueError: if a limit is below 0, or the mode is another
    """

    mode: Literal["abort", "drain"] = "abort"
    drain_limit: float = 30.0
    grace: float = 2.0
    terminate: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in ("abort", "drain"):
            raise ValueError(f"ShutdownPolicy.mode={brief(self.mode)}: expected 'abort' or 'drain'")
        for name in ("drain_limit", "grace", "terminate"):
            check_seconds(f"ShutdownPolicy.{name}", getattr(self, name), zero=True)


class Supervisor:
    """Owns one life of an engine from :meth:`start` to :meth:`stop`; ``finished`` is set when nothing of it is left."""

    def __init__(self, session: EngineSession, launcher: Launcher, on_death: Callable[[], None]) -> None:
        self._session = session
        self._link = session.link
        self._launcher = launcher
        self._on_death = on_death
        self.finished: anyio.Event = anyio.Event()
        self._launching = threading.Lock()
        self._stopping = False
        self._forced = False

    async def start(self, group: TaskGroup, limits: StartLimits) -> None:
        """Launch the process and return when the engine is READY.

        :raises EngineStartError: if it dies, is too slow, or is refused
        :raises BaseException: what the application's ``on_progress`` raised
        """
        link = self._link
        host = await self._launch()
        link.phase = "hello"
        group.start_soon(self._watch, host)
        take_early_hello(self._session)
        await self._await_step(link.greeted, limits.hello, "HELLO", "start_limits.hello")
        await self._say_init()
        await self._await_step(link.ready, limits.silence, "READY or progress report", "start_limits.silence")
        if link.callback_error is not None:
            raise link.callback_error
        link.phase = "serve"

    async def _say_init(self) -> None:
        """Answer HELLO."""
        session, link = self._session, self._link
        spec = session.spec
        leases: list[Lease] = []
        arguments: Mapping[str, Any] = {} if spec is None else await session.stage(spec.arguments, leases)
        if link.machine.state is not ClientState.GREETED:  # it has died meanwhile
            release(leases)
            return
        path = None if spec is None else spec.path
        session.endpoints.output_connections.forget()
        address = session.endpoints.output_address
        session.send(link.machine.init(output_address=address, path=path, arguments=arguments))

    async def _launch(self) -> EngineHost:
        """Start the process; whatever keeps it from starting is a death of phase ``"launch"``."""
        endpoints = self._session.endpoints
        bootstrap = Bootstrap(endpoints.input_address, self._link.rank, self._link.token, endpoints.keys)
        launched: EngineHost | BaseException | None = None
        try:
            endpoints.begin_life()
            with anyio.CancelScope(shield=True):
                launched = await run_in_thread(self._launch_in_thread, bootstrap, name="launch")
        except EngineClosedError:
            raise
        except Exception as error:  # there is no thread or no descriptor to be had
            launched = error
        assert launched is not None  # a shielded scope that nobody cancels swallows nothing
        if not isinstance(launched, BaseException):
            return launched
        kind, message, _ = describe_failure(launched)
        report = CrashReport(
            rank=self._link.rank,
            pid=None,
            phase="launch",
            exception_type=kind,
            exception_message=message,
            reason=f"{self._launcher.description} could not be started",
        )
        self._session.report_death(report)
        self.finished.set()
        raise EngineStartError(report) from launched

    def _launch_in_thread(self, bootstrap: Bootstrap) -> EngineHost | BaseException:
        """The engine's host, or what the launcher raised: returned, so that it is not taken for a cancellation.

        :raises EngineClosedError: if the client is being closed meanwhile
        """
        try:
            host = self._launcher.start(bootstrap)
        except BaseException as error:
            return error
        # A native cancellation may have ended the wait for this thread: a process that nobody knows of must not stay.
        with self._launching:
            if not self._stopping:
                self._link.host = host
                return host
        host.kill()
        host.reap()
        host.close()
        raise EngineClosedError("the start was cancelled")

    async def _await_step(self, step: anyio.Event, limit: float | None, what: str, setting: str) -> None:
        link = self._link
        with self._session.limits.within(limit) as link.start_limit:
            await step.wait()
        link.start_limit = None
        if link.report is None and not step.is_set():
            self.fail(f"no {what} came within {limit} s; the limit is the setting {setting}")
            await link.ended.wait()
        if link.report is not None:
            self._session.death_told = True
            raise EngineStartError(link.report)

    def fail(self, reason: str) -> None:
        """End the engine because of something that this side found; its waiters learn ``reason``."""
        if self._link.fault is None and self._link.report is None and self._link.host is not None:
            self._link.fault = reason
            if self._link.machine.state is ClientState.SERVING and not self._link.host.can_be_killed:
                # It lives on, but this client's requests need not.
                self._session.send(self._link.machine.shutdown("abort"))
            self._link.host.kill()
            self._link.announced.set()

    async def _watch(self, host: EngineHost) -> None:
        """Wait for the end of the engine, then for the last outputs, then tell everybody."""
        async with anyio.create_task_group() as ending:
            ending.start_soon(self._end_of, host, ending.cancel_scope)
            await self._link.announced.wait()
            # The engine said that it dies, or was killed; its exit status follows, unless something holds the process.
            serving = self._link.machine.state is ClientState.SERVING and self._link.fault is None
            with self._session.limits.within(LAST_OUTPUTS_LIMIT if serving else STATUS_LIMIT):
                await anyio.sleep_forever()
            if not host.has_ended():
                self._conclude(host)
                host.kill()
            await anyio.sleep_forever()

    async def _end_of(self, host: EngineHost, scope: anyio.CancelScope) -> None:
        await host.wait()
        await self._await_last_outputs(host)
        host.kill()
        host.reap()
        self._conclude(host)
        if host.can_be_killed and not self._session.closing:  # otherwise ``stop`` sees to it
            await self._await_group(host)
        self.finished.set()
        scope.cancel()

    async def _await_last_outputs(self, host: EngineHost) -> None:
        """Read what the engine sent before it died; the end of its connection says that this is all."""
        session = self._session
        if self._link.machine.state not in (ClientState.SERVING, ClientState.CLOSING):
            return
        if not host.sends_at_once:
            waits_longer = session.closing and self._link.machine.requests
            with session.limits.within(CLOSING_OUTPUTS_LIMIT if waits_longer else LAST_OUTPUTS_LIMIT):
                await session.endpoints.output_connections.end()
        # Readers are not woken between the slices: they get all of it, and the error behind it, in one go.
        session.ending = True
        while read_outputs(session, LAST_READ_SLICE):
            await checkpoint()

    def _conclude(self, host: EngineHost) -> None:
        session, link = self._session, self._link
        if link.ended.is_set():
            return
        report = host.report(rank=link.rank, phase=link.phase, reason=link.fault)
        if link.death_message is not None:
            report = link.death_message.amend(report)
        crashed = report.exit_code != 0 and not self._forced and bool(link.machine.requests)
        if session.closing and not crashed:
            session.close_waiters(lambda: EngineClosedError("the client was closed"))
            link.ended.set()
            return
        session.report_death(report)
        self._on_death()

    async def stop(self, policy: ShutdownPolicy) -> None:
        """End the engine and all that it started, politely first. Shielded and bounded; a second interrupt kills."""
        with self._launching:
            self._stopping = True
            host = self._link.host
        if host is None:
            return
        try:
            with anyio.CancelScope(shield=True):
                await self._stop_politely(host, policy)
                await self._kill(host)
        except BaseException:
            # Ctrl-C or a native cancellation in the middle of the ladder: somebody is in a hurry.
            host.kill()
            host.reap()
            raise

    async def _stop_politely(self, host: EngineHost, policy: ShutdownPolicy) -> None:
        session, link = self._session, self._link
        if link.machine.state is ClientState.SERVING and link.fault is None:
            session.send(link.machine.shutdown(policy.mode))
            if policy.mode == "drain":
                await self._ends_within(host, policy.drain_limit)
                session.abort(list(link.machine.requests))
            if await self._ends_within(host, policy.grace):
                return
            if not host.can_be_killed:
                warn(
                    "engine %d has not ended %s s after SHUTDOWN, and cannot be killed from here: it goes on in the "
                    "background until its step returns",
                    link.rank,
                    policy.grace,
                )
                return
            warn("engine %d has not ended %s s after SHUTDOWN; sending SIGTERM", link.rank, policy.grace)
        elif host.outlives_close and not await self._ends_within(host, LOOK):
            warn("engine %d cannot be killed from here: its thread goes on until it comes to an end", link.rank)
        if link.report is None and host.can_be_killed and not host.has_ended():
            self._forced = True
            host.terminate()
            if not await self._ends_within(host, policy.terminate):
                warn("engine %d ignores SIGTERM for %s s; killing it", link.rank, policy.terminate)

    async def _ends_within(self, host: EngineHost, limit: float) -> bool:
        """Whether the process ends within ``limit`` seconds; the watch then still reads its last outputs."""
        with self._session.limits.within(limit):
            while not host.has_ended():
                # Looking as well as waiting: should the services have crashed, nobody watches any more.
                with anyio.move_on_after(LOOK):
                    await (anyio.sleep(LOOK) if self._link.ended.is_set() else self._link.ended.wait())
            with anyio.move_on_after(WATCH_LIMIT):
                await self._link.ended.wait()
        return host.has_ended()

    async def _kill(self, host: EngineHost) -> None:
        if host.can_be_killed:
            self._forced = True
            host.kill()
            await self._ends_within(host, GONE_LIMIT)
            host.reap()
            await self._await_group(host)
        if host.lane is not None:
            await run_surely(host.lane.free, name="free")

    async def _await_group(self, host: EngineHost) -> None:
        """Return when the killed group is gone, so that neither memory nor zombies of it stay."""
        if not await run_surely(host.is_gone, GONE_LIMIT, name="gone"):
            warn("processes of engine %d's group outlive SIGKILL", self._link.rank)
