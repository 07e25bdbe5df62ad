"""Starting the engine's process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping

from anyengine.process.engine_process import EngineProcess
from anyengine.process.output import AnonymousFile, ChildOutput
from anyengine.protocol.bootstrap import Bootstrap


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLauncher:
    """How an engine's process is started: ``python -m module`` with additions to this process's environment.

    Name another interpreter to run the engine in an environment of its own; it needs anyengine too. With this
    process's own interpreter the child also looks for modules where this process does.
    """

    python: str = sys.executable
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    module: str = "anyengine.engine"

    def start(self, bootstrap: Bootstrap) -> EngineProcess:
        """Start the process and hand it ``bootstrap``; blocking, for some milliseconds.

        :raises OSError: if it cannot be started
        """
        record = bootstrap._replace(import_path=list(sys.path) if self.python == sys.executable else []).encode()
        lifeline, lifeline_end = os.pipe()
        files = [AnonymousFile("anyengine-exception"), AnonymousFile("anyengine-native")]
        output = ChildOutput()
        child_ends: list[int] = [lifeline]
        try:
            child_ends += [file.open_for_append() for file in files]
            passed = tuple(child_ends)
            child_ends.append(output.open_for_append())
            os.write(lifeline_end, record)
            child = subprocess.Popen(
                [self.python, "-P", "-m", self.module, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=child_ends[-1],
                stderr=child_ends[-1],
                env={**os.environ, **self.environment},
                pass_fds=passed,
                # A session and group of its own: Ctrl-C in the terminal reaches the parent alone, which decides what
                # happens in which order, and all that the engine starts can be ended together.
                start_new_session=True,
            )
        except BaseException:
            os.close(lifeline_end)
            for file in (*files, output):
                file.close()
            raise
        finally:
            for fd in child_ends:
                os.close(fd)
        _open_lifelines.add(process := EngineProcess(child, lifeline_end, files[0], files[1], output))
        return process


_open_lifelines: weakref.WeakSet[EngineProcess] = weakref.WeakSet()


def _close_inherited_lifelines() -> None:
    # A process forked from this one (multiprocessing, say) must not keep engines alive that this one owns.
    for process in _open_lifelines:
        process.release_lifeline()


os.register_at_fork(after_in_child=_close_inherited_lifelines)
