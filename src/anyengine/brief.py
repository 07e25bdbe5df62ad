"""How a value is shown in an error: by its beginning, however large it is and whatever its own repr does.

Imports only the standard library, since both processes use it.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Collection
from typing import Any, cast

_LIMIT = 200
"""Characters: a path is seen whole, as a rule."""


def brief(value: Any) -> str:
    """The repr of ``value``, or its beginning and ``...``; some 200 characters at most.

    The whole is never made of what is large: a prompt may have a million items, and lists that hold each other over and
    over would take for ever.
    """
    try:
        return _cut(_REPR.repr(value))
    except Exception as error:
        return f"(its repr raises {type(error).__name__})"


def _cut(text: str) -> str:
    return text if len(text) <= _LIMIT + 10 else f"{text[:_LIMIT]}..."


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2

    def repr_str(self, x: str | bytes, level: int) -> str:
        return repr(x) if len(x) <= _LIMIT else f"{x[:_LIMIT]!r}..."

    repr_bytes = repr_str

    def repr_instance(self, x: Any, level: int) -> str:
        kind = cast("type[object]", type(x))
        if not isinstance(x, type) and (issubclass(kind, Collection) or dataclasses.is_dataclass(kind)):
            return f"{kind.__name__}(...)"
        return repr(x)


_REPR = _Repr()
