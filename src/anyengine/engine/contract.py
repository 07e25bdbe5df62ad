"""What an engine owes its caller, checked where it is called: an error names the class, the method and what it did."""

from __future__ import annotations

import inspect
import os
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

from anyengine.brief import brief
from anyengine.engine.core import (
    EngineCore,
    OutputDetails,
    ProgressReporter,
    StepOutputs,
    from_rows,
    kind_of_function,
)
from anyengine.errors import UnencodableError
from anyengine.notices import warn
from anyengine.protocol.handshake import Ready
from anyengine.protocol.outputs import FINISH_REASONS, encode_details
from anyengine.types import U32_MAX, U64_MAX, EngineInfo

UNSOUND = (UnencodableError, TypeError, ValueError, OverflowError, AttributeError)
"""What encoding a step raises if something in it is not what it should be."""

_FINISH_REASONS_OR_NONE = (None, *FINISH_REASONS)


class EngineContractError(TypeError):
    """A method of an engine is not what :class:`EngineCore` says, or did not return what it should."""


def check_methods(engine: type[EngineCore]) -> None:
    """Check what can be seen of a class before it is used.

    :raises EngineContractError: if a method is asynchronous or a generator, or takes other arguments
    """
    for name, original in vars(EngineCore).items():
        if name.startswith("_") or not inspect.isfunction(original):
            continue
        method = getattr(engine, name)
        where = f"{engine.__name__}.{name}"
        if not callable(method):
            raise EngineContractError(f"{where} is {brief(method)}: expected a method")
        match kind_of_function(method):
            case "async":
                raise EngineContractError(f"{where} is an async function: an engine has no event loop; write def")
            case "generator":
                raise EngineContractError(f"{where} is a generator function: return the value in place of yield")
            case None:
                pass
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):  # native code that says nothing of its parameters
            continue
        own = inspect.signature(original)
        given = list(own.parameters)
        found: object = inspect.getattr_static(engine, name)
        if isinstance(found, staticmethod | classmethod) or not hasattr(type(found), "__get__"):
            given.remove("self")  # Python does not pass it on to these
        try:
            signature.bind(*given)
        except TypeError:
            raise EngineContractError(
                f"{where}{signature} cannot be called as {name}{own}, which EngineCore has"
            ) from None


def load(core: EngineCore, progress: ProgressReporter) -> None:
    """Load an engine.

    :raises EngineContractError: if that gave something to await
    :raises Exception: what it raised
    """
    returned = cast("object", core.load(progress))
    if inspect.isawaitable(returned):
        _discard(returned)
        raise _returned(core, "load", returned, "None, when everything is loaded")


def check_loaded(core: EngineCore) -> None:
    """Ask a loaded engine once for what is asked of it before each step.

    :raises EngineContractError: if the answer is not what it should be
    """
    if type(busy := cast("object", core.has_work())) is not bool:
        raise _returned(core, "has_work", busy, "a bool")


def statistics(core: EngineCore) -> Mapping[str, float]:
    """An engine's figures; none, with a warning, if they are no mapping: an engine does not end for them."""
    figures = core.statistics()
    if isinstance(figures, Mapping):
        return figures
    _discard(figures)
    warn("%s", _returned(core, "statistics", figures, "a mapping from names to numbers"))
    return {}


def describe(core: EngineCore) -> EngineInfo:
    """What an engine says of itself.

    :raises EngineContractError: if that is no EngineInfo, or one with fields of the wrong types
    """
    info = cast("object", core.describe())
    if not isinstance(info, EngineInfo):
        raise _returned(core, "describe", info, "an EngineInfo")
    try:
        Ready(info).encode()
    except UnencodableError as error:
        raise EngineContractError(f"{_name(core)}.describe() returned an EngineInfo of which {error}") from None
    return info


def unavailable_utilities(core: EngineCore) -> AbstractSet[str]:
    """The utilities that an engine says it cannot serve.

    :raises EngineContractError: if that is no set of strings
    """
    names = cast("AbstractSet[object]", core.unavailable_utilities())
    if not isinstance(names, AbstractSet) or not all(isinstance(name, str) for name in names):
        raise _returned(core, "unavailable_utilities", names, "a set of names")
    return cast("AbstractSet[str]", names)


