"""The command that starts an engine's process, in this process's own interpreter or in another one.

In its own interpreter the child finds what this process finds: the same anyengine, wherever it was imported from, and
behind the child's own import path what else this process has on its own.
"""

from __future__ import annotations

import contextlib
import os
import sys

# Run in the child before anything of anyengine can be imported. The first of the paths is where anyengine is. In front
# of the import path it would also hide modules of the standard library; at its end it serves the child's own children.
_BOOT = """
import os, sys
os.environ.pop({variable!r}, None)
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from runpy import run_module
home, *entries = map(os.fsdecode, {paths})
sys.path += [entry for entry in [*entries, home] if entry not in sys.path]
spec = PathFinder.find_spec("anyengine", [home])
if spec:
    package = sys.modules["anyengine"] = module_from_spec(spec)
    spec.loader.exec_module(package)
run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

_STARTED = "ANYENGINE_INTERPRETER"
"""The variable in the environment of an interpreter that is to run an engine, which is the first to take it away."""


def own_interpreter() -> str:
    """This process's interpreter.

    :raises RuntimeError: if this process has none that could be started: the message says what to give instead
    """
    problem = None
    if getattr(sys, "frozen", False) or _is_compiled():
        problem = f"this is a frozen application, and starting {sys.executable} would start the application again"
    elif not sys.executable:
        problem = "this interpreter is embedded in another program, and does not know its own path (sys.executable)"
    elif _STARTED in os.environ:  # an interpreter would have taken it away
        problem = f"{sys.executable} was started to run an engine, and ran this program: it is no Python interpreter"
    if problem is not None:
        raise RuntimeError(
            f"{problem}. Name the interpreter that is to run the engine, of an environment that has anyengine: "
            "launcher=ProcessLauncher(python='/path/to/python'); or run the engine with placement='thread'"
        )
    return sys.executable


def own_command(module: str, boot_fd: int) -> list[str]:
    """What runs ``module`` in this process's own interpreter; its own arguments follow.

    ``boot_fd`` is an inherited descriptor of a file with :func:`boot_code`.
    """
    code = f"file = open({boot_fd}); code = file.read(); file.close(); exec(code)"
    return [own_interpreter(), *_own_flags(), "-P", "-c", code, module]


def foreign_command(python: str, module: str) -> list[str]:
    """What runs ``module`` in another interpreter, with what that one finds; its own arguments follow."""
    return [python, "-P", "-m", module]


def boot_code() -> bytes:
    """What a child runs first to find what this process finds: its anyengine, and its import path."""
    entries = [os.path.dirname(sys.modules["anyengine"].__path__[0])]
    entries += [entry for entry in sys.path if isinstance(entry, str)]
    encoded: list[bytes] = []
    for entry in entries:
        with contextlib.suppress(UnicodeEncodeError):  # no file can have such a name
            encoded.append(os.fsencode(entry))
    return _BOOT.format(paths=encoded, variable=_STARTED).encode()


def environment_for_child(*, own: bool) -> dict[str, str]:
    """This process's environment, without what a frozen application has in it for itself alone.

    :param own: whether the child is to be this process's own interpreter
    """
    environment = dict(os.environ)
    if own:
        environment[_STARTED] = "1"
    if getattr(sys, "frozen", False):
        # PyInstaller's libraries are not those of another interpreter; what was there before, it keeps under this name.
        environment.pop("LD_LIBRARY_PATH", None)
        if (original := environment.get("LD_LIBRARY_PATH_ORIG")) is not None:
            environment["LD_LIBRARY_PATH"] = original
    return environment


def _own_flags() -> list[str]:
    """This interpreter's options that say how Python is to run; ``-W`` is not among them, it is about one program."""
    flags = sys.flags
    options = [
        ("-I", flags.isolated),
        ("-E", flags.ignore_environment and not flags.isolated),
        ("-s", flags.no_user_site and not flags.isolated),
        ("-S", flags.no_site),
        ("-B", sys.dont_write_bytecode),
        ("-O", flags.optimize == 1),
        ("-OO", flags.optimize > 1),
    ]
    chosen = [option for option, is_set in options if is_set]
    for name, value in sys._xoptions.items():  # pyright: ignore[reportPrivateUsage] - documented, though
        chosen += ["-X", name if value is True else f"{name}={value}"]
    return chosen


def _is_compiled() -> bool:
    """Whether Nuitka has made a program of its own of this; it does not set ``sys.frozen``."""
    compiled = globals().get("__compiled__")
    return compiled is not None and getattr(compiled, "standalone", True)
