"""Text that others made and errors hold: its beginning and its end, however long it is and whatever makes it.

Imports only the standard library, since both processes use it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

NAME_LIMIT = 200
MESSAGE_LIMIT = 2_000
TRACE_LIMIT = 20_000
"""Characters of the name of a type, of a message, and of a traceback or stack that an error holds."""

_LINE_LIMIT = 1_000


def excerpt(text: str, limit: int) -> str:
    """``text`` if it has at most ``limit`` characters, else its beginning, how much is missing, and its end."""
    if len(text) <= limit:
        return text
    kept = limit - 60  # beside what says how much is missing
    missing = f" ... ({len(text) - kept:,} characters are left out here) ... "
    return text[: kept - kept // 2] + missing + text[-(kept // 2) :]


def trace_excerpt(text: str) -> str:
    """The same for a traceback or a stack: first of each line, then of the whole."""
    if len(text) <= TRACE_LIMIT:
        return text
    return excerpt("\n".join(excerpt(line, _LINE_LIMIT) for line in text.split("\n")), TRACE_LIMIT)


def type_name(value: object) -> str:
    """The name of the type of ``value``, as the type itself has it: a metaclass may have a ``__name__`` of its own."""
    return type.__dict__["__name__"].__get__(type(value))


def text_of(make: Callable[[], str], otherwise: Callable[[BaseException], str]) -> str:
    """What ``make`` returns, which calls code that is not ours; ``otherwise`` of what it raises, ``SystemExit`` too.

    :raises KeyboardInterrupt: if Ctrl-C may have been pressed meanwhile
    """
    try:
        return str.__str__(make())  # a subclass of str may do anything
    except KeyboardInterrupt as error:
        # Where no signal becomes one (another thread than the first, an engine's process), it is that code's own.
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            raise
        return otherwise(error)
    except BaseException as error:
        return otherwise(error)
