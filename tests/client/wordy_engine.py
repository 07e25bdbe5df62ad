"""An engine whose errors have more text than anybody wants, or whose text makes trouble."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from anyengine.engine import EngineRequest, ProgressReporter, StepOutputs, utility
from anyengine.engines.scripted import ScriptedEngine

LONG = 10_000_000


class TroublingError(Exception):
    """Its text is what ``make`` returns or raises."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make

    def __str__(self) -> str:
        return self.make()

    __repr__ = __str__


class PoisonedNotes(Exception):
    """What it has been told besides cannot be read."""

    @property
    def __notes__(self) -> Any:
        raise SystemExit("notes")


class Text(str):
    """A string that ends the process when it is looked at."""

    __slots__ = ()

    def __len__(self) -> int:
        raise SystemExit("len")

    def __format__(self, spec: str) -> str:
        raise SystemExit("format")

    def encode(self, *args: Any, **kwargs: Any) -> bytes:
        raise SystemExit("encode")


class _Named(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise SystemExit("name")


class OddlyNamed(Exception, metaclass=_Named):
    """Asking its type for its name raises."""


def _raising(error: BaseException) -> Callable[[], Any]:
    def make() -> Any:
        raise error

    return make


def _recursion() -> BaseException:
    def down(number: int) -> None:
        up(number + 1)

    def up(number: int) -> None:
        down(number + 1)

    try:
        down(0)
    except RecursionError as error:
        return error
    raise AssertionError


def _cycle() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def _chain() -> BaseException:
    error = ValueError("innermost")
    for number in range(2000):
        outer = ValueError(f"{number} " + "x" * 100)
        outer.__cause__ = error
        error = outer
    return error


def _noted() -> BaseException:
    error = ValueError("noted")
    for _ in range(1000):
        error.add_note("n" * 10_000)
    return error


ERRORS: Mapping[str, Callable[[], BaseException]] = {
    "long": lambda: ValueError("x" * LONG),
    "long and not UTF-8": lambda: ValueError("\udcff" * LONG),
    "many lines": lambda: ValueError("line\n" * (LONG // 5)),
    "group": lambda: ExceptionGroup("many", [ValueError("y" * 1000) for _ in range(5000)]),
    "recursion": _recursion,
    "chain": _chain,
    "cycle": _cycle,
    "notes": _noted,
    "poisoned notes": lambda: PoisonedNotes("what was wrong"),
    "long name": lambda: type("N" * LONG, (Exception,), {})("what was wrong"),
    "odd name": lambda: OddlyNamed("what was wrong"),
    "exit": lambda: TroublingError(_raising(SystemExit("out"))),
    "interrupt": lambda: TroublingError(_raising(KeyboardInterrupt())),
    "generator exit": lambda: TroublingError(_raising(GeneratorExit())),
    "recursing text": lambda: TroublingError(_raising(RecursionError("deep"))),
    "no text": lambda: TroublingError(lambda: 7),
    "odd text": lambda: TroublingError(lambda: Text("what was wrong")),
}


class WordyEngine(ScriptedEngine):
    """A scripted engine that raises one of ERRORS, where it is told to."""

    def __init__(self, load: str | None = None) -> None:
        super().__init__()
        self._load = load
        self._in_add: str | None = None
        self._in_step: str | None = None

    def load(self, progress: ProgressReporter) -> None:
        progress("s" * LONG)
        if self._load is not None:
            sys.stderr.write("e" * LONG)
            raise ERRORS[self._load]()
        super().load(progress)

    def add_request(self, request: EngineRequest) -> None:
        if self._in_add is not None:
            raise ERRORS[self._in_add]()
        super().add_request(request)

    def step(self) -> StepOutputs | None:
        if self._in_step is not None:
            raise ERRORS[self._in_step]()
        return super().step()

    @utility
    def fail(self, name: str) -> None:
        """Raise one of ERRORS in this call."""
        raise ERRORS[name]()

    @utility
    def fail_in(self, where: str, name: str | None) -> None:
        """Raise one of ERRORS in each ``"add"`` or ``"step"`` from now on."""
        setattr(self, f"_in_{where}", name)

    @utility
    def odd_value(self) -> Any:
        """A value that cannot travel, of which looking at it raises SystemExit."""
        return [TroublingError(_raising(SystemExit("out"))), _OddMapping()]


class _OddMapping(dict[str, Any]):
    def items(self) -> Any:
        raise SystemExit("items")
