"""How a value is shown in an error: by its beginning, however large it is and whatever its own repr does.

Imports only the standard library, since both processes use it.
"""

from __future__ import annotations

import dataclasses
import itertools
import reprlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

from anyengine.excerpts import text_of, type_name

_LIMIT = 200
"""Characters: a path is seen whole, as a rule."""


def brief(value: Any) -> str:
    """The repr of ``value``, or its beginning and ``...``; some 200 characters at most.

    The whole is never made of what is large: a prompt may have a million items, and lists that hold each other over and
    over would take for ever.
    """
    return _cut(text_of(lambda: _REPR.repr(value), lambda error: f"(its repr raises {type_name(error)})"))


def _cut(text: str) -> str:
    return text if len(text) <= _LIMIT + 10 else f"{text[:_LIMIT]}..."


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2

    def repr_str(self, x: str | bytes, level: int) -> str:
        return repr(x) if len(x) <= _LIMIT else f"{x[:_LIMIT]!r}..."

    repr_bytes = repr_str

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        shown = (f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in self._first(x))
        return self._between("{", shown, "}", x, level)

    def repr_set(self, x: set[Any] | frozenset[Any], level: int) -> str:
        shown = (self.repr1(item, level - 1) for item in self._first(x))
        return self._between("{", shown, "}", x, level) if x else "set()"

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        return f"frozenset({self.repr_set(x, level)})" if x else "frozenset()"

    def _first(self, items: Collection[Any]) -> Iterator[Any]:
        # As they come: reprlib would sort all of them.
        return itertools.islice(items, self.maxdict)

    def _between(self, left: str, shown: Iterable[str], right: str, whole: Collection[Any], level: int) -> str:
        if whole and level <= 0:
            return f"{left}...{right}"
        more = ", ..." if len(whole) > self.maxdict else ""
        return f"{left}{', '.join(shown)}{more}{right}"

    def repr_instance(self, x: Any, level: int) -> str:
        kind = cast("type[object]", type(x))
        if hasattr(kind, "shape") and hasattr(kind, "dtype"):
            return f"{kind.__name__}(shape={tuple(x.shape)}, dtype={x.dtype})" if x.shape else repr(x)
        if not isinstance(x, type) and (issubclass(kind, Collection) or dataclasses.is_dataclass(kind)):
            return f"{kind.__name__}(...)"
        return repr(x)


_REPR = _Repr()
