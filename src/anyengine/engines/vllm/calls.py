"""Calls of all workers, of which one that fails spoils no other.

vLLM's executor with worker processes reads the answers of a call from one queue per worker, and stops at the first that
is a failure. The answers of the other workers stay in their queues and become those of the next call, and so on for
ever. So no worker is let answer with a failure: what it raised is the value that it answers with, and becomes an
exception here when all answers are in.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anyengine.engine.failures import describe_failure
from anyengine.errors import UnencodableError
from anyengine.protocol import cbor, packing


class WorkerCallError(RuntimeError):
    """A call has failed in the workers that it names, and is done in the others.

    ``kinds`` has the names of the types of their exceptions.
    """

    def __init__(self, message: str, kinds: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.kinds: frozenset[str] = frozenset(kinds)


class _Failure(NamedTuple):
    kind: str
    message: str
    traceback: str


class _Answer(NamedTuple):
    value: Any
    failure: _Failure | None


def guarded(method: str | Callable[..., Any], worker: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What a worker runs in place of a method, by its name, or of a function that takes the worker first."""
    try:
        if isinstance(method, str):
            return _Answer(getattr(worker, method)(*args, **kwargs), None)
        return _Answer(method(worker, *args, **kwargs), None)
    except Exception as error:
        return _Answer(None, _Failure(*describe_failure(error)))


def with_guarded_calls(executor_class: Any) -> Any:
    """The class of an executor whose calls of all workers are guarded, whoever makes them.

    Those of a step are not: one worker answers them, or a future does, and a failure is the end of the engine.
    """

    def collective_rpc(
        self: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        call = executor_class.collective_rpc
        if options:
            return call(self, method, timeout, args, kwargs, **options)
        return _values(call(self, functools.partial(guarded, method), timeout, args, kwargs))

    return type(executor_class.__name__, (executor_class,), {"collective_rpc": collective_rpc})


def _values(answers: Sequence[_Answer]) -> list[Any]:
    """:raises WorkerCallError: if a worker has failed"""
    failures = {rank: answer.failure for rank, answer in enumerate(answers) if answer.failure is not None}
    if not failures:
        return [answer.value for answer in answers]
    first, failure = next(iter(failures.items()))
    if failure.kind == UnencodableError.__name__:
        raise UnencodableError(f"worker {first}", failure.message)
    same = [str(rank) for rank, other in failures.items() if other[:2] == failure[:2]]
    who = f"worker {first}" if len(same) == 1 else f"workers {', '.join(same)}"
    others = "" if len(failures) == len(same) else f" ({len(failures)} of {len(answers)} workers have failed)"
    kinds = [failure.kind for failure in failures.values()]
    error = WorkerCallError(f"{who}: {failure.kind}: {failure.message}{others}", kinds)
    error.add_note(f"In worker {first}:\n{failure.traceback}")
    raise error


# ---- what an application calls ----


def call_workers(executor: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Call a method of each worker, or an importable function (``"package.module:name"``) on it.

    :returns: what each has returned, in the order of their ranks
    :raises WorkerCallError: if one has failed
    :raises UnencodableError: if what one has returned cannot travel
    """
    answers = executor.collective_rpc(_call_and_encode, args=(method, tuple(args), dict(kwargs)))
    return [cbor.decode(body, [memoryview(buffer) for buffer in buffers]) for body, buffers in answers]


def _call_and_encode(
    worker: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bytes, Sequence[bytearray]]:
    # Encoded in the worker, so that what cannot travel is found while it is still a failure of this call: vLLM would
    # fail to pickle it, and answer nothing at all or for another call.
    module, _, name = method.rpartition(":")
    if module:
        value = getattr(importlib.import_module(module), name)(worker, *args, **kwargs)
    else:
        value = getattr(worker, method)(*args, **kwargs)
    buffers: list[cbor.Buffer] = []
    body = packing.encode(value, buffers, path="result")
    return body, [bytearray(buffer) for buffer in buffers]
