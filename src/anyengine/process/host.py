"""What an engine runs in, as its supervisor sees it, whether that is a child process or a thread."""

from __future__ import annotations

from typing import Protocol

from anyengine.errors import CrashReport, Phase
from anyengine.process.lane import Lane
from anyengine.protocol.bootstrap import Bootstrap


class HostOutput(Protocol):
    """What the engine prints, where that does not reach this process's terminal by itself."""

    def unread(self) -> int:
        """How many bytes of it nobody has read."""
        ...

    def read_new(self) -> str:
        """What was printed since the last call, or the first part of it; from any thread."""
        ...

    def drop(self, keep: int) -> int:
        """Forget what is unread but for the newest ``keep`` bytes; the number of bytes forgotten; from any thread."""
        ...


class EngineHost(Protocol):
    """One life of one engine: known to have ended when it has, ended if that can be done, and explained afterwards."""

    @property
    def pid(self) -> int:
        """The process that the engine is in."""
        ...

    @property
    def output(self) -> HostOutput | None:
        """What it prints; None if this process prints it anyway."""
        ...

    @property
    def lane(self) -> Lane | None:
        """The way for large buffers; None where they are frames like all others."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether the engine reads a message in the client's own memory, for as long as it keeps it."""
        ...

    @property
    def can_be_killed(self) -> bool:
        """Whether :meth:`kill` ends it for certain."""
        ...

    @property
    def outlives_close(self) -> bool:
        """Whether it goes on in this process, for nobody's use, until it comes to its end by itself."""
        ...

    @property
    def sends_at_once(self) -> bool:
        """Whether what the engine sent has arrived when the engine has ended."""
        ...

    async def wait(self) -> None:
        """Return when the engine has ended."""
        ...

    def has_ended(self) -> bool:
        """Whether it has."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it, and all that it started."""
        ...

    def reap(self) -> None:
        """Take in how it ended, after :meth:`wait` or :meth:`kill`."""
        ...

    def is_gone(self, limit: float) -> bool:
        """Wait up to ``limit`` seconds for all of it to be gone; blocking, for a worker thread."""
        ...

    def report(self, *, rank: int, phase: Phase, reason: str | None) -> CrashReport:
        """What is known about its end."""
        ...

    def close(self) -> None:
        """Let go of all descriptors."""
        ...


class Launcher(Protocol):
    """Starts engines in one kind of host."""

    @property
    def description(self) -> str:
        """What is started, for a message that says that it could not be."""
        ...

    def start(self, bootstrap: Bootstrap) -> EngineHost:
        """Start one and hand it ``bootstrap``; blocking, for some milliseconds.

        :raises OSError: if the system refuses it
        """
        ...
