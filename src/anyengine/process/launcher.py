"""Starting the engine's process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping

from anyengine.brief import brief
from anyengine.process.engine_process import EngineProcess
from anyengine.process.interpreter import (
    boot_code,
    environment_for_child,
    foreign_command,
    own_command,
    own_interpreter,
)
from anyengine.process.lane import Lane, open_lane
from anyengine.process.lifelines import close_lifeline, open_lifeline
from anyengine.process.output import AnonymousFile, ChildOutput, inheritable
from anyengine.process.remains import mark_for_child
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.thread_limits import none_left


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLauncher:
    """How an engine's process is started: ``python -m module`` with additions to this process's environment.

    Without ``python`` it is this process's own interpreter, with its options (``-I``, ``-E``, ``-s``, ``-S``, ``-B``,
    ``-O`` and ``-X``; not ``-W``). The child then has the anyengine that this process has, and looks for other modules
    where this process does, after its own places. Name another interpreter to run the engine in an environment of its
    own; that one needs anyengine too. In either the directory of the program does not come first (``-P``).

    :raises TypeError: if a field is not a string, or the environment not a mapping of strings
    :raises ValueError: if a string is one that the system cannot take, or the name of a variable is malformed
    :raises RuntimeError: if this process's own interpreter is asked for and cannot be started, because the application
        is frozen or Python is embedded in another program
    """

    python: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    module: str = "anyengine.engine"

    def __post_init__(self) -> None:
        for name in ("python", "module"):
            value = getattr(self, name)
            if name == "python" and value is None:
                continue
            if not isinstance(value, str) or not value:
                raise TypeError(f"ProcessLauncher.{name}={brief(value)} ({type(value).__name__}): expected a string")
            _check_passable(f"ProcessLauncher.{name}", value)
        if not isinstance(self.environment, Mapping):
            raise TypeError(f"ProcessLauncher.environment={brief(self.environment)}: expected a mapping of strings")
        for name, value in self.environment.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"ProcessLauncher.environment has {brief(name)}: {brief(value)}; expected strings")
            if not name or "=" in name:
                raise ValueError(f"ProcessLauncher.environment has the name {brief(name)}, which no variable can have")
            _check_passable("ProcessLauncher.environment", name)
            _check_passable(f"ProcessLauncher.environment[{brief(name)}]", value)
        if self._is_own:
            own_interpreter()

    @property
    def _is_own(self) -> bool:
        return self.python is None or self.python == sys.executable

    @property
    def description(self) -> str:
        """What is started; the system's own error names the interpreter if that is to blame."""
        return "the engine's process"

    def start(self, bootstrap: Bootstrap) -> EngineProcess:
        """Start the process and hand it ``bootstrap``; blocking, for some milliseconds.

        :raises OSError: if it cannot be started
        """
        # ``kept`` is undone if anything fails, ``passed`` in any case: the child has descriptors of its own then.
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as passed:
            child_end, parent_end = open_lifeline()
            passed.callback(os.close, child_end)
            kept.callback(close_lifeline, parent_end)
            lane, lane_end = _open_lane(bootstrap, passed)
            if lane is not None:
                kept.callback(lane.close)
            handover = AnonymousFile("anyengine-bootstrap")
            passed.callback(handover.close)
            handover.write(bootstrap._replace(lane=lane_end).encode())
            exception = AnonymousFile("anyengine-exception")
            kept.callback(exception.close)
            native = AnonymousFile("anyengine-native")
            kept.callback(native.close)
            output = ChildOutput()
            kept.callback(output.close)
            arguments = [inheritable(fd, passed) for fd in (child_end, handover.fd, exception.fd, native.fd)]
            inherited = [*arguments] if lane_end is None else [*arguments, lane_end]
            if self._is_own:
                boot = AnonymousFile("anyengine-boot")
                passed.callback(boot.close)
                boot.write(boot_code())
                inherited.append(inheritable(boot.fd, passed))
                command = own_command(self.module, inherited[-1])
            else:
                command = foreign_command(self.python or sys.executable, self.module)
            printed = output.open_for_append(passed)
            mark = secrets.token_hex(8)
            try:
                child = subprocess.Popen(
                    [*command, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    env={**environment_for_child(own=self._is_own), **self.environment, **mark_for_child(mark)},
                    pass_fds=inherited,
                    # A session and group of its own: Ctrl-C in the terminal reaches the parent alone, which decides
                    # what happens in which order, and all that the engine starts can be ended together.
                    start_new_session=True,
                )
            except BlockingIOError as error:
                raise none_left("a process for the engine") from error
            kept.callback(child.wait)
            kept.callback(child.kill)
            process = EngineProcess(child, parent_end, exception, native, output, lane, mark)
            kept.pop_all()
        return process


def _open_lane(bootstrap: Bootstrap, passed: contextlib.ExitStack) -> tuple[Lane | None, int | None]:
    """A lane and the descriptor of its other end, if the engine can have one: without, large buffers are frames."""
    if sys.platform != "linux" or not bootstrap.address.startswith("ipc:"):
        return None, None
    lane, end = open_lane()
    if end is None:
        return None, None
    passed.enter_context(end)
    return lane, inheritable(end.fileno(), passed)


def _check_passable(what: str, value: str) -> None:
    """:raises ValueError: if no argument or variable of a process can be ``value``"""
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise ValueError(f"{what}={brief(value)}: {value[:100]!r} cannot be encoded for the system") from None
    if "\0" in value:
        raise ValueError(f"{what}={brief(value)}: a NUL character ends a string of the system")
