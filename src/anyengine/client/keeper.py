"""Keeps an engine running: one supervisor after the other, as often as a policy allows."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import anyio
from anyio.abc import TaskGroup

from anyengine.brief import brief
from anyengine.client.checks import check_count, check_seconds
from anyengine.client.session import EngineSession
from anyengine.client.supervisor import ShutdownPolicy, StartLimits, Supervisor
from anyengine.client.utility_calls import call_now
from anyengine.engine.failures import describe_failure
from anyengine.errors import EngineClosedError, EngineDeadError, UtilityError
from anyengine.notices import warn
from anyengine.process.host import Launcher
from anyengine.process.threads import run_surely

LONGEST_BACKOFF = 60.0
"""Seconds to wait before a restart at most."""

REMAINS_LIMIT = 5.0
"""Seconds for what is left of a dead engine to be gone before the next one starts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Start a dead engine again, at most ``limit`` times in ``window`` seconds; after that it stays dead.

    Whoever waits for the engine when it dies gets ``EngineDeadError``: nothing is sent a second time behind the
    caller's back. The first restart comes after ``backoff`` seconds, and each further one of the same window after
    twice as long, up to a minute. ``while_down`` says what becomes of a request or call made until the engine serves
    again: ``"wait"`` has it wait for that, ``"fail"`` raises the ``EngineDeadError`` of the last death. A start that
    fails counts as a restart; the very first start of an engine is not repeated.

    :raises TypeError: if a field has the wrong type
    :raises ValueError: if ``limit`` or ``window`` is not above 0, ``backoff`` below 0, or ``while_down`` another word
    """

    limit: int = 3
    window: float = 600.0
    backoff: float = 0.5
    while_down: Literal["wait", "fail"] = "wait"

    def __post_init__(self) -> None:
        check_count("RestartPolicy.limit", self.limit)
        check_seconds("RestartPolicy.window", self.window)
        check_seconds("RestartPolicy.backoff", self.backoff, zero=True)
        if self.while_down not in ("wait", "fail"):
            raise ValueError(f"RestartPolicy.while_down={brief(self.while_down)}: expected 'wait' or 'fail'")


class EngineKeeper:
    """Owns an engine from :meth:`start` to :meth:`stop`, over all of its lives."""

    def __init__(
        self,
        session: EngineSession,
        launcher: Launcher,
        limits: StartLimits,
        restart: RestartPolicy | None,
        on_death: Callable[[], None],
    ) -> None:
        self._session = session
        self._launcher = launcher
        self._limits = limits
        self._restart_policy = restart
        self._on_death = on_death
        self._group: TaskGroup | None = None
        self._starting = False
        self._restarts: deque[float] = deque()
        self._restarting: anyio.CancelScope | None = None
        self._supervisor = self._new_supervisor()

    def _new_supervisor(self) -> Supervisor:
        supervisor = Supervisor(self._session, self._launcher, self._ended)
        self._session.link.fail = supervisor.fail
        return supervisor

    async def start(self, group: TaskGroup) -> None:
        """Start the engine's first life, watched by tasks in ``group``.

        :raises EngineStartError: if it does not get ready
        """
        self._group = group
        await self._start()

    async def _start(self) -> None:
        assert self._group is not None
        self._starting = True
        try:
            await self._supervisor.start(self._group, self._limits)
            await self._introduce_guests()
        finally:
            self._starting = False

    def _ended(self) -> None:
        """A life ended in which the engine was not being closed."""
        if self._starting or self._restarting is not None or self._session.closing:
            return  # whoever starts or closes it is told
        if self._restart_policy is None or self._group is None or self._backoff() is None:
            self._on_death()
            return
        self._session.restarted = anyio.Event()
        # Made here, so that a close which comes before its first turn ends it all the same.
        self._restarting = anyio.CancelScope()
        self._group.start_soon(self._restart, self._restarting)

    def _backoff(self) -> float | None:
        """Seconds to wait before the next restart; None if there may be none."""
        policy = self._restart_policy
        assert policy is not None
        while self._restarts and self._restarts[0] < time.monotonic() - policy.window:
            self._restarts.popleft()
        if len(self._restarts) >= policy.limit:
            return None
        return min(policy.backoff * 2 ** len(self._restarts), LONGEST_BACKOFF)

    async def _restart(self, scope: anyio.CancelScope) -> None:
        """Start new lives until one serves or no more are allowed; then tell whoever waits for it."""
        session = self._session
        try:
            with scope:
                while (backoff := self._backoff()) is not None:
                    self._restarts.append(time.monotonic())
                    self._announce_restart(backoff)
                    if not await self._clear_away():
                        break
                    await anyio.sleep(backoff)
                    if session.closing:
                        break
                    session.renew()
                    self._supervisor = self._new_supervisor()
                    if await self._serves_again():
                        break
        finally:  # whatever came: nobody waits for a restart that nobody makes
            self._restarting = None
            gave_up = session.link.report is not None
            self._release_waiters()
        if gave_up and not session.closing:
            self._on_death()

    def _announce_restart(self, backoff: float) -> None:
        report = self._session.link.report
        limit = self._restart_policy.limit if self._restart_policy is not None else 0
        what = f"restart {len(self._restarts)} of {limit} in {backoff:.2g} s"
        if report is not None and report.attached:  # whoever started that one starts the next one too
            what = f"waiting for one to come back ({len(self._restarts)} of {limit})"
        rank = self._session.link.rank
        who = f"engine {rank} died" if report is None else report.describe().partition("\n")[0]
        warn("%s; %s", who, what)

    async def _serves_again(self) -> bool:
        """Start a new life; if it does not get as far as serving, return when its death is known."""
        link = self._session.link
        try:
            await self._start()
        except EngineDeadError:
            return False
        except EngineClosedError:  # the client is closed meanwhile
            return False
        except BaseException as error:
            # An application that exits in its callback exits; anything else that it raises ends this life only.
            if error is link.callback_error and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                whose = "on_progress raised"
            elif isinstance(error, Exception):
                whose = "the client could not start it again:"
            else:
                raise
            kind, message, _ = describe_failure(error)
            link.fail(f"{whose} {kind}: {message}")
            await link.ended.wait()
            return False
        return True

    async def _introduce_guests(self) -> None:
        """Have a new life connect to the other clients that shared the one before."""
        for address, keys in self._session.guests.items():
            try:
                await call_now(self._session, "connect_client", [address, keys])
            except UtilityError as error:
                warn("the client at %s does not share the restarted engine: %s", address, error)

    async def _clear_away(self) -> bool:
        """Let go of the dead life's host; whether nothing is left of it."""
        with anyio.move_on_after(REMAINS_LIMIT):
            await self._supervisor.finished.wait()
        host = self._session.link.host
        if host is None:
            return True
        if not host.has_ended():
            warn("engine %d is dead, but has not ended; it is not started again", self._session.link.rank)
            return False
        if host.output is not None:
            await self._session.relay.flush(host.output)
        if host.lane is not None:
            await run_surely(host.lane.free, name="free")
        host.close()
        self._session.link.host = None
        return True

    def _release_waiters(self) -> None:
        if self._session.restarted is not None:
            self._session.restarted.set()
            self._session.restarted = None

    async def stop(self, policy: ShutdownPolicy) -> None:
        """End the engine and all that it started, politely first. Shielded and bounded; a second interrupt kills."""
        if self._restarting is not None:
            self._restarting.cancel()
        self._release_waiters()
        await self._supervisor.stop(policy)
