"""The commands that run with the client's own dependencies: an engine's container has neither Typer nor Rich."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from anyengine.errors import KeysError
from anyengine.keys import ConnectionKeys


class PlainCommand(NamedTuple):
    """A command: ``run`` takes the words after its name and returns the exit code; ``summary`` is for the help."""

    run: Callable[[Sequence[str]], int]
    summary: str


def version() -> str:
    """The line that ``anyengine --version`` prints."""
    return f"anyengine {importlib.metadata.version('anyengine')}"


def usage(problem: str) -> str:
    """The help of a command line without Typer: the commands that work, and why the others do not (``problem``)."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: anyengine COMMAND ...", "", *lines, "", problem])


def _engine(words: Sequence[str]) -> int:
    # In place of this process, so that the engine's loads nothing of the client, and whoever started it holds its pid.
    os.execv(sys.executable, [sys.executable, "-m", "anyengine.engine.attach", *(words or ["--help"])])  # noqa: S606


def _keys(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="anyengine keys",
        description="Make the keys by which a client and engines started by hand recognize each other.",
        epilog="Copy the file to the engine's machine as you would copy a private key, and give it to both sides.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="where to write them; there must be no such file yet")
    file = parser.parse_args(words).file
    try:
        ConnectionKeys.generate().save(file)
    except KeysError as error:
        sys.stderr.write(f"anyengine: {error}\n")
        return 1
    sys.stdout.write(f"{file} is written; both sides need it, and nobody else may have it\n")
    return 0


COMMANDS: Mapping[str, PlainCommand] = {
    "engine": PlainCommand(_engine, "Run an engine that clients attach to."),
    "keys": PlainCommand(_keys, "Make the keys by which a client and engines started by hand recognize each other."),
}
"""The commands by name."""