def failure_fd(core: EngineCore) -> int | None:
    """The descriptor that tells of an engine's failure, if it has one.

    :raises EngineContractError: if that is no open descriptor
    """
    fd = cast("object", core.failure_fd())
    if fd is None:
        return None
    if type(fd) is not int:
        raise _returned(core, "failure_fd", fd, "an open descriptor's number, or None")
    try:
        os.fstat(fd)
    except OSError:
        raise _returned(core, "failure_fd", fd, "an open descriptor's number, or None") from None
    return fd


def check_step(core: EngineCore, outputs: object) -> None:
    """:raises EngineContractError: if what step() returned is no StepOutputs"""
    if not isinstance(outputs, StepOutputs):
        _discard(outputs)
        raise _returned(core, "step", outputs, "StepOutputs, which from_rows() makes, or None")


def _same(handle: int) -> int:
    return handle


def sound(core: EngineCore, outputs: StepOutputs, handle_of: Callable[[int], int] = _same) -> StepOutputs:
    """A step of which something cannot travel, without it: the requests that it concerns are aborted, and fail.

    :param handle_of: the engine's own handle for one of ``outputs``
    :raises EngineContractError: if it cannot be told which requests these are
    """
    rows: list[tuple[int, Sequence[int], OutputDetails | None]] = []
    problems: dict[int, str] = {}
    try:
        for handle, tokens, details in outputs.rows():
            number = _integer(handle, U64_MAX)
            if number is None:
                raise _returned(core, "step", handle, "as a row's handle that of a request")
            if (problem := _problem_of(tokens, details)) is not None:
                problems.setdefault(number, problem)
            rows.append((number, tokens, details))
    except UNSOUND as error:
        if isinstance(error, EngineContractError):
            raise
        raise EngineContractError(
            f"{_name(core)}.step() returned columns that cannot be read: {brief(error)}"
        ) from error
    # A request may have several rows in a step, but not where one ends.
    if any(getattr(details, "finish_reason", None) is not None for _, _, details in rows):
        for number, count in Counter(number for number, _, _ in rows).items():
            if count > 1:
                problems.setdefault(number, "two rows of one request")
    if problems:
        core.abort_requests(list(map(handle_of, problems)))
    failures = [
        (number, (), failed(f"{_name(core)}.step() returned {problem}")) for number, problem in problems.items()
    ]
    return from_rows([*(row for row in rows if row[0] not in problems), *failures])


def failed(problem: str) -> OutputDetails:
    """The last row's details of a request at which an engine failed."""
    return OutputDetails(finish_reason="error", error=problem, error_kind="failed")


def forgotten(core: EngineCore) -> OutputDetails:
    """The last row's details of a request for which an engine has no work, and which has not ended."""
    return failed(
        f"{_name(core)} forgot this request: its has_work() is false, but no step() returned the request's last row, "
        "which has a finish reason"
    )


def is_sound(outputs: StepOutputs) -> bool:
    """Whether a step could travel, looking at no values of columns that hold nothing else."""
    try:
        _check_column("I", outputs.token_ids)
        if outputs.counts is not None:
            _check_column("I", outputs.counts)
        outputs.handle_bytes()
        outputs.check_endings()
    except UNSOUND:
        return False
    return all(
        isinstance(cast("object", more), OutputDetails) and more.finish_reason in _FINISH_REASONS_OR_NONE
        for more in outputs.details.values()
    )


def _check_column(typecode: str, column: Sequence[int]) -> None:
    if getattr(column, "typecode", None) != typecode:
        array(typecode, column)


def _problem_of(tokens: Sequence[int], details: object) -> str | None:
    """What is wrong with a row, if something is."""
    for token in tokens:
        if _integer(token, U32_MAX) is None:
            return f"the token {brief(token)}: a token id is an integer, 0 to {U32_MAX}"
    if details is None:
        return None
    if not isinstance(details, OutputDetails):
        return f"{brief(details)} ({type(details).__name__}) as details of a row: expected OutputDetails"
    try:
        encode_details(details, [], "details")
    except UNSOUND as error:
        return f"details that cannot travel: {error}"
    return None


def _integer(value: Any, most: int) -> int | None:
    try:
        number = value.__index__()
    except Exception:
        return None
    return number if 0 <= number <= most else None


def _returned(core: EngineCore, method: str, value: object, expected: str) -> EngineContractError:
    return EngineContractError(
        f"{_name(core)}.{method}() returned {brief(value)} ({type(value).__name__}): expected {expected}"
    )


def _discard(value: object) -> None:
    """Keep Python from warning of a coroutine that nobody awaits: the error says it already."""
    if inspect.iscoroutine(value):
        value.close()


def _name(core: EngineCore) -> str:
    return type(core).__name__
