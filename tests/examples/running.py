"""How examples are run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.cli.programs import Sandbox


def run(
    sandbox: Sandbox, name: str, *, backends: Sequence[str] = ("asyncio", "trio"), engine: str = "scripted"
) -> list[str]:
    """The stdout of an example on each backend; it must succeed, and its stderr must be empty.

    It runs on all of them at once, for most of that time is waiting.
    """
    commands = [[sys.executable, f"examples/{name}.py", "--backend", each, "--engine", engine] for each in backends]
    started = [sandbox.start(command) for command in commands]
    shown: list[str] = []
    for process in started:
        stdout, stderr = process.communicate(timeout=100)
        assert process.returncode == 0, stderr
        if name != "crash":
            assert stderr == ""
        shown.append(stdout)
    return shown
