"""The command line. ``anyengine engine`` and ``anyengine keys`` run with the client's own dependencies;
``anyengine generate`` needs the extras ``cli`` and ``transformers``.

:mod:`~anyengine.cli.plain` has the commands without extras. :mod:`~anyengine.cli.app` reads the arguments of the
others, :mod:`~anyengine.cli.generate` runs a request, :mod:`~anyengine.cli.terminal` is all that a person sees.
"""

from __future__ import annotations

import os
import sys

INSTALL = "pip install '.[cli,transformers]' in the checkout of anyengine"
"""What to do when a package of the extras is missing."""


def main() -> None:
    """Run the command line and exit; the ``anyengine`` script is this function."""
    _open_standard_streams()
    words = sys.argv[1:]
    try:
        from anyengine.cli import plain

        if words and words[0] in plain.COMMANDS:
            sys.exit(plain.COMMANDS[words[0]].run(words[1:]))
        if words == ["--version"]:
            sys.stdout.write(f"{plain.version()}\n")
            sys.exit(0)
        try:
            from anyengine.cli.app import app
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("anyengine"):
                raise
            problem = f"anyengine generate needs the package {error.name!r}: {INSTALL}"
            if words in ([], ["--help"], ["-h"]):
                sys.stdout.write(f"{plain.usage(problem)}\n")
                sys.exit(0 if words else 2)
            sys.exit(problem if words[0] == "generate" else plain.usage(problem))
    except KeyboardInterrupt:
        sys.exit(130)
    app()


def _open_standard_streams() -> None:
    """Put the null device where a standard stream is closed: a socket of ours would get its number, and its output."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
