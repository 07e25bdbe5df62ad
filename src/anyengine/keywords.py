"""Keyword arguments that nobody knows: refused with the name that was probably meant.

Imports only the standard library, since both processes use it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

_Class = TypeVar("_Class")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'model'?"`` if one of the known names is like this one, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain_unknown(elsewhere: Mapping[str, str]) -> Callable[[type[_Class]], type[_Class]]:
    """A decorator for classes: an unknown keyword argument is refused by name, with what to write in its place.

    :param elsewhere: for names that people bring from other libraries, what to do here
    """

    def decorate(decorated: type[_Class]) -> type[_Class]:
        init = decorated.__init__
        known = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def explaining_init(self: _Class, *args: Any, **given: Any) -> None:
            try:  # and look at names only when it has failed: most calls are right, and some are on hot paths
                init(self, *args, **given)
            except TypeError:
                unknown = next((name for name in given if name not in known), None)
                if unknown is None:
                    raise
                help_ = f": {elsewhere[unknown]}" if unknown in elsewhere else did_you_mean(unknown, known)
                fields = "" if help_ else f"; it has {', '.join(known)}"
                raise TypeError(f"{decorated.__name__} has no {unknown!r}{help_}{fields}") from None

        decorated.__init__ = explaining_init
        return decorated

    return decorate
