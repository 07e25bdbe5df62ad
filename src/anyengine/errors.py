"""The errors of anyengine, grouped by who is at fault.

Each error carries its evidence as attributes, and its message alone says what happened and what to do next. This
module imports only what imports nothing but the standard library: the engine's process uses it too.
"""

from __future__ import annotations

import dataclasses
import signal
import textwrap
from typing import Literal

from anyengine.brief import brief

Phase = Literal["launch", "hello", "load", "serve", "close"]
"""How far an engine had come: the process starts, it says HELLO, it loads its model, it serves, it is told to stop."""

_PHASES: dict[Phase, str] = {
    "launch": "while its process was starting",
    "hello": "before it said HELLO",
    "load": "while it was loading",
    "serve": "while it was serving",
    "close": "while it was closing",
}


class EngineError(Exception):
    """The base of every error that anyengine raises on its own account."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """What is known about the end of an engine; every waiter's error carries the same report.

    ``exit_code`` is None if it is not known (yet) or a signal ended the process; ``signal`` is the number of that
    signal. ``exception_type``, ``exception_message`` and ``traceback`` come from the child when Python code in it
    raised, ``native_stack`` from faulthandler when native code crashed, and ``stderr_tail`` holds the last lines that
    the child printed. ``reason`` is this side's own finding (a limit that passed, messages that were lost). An engine
    that is ``attached`` was started by somebody else: ``pid`` is then a process of its own machine, and ``exit_code`` 0
    only says that it said goodbye.
    """

    rank: int
    pid: int | None
    phase: Phase
    exit_code: int | None = None
    signal: int | None = None
    exception_type: str | None = None
    exception_message: str | None = None
    traceback: str | None = None
    native_stack: str | None = None
    stderr_tail: str = ""
    reason: str | None = None
    attached: bool = False

    @property
    def ending(self) -> str:
        """How the process ended, in a few words: ``"signal SIGKILL (9)"``, ``"exit code 3"``."""
        if self.attached:
            return "it said goodbye" if self.exit_code == 0 else "its connection was lost"
        if self.signal is not None:
            return f"signal {_signal_name(self.signal)} ({self.signal})"
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        # It has said why it ends, but has not ended yet; or somebody else has taken its exit status.
        return "exit status unknown" if self.exception_type is None else "by an exception"

    @property
    def advice(self) -> str:
        """What a person would look at next."""
        if self.attached:
            return "It was not started by this client: look at its own output, where it was started."
        if self.phase == "launch" and self.exception_type == BlockingIOError.__name__:
            return "The system has no more threads or processes for this one; its limits are above."
        if self.phase == "launch":
            return (
                "No process was started; look at the error above, which is the system's, or at the launcher's settings "
                "(ProcessLauncher)."
            )
        if self.reason is not None:
            if self.pid is None:  # in a thread
                return "The client gave this engine up for the reason above; nothing can end its thread from outside."
            return "The client ended this engine for the reason above."
        if self.traceback is not None:
            return "The engine's own traceback is above: the error was raised there, in the engine's process."
        if self.native_stack is not None:
            return "Native code crashed; the stack of every thread at that moment is above."
        if self.signal == signal.SIGKILL:
            return (
                "Something outside killed it; the usual one is the kernel's out-of-memory killer "
                "(look for 'Killed process' in dmesg, or for the container's memory limit)."
            )
        if self.signal is not None:
            return "A signal from outside ended it; look at what supervises this host."
        return "The engine's process ended on its own; its last output lines are all there is to go by."

    def describe(self) -> str:
        """The whole report as text of several lines, the finding first and the advice last."""
        what = "attached engine" if self.attached else "engine"
        who = f"{what} {self.rank} (pid {self.pid})" if self.pid is not None else f"{what} {self.rank}"
        how = "" if self.pid is None else f": {self.ending}"
        lines = [f"{who} died {_PHASES[self.phase]}{how}"]
        if self.attached:
            lines = ["no engine came" if self.pid is None else f"{who} is gone{how}"]
        if self.reason is not None:
            # What this side found comes first, and not the signal by which it ended the engine for that.
            if not self.attached:
                ended = "was given up" if self.pid is None else "was ended"
                ended = f"{ended} by the client {_PHASES[self.phase]}"
                lines = [f"{who} {'was not started' if self.phase == 'launch' else ended}"]
            lines[0] += f": {self.reason}"
        if self.exception_type is not None:
            lines.append(f"{self.exception_type}: {self.exception_message}")
        for title, text in (
            ("traceback in the engine", self.traceback),
            ("native stack", self.native_stack),
            ("last output", _without_ending(self.stderr_tail, self.traceback or "")),
        ):
            if text:
                lines.append(f"--- {title} ---\n{textwrap.indent(text.rstrip(), '  ')}")
        lines.append(self.advice)
        return "\n".join(lines)


def _without_ending(output: str, traceback: str) -> str:
    """The output without the traceback at its end, or whatever its last lines are of it: an engine prints that too."""
    printed, known = output.rstrip().splitlines(), traceback.rstrip().splitlines()
    while printed and known and printed[-1] == known[-1]:
        printed.pop()
        known.pop()
    return "\n".join(printed)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


class EngineDeadError(EngineError):
    """The engine's process is gone, or the client had to end it. ``report`` says all that is known.

    Every waiter gets an exception object of its own; all of them carry the same report.
    """

    def __init__(self, report: CrashReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return self.report.describe()


class EngineStartError(EngineDeadError):
    """The engine did not get ready: it died, was too slow, or was refused, and nothing of it is left.

    ``report.phase`` names the step that did not come.
    """


class EngineClosedError(EngineError):
    """The call came after the client's block was left, or while it was being left."""


