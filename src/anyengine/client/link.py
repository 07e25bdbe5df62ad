"""One engine as its client holds it: the protocol machine, the process, and what is known of its health."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import anyio

from anyengine.client.limits import Limit
from anyengine.errors import CrashReport, Phase
from anyengine.process.host import EngineHost
from anyengine.process.lane import Lane
from anyengine.protocol.cbor import Frames
from anyengine.protocol.client_machine import ClientMachine
from anyengine.protocol.replies import Dead
from anyengine.types import EngineInfo, Health, HealthState

Clock = Callable[[], float]


class EngineLink:
    """The state of one life of one engine. ``clock`` counts seconds and never goes back.

    ``token`` is what HELLO must prove to have; ``identity`` is how the ROUTER names the connection on which it did.
    """

    def __init__(self, rank: int, handles: Iterator[int], clock: Clock, token: bytes | None) -> None:
        self.rank = rank
        self.identity: bytes | None = None
        self.token: bytes = secrets.token_bytes(16) if token is None else token
        self.machine: ClientMachine[Any] = ClientMachine(
            rank=rank, token=self.token, session=secrets.randbits(64), handles=handles
        )
        self.host: EngineHost | None = None
        self.phase: Phase = "launch"
        self.info: EngineInfo | None = None
        self.report: CrashReport | None = None
        self.fault: str | None = None
        self.death_message: Dead | None = None
        self.callback_error: BaseException | None = None
        self.engine_figures: dict[str, float] = {}
        self.greeted: anyio.Event = anyio.Event()
        self.ready: anyio.Event = anyio.Event()
        self.ended: anyio.Event = anyio.Event()
        self.announced: anyio.Event = anyio.Event()
        self.start_limit: Limit | None = None
        self.is_unreachable: bool = False  # a message could not be sent
        self.unreachable_pulses: int = 0  # in a row
        self.fail: Callable[[str], None] = _no_supervisor
        self._clock = clock
        self._steps = 0
        self._step_seen_at: float | None = None
        self._progress_at = 0.0  # the same without standstills of this process
        self._work_since: float | None = None
        self._silent_since: float | None = None
        self._looked_at = 0.0

    @property
    def lane(self) -> Lane | None:
        """The way for large buffers, if this engine has one."""
        return None if self.host is None else self.host.lane

    @property
    def shares_memory(self) -> bool:
        """Whether a message would have to stay as it is for as long as the engine keeps it."""
        return self.host is not None and self.host.shares_memory

    def hand_over(self, frames: Frames) -> Frames:
        """The message to send instead of ``frames``: what can go by the lane has gone."""
        lane = self.lane
        return frames if lane is None or len(frames) <= 2 else lane.hand_over(frames)

    def extend_start_limit(self) -> None:
        """The engine loads and says so: the limit of silence starts anew."""
        if self.start_limit is not None:
            self.start_limit.begin_anew()

    # ---- signs of life ----

    def heard(self, steps: int | None = None) -> None:
        """A message came; ``steps`` is its step counter if it has one."""
        self._silent_since = None
        if steps is not None and steps != self._steps:
            self._steps = steps
            self._step_seen_at = self._progress_at = self._clock()

    def pinged(self) -> None:
        """A PING went out; the engine is silent since the first one that nothing has come after."""
        if self._silent_since is None:
            self._silent_since = self._clock()

    def stood_still(self, seconds: float) -> None:
        """This process did not run for ``seconds``, for which the engine is not blamed."""
        self._progress_at = min(self._progress_at + seconds, self._clock())
        if self._silent_since is not None:
            self._silent_since += seconds
        if self._work_since is not None:
            self._work_since += seconds

    def looked(self) -> None:
        """All that had come from the engine by now has been read. Silence is only known up to here."""
        self._looked_at = self._clock()
        working = bool(self.machine.requests)
        self._work_since = (self._work_since or self._looked_at) if working else None

    def health(self, timeout: float, state: HealthState | None) -> Health:
        """The engine's health, ``state`` overriding what its signs of life say."""
        now = self._clock()
        since: float | None = None
        # Taken once each: another thread may ask while the loop's writes.
        silent_since, work_since, step_seen_at = self._silent_since, self._work_since, self._step_seen_at
        host = self.host
        if state is None:
            # If this process's own loop was blocked, the engine may have answered all the while.
            silence = None if silent_since is None else self._looked_at - silent_since
            if silence is not None and silence >= timeout:
                since = now - (silent_since or now)
            elif work_since is not None and not self.engine_figures.get("paused"):
                stalled_at = max(work_since, self._progress_at)
                if self._looked_at - stalled_at >= timeout:
                    since = now - stalled_at
        return Health(
            state=state or ("alive" if since is None else "unresponsive"),
            rank=self.rank,
            pid=host.pid if host is not None else 0,
            steps=self._steps,
            last_step_age=None if step_seen_at is None else now - step_seen_at,
            unresponsive_for=since,
        )


def _no_supervisor(reason: str) -> None:
    raise AssertionError(f"nobody supervises this engine yet: {reason}")
