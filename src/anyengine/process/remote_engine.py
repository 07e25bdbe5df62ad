"""An engine that somebody else started, here or elsewhere, as its client sees it: a connection and what it said."""

from __future__ import annotations

from typing import Literal

import anyio

from anyengine.errors import CrashReport, Phase
from anyengine.protocol.bootstrap import Bootstrap

Ending = Literal["lost", "goodbye"]


class RemoteEngine:
    """Ends when its connection does, or with its goodbye. Nothing here can end it, or tell how its process ended."""

    output: None = None
    lane: None = None
    shares_memory: bool = False
    can_be_killed: bool = False
    outlives_close: bool = False
    sends_at_once: bool = False

    def __init__(self) -> None:
        self.pid: int = 0
        self._ending: Ending | None = None
        self._ended = anyio.Event()

    def greeted(self, pid: int) -> None:
        """It said HELLO, with its process id on its own machine."""
        self.pid = pid

    def end(self, ending: Ending) -> None:
        """It is gone: its connection is lost, or it said goodbye, of which the connection's end may be heard first."""
        if self._ending != "goodbye":
            self._ending = ending
            self._ended.set()

    async def wait(self) -> None:
        """Return when it is gone."""
        await self._ended.wait()

    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._ending is not None

    def terminate(self) -> None:
        """It is not this process's to end."""

    def kill(self) -> None:
        """It is not this process's to end: the client gives it up."""
        self.end("lost")

    def reap(self) -> None:
        """There is no status to take."""

    def is_gone(self, limit: float) -> bool:
        """Whether it is gone; there is nothing to wait for."""
        return self.has_ended()

    def report(self, *, rank: int, phase: Phase, reason: str | None) -> CrashReport:
        """What is known: little, if it did not say goodbye."""
        return CrashReport(
            rank=rank,
            pid=self.pid or None,
            phase=phase,
            exit_code=0 if self._ending == "goodbye" else None,
            reason=reason,
            attached=True,
        )

    def close(self) -> None:
        """There is nothing to let go of."""


class AttachLauncher:
    """Starts nothing: the engine comes by itself."""

    description: str = "an engine elsewhere"

    def start(self, bootstrap: Bootstrap) -> RemoteEngine:
        """What the engine will be once it has said HELLO."""
        return RemoteEngine()