class RequestError(EngineError):
    """One request ended for an error; the engine and every other request go on. The subclass says whose fault it was.

    The same types are raised at the call, when the client can tell, and from the request's stream, when the engine
    can. An engine may raise each of them from ``add_request``.
    """


class RequestRefusedError(RequestError, ValueError):
    """The request asks for what cannot be: a value out of its range, or something that the engine does not have."""


class RequestFailedError(RequestError):
    """The engine failed at the request, in which nothing was found to be wrong; it may go well the next time."""


class TooManyRequestsError(RequestError):
    """The client, or its engine, has as many requests as it takes, and this one was not to wait.

    ``limit`` is how many that are, where the client itself refused it.
    """

    def __init__(self, message: str, limit: int | None = None) -> None:
        super().__init__(message)
        self.limit = limit


class RequestStalledError(RequestError, TimeoutError):
    """Nothing came of a request for longer than its stall limit; it was aborted, the engine and all others go on."""


class UtilityError(EngineError):
    """A utility call failed in the engine, or was refused before it was sent; the engine goes on.

    ``exception_type`` and ``traceback`` are the engine's own, where there was an exception.
    """

    def __init__(
        self,
        method: str,
        message: str,
        *,
        rank: int | None = None,
        exception_type: str | None = None,
        traceback: str | None = None,
    ) -> None:
        super().__init__(method, message)
        self.method = method
        self.message = message
        self.rank = rank
        self.exception_type = exception_type
        self.traceback = traceback

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on engine {self.rank}"
        kind = "" if self.exception_type is None else f"{self.exception_type}: "
        text = f"utility {brief(self.method)}{where}: {kind}{self.message}"
        if self.traceback:
            text += f"\n--- traceback in the engine ---\n{textwrap.indent(self.traceback.rstrip(), '  ')}"
        return text


class AddressError(EngineError, ValueError):
    """An address is malformed, cannot be bound here, or needs keys; the message says which and what would be right."""


class KeysError(EngineError, ValueError):
    """A file of keys cannot be used; the message says why."""


class ModelError(EngineError):
    """What a model has for text is missing or cannot be used: its directory, its tokenizer, its chat template."""


class UtilityTimeoutError(UtilityError, TimeoutError):
    """The engine did not answer a utility call in the time that the call allowed; a late answer is ignored."""


class UnencodableError(EngineError, TypeError):
    """A value cannot travel: ``path`` says where it sits (``"args[0]['mask']"``), the message what it is."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class UnencodableResultError(UtilityError, TypeError):
    """A utility ran, but its result cannot travel; the message names the type and its place in the result."""


class ProtocolError(EngineError):
    """Bytes that do not follow the wire format, or a message that the other side may not send in its state."""
