"""Starting the engine's process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping

from anyengine.brief import brief
from anyengine.process.engine_process import EngineProcess
from anyengine.process.lane import Lane, open_lane
from anyengine.process.lifelines import close_lifeline, open_lifeline
from anyengine.process.output import AnonymousFile, ChildOutput
from anyengine.protocol.bootstrap import Bootstrap


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLauncher:
    """How an engine's process is started: ``python -m module`` with additions to this process's environment.

    Name another interpreter to run the engine in an environment of its own; it needs anyengine too. With this
    process's own interpreter the child also looks for modules where this process does.

    :raises TypeError: if a field is not a string, or the environment not a mapping of strings
    """

    python: str = sys.executable
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    module: str = "anyengine.engine"

    def __post_init__(self) -> None:
        for name in ("python", "module"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise TypeError(f"ProcessLauncher.{name}={brief(value)} ({type(value).__name__}): expected a string")
        if not isinstance(self.environment, Mapping):
            raise TypeError(f"ProcessLauncher.environment={brief(self.environment)}: expected a mapping of strings")
        for name, value in self.environment.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"ProcessLauncher.environment has {name!r}: {value!r}; expected strings")

    @property
    def description(self) -> str:
        """The interpreter."""
        return self.python

    def start(self, bootstrap: Bootstrap) -> EngineProcess:
        """Start the process and hand it ``bootstrap``; blocking, for some milliseconds.

        :raises OSError: if it cannot be started
        """
        import_path = [entry for entry in sys.path if isinstance(entry, str)] if self.python == sys.executable else []
        # ``kept`` is undone if anything fails, ``passed`` in any case: the child has descriptors of its own then.
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as passed:
            lifeline, parent_end = open_lifeline()
            passed.callback(os.close, lifeline)
            kept.callback(close_lifeline, parent_end)
            lane: Lane | None = None
            if sys.platform == "linux" and bootstrap.address.startswith("ipc:"):
                lane, lane_end = open_lane()
                kept.callback(lane.close)
                passed.enter_context(lane_end)
                bootstrap = bootstrap._replace(lane=lane_end.fileno())
            handover = AnonymousFile("anyengine-bootstrap")
            passed.callback(handover.close)
            os.write(handover.open_for_append(passed), bootstrap._replace(import_path=import_path).encode())
            exception = AnonymousFile("anyengine-exception")
            kept.callback(exception.close)
            native = AnonymousFile("anyengine-native")
            kept.callback(native.close)
            output = ChildOutput()
            kept.callback(output.close)
            inherited = (
                lifeline, handover.fd, exception.open_for_append(passed), native.open_for_append(passed)
            )  # fmt: skip
            printed = output.open_for_append(passed)
            child = subprocess.Popen(
                [self.python, "-P", "-m", self.module, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env={**os.environ, **self.environment},
                pass_fds=inherited if bootstrap.lane is None else (*inherited, bootstrap.lane),
                # A session and group of its own: Ctrl-C in the terminal reaches the parent alone, which decides what
                # happens in which order, and all that the engine starts can be ended together.
                start_new_session=True,
            )
            kept.callback(child.wait)
            kept.callback(child.kill)
            process = EngineProcess(child, parent_end, exception, native, output, lane)
            kept.pop_all()
        return process
