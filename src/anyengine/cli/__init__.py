"""The command line: ``anyengine generate MODEL "prompt"``. It needs the extras ``cli`` and ``transformers``.

:mod:`~anyengine.cli.app` reads the arguments, :mod:`~anyengine.cli.generate` runs a request,
:mod:`~anyengine.cli.terminal` is all that a person sees.
"""

from __future__ import annotations

import os
import sys

INSTALL = "pip install 'anyengine[cli,transformers]'"
"""What to do when a package of the extras is missing."""


def main() -> None:
    """Run the command line and exit; the ``anyengine`` script is this function."""
    _open_standard_streams()
    try:
        from anyengine.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("anyengine"):
            raise
        sys.exit(f"anyengine: the command line needs the package {error.name!r}: {INSTALL}")
    app()


def _open_standard_streams() -> None:
    """Put the null device where a standard stream is closed: a socket of ours would get its number, and its output."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
