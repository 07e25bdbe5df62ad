"""``EngineCore``, which an adapter implements to put an engine into the child process."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from anyengine.protocol.outputs import OutputDetails, StepOutputs, from_rows
from anyengine.types import EngineInfo, SamplingParams

__all__ = [
    "Deferred",
    "EngineCore",
    "EngineRequest",
    "OutputDetails",
    "ProgressReporter",
    "StepOutputs",
    "from_rows",
    "utilities_of",
    "utility",
]

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "__anyengine_utility__"


class ProgressReporter(Protocol):
    """Tells the client how far loading has come; ``fraction`` is 0.0 to 1.0, or None when nobody can say."""

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        """Report ``stage``, in words for people, and how much of it is done."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as it reaches the engine: exactly one of token ids (u32) and embeddings (tokens x hidden size).

    Embeddings are a torch tensor or a numpy array if the engine has loaded that library, else a ``WireArray``.
    """

    handle: int
    prompt_token_ids: Sequence[int] | None
    prompt_embeds: Any
    sampling: SamplingParams


class EngineCore(abc.ABC):
    """An engine that is stepped by its caller: one thread, no clock, no sockets.

    The class is built with the keyword arguments of the ``EngineSpec``; it should only check and keep them, and do the
    slow work in :meth:`load`. Methods are called one at a time, from one thread. An exception from
    :meth:`add_request` or from a utility fails that request or call alone; one from :meth:`step` or
    :meth:`abort_requests` ends the engine.
    """

    def load(self, progress: ProgressReporter) -> None:  # noqa: B027 - doing nothing is a fine default
        """Load the model. Each call of ``progress`` also tells the client that the engine is alive."""

    @abc.abstractmethod
    def describe(self) -> EngineInfo:
        """What this engine is and can do; called once, after :meth:`load`. ``utilities`` is filled in by the caller."""

    @abc.abstractmethod
    def add_request(self, request: EngineRequest) -> None:
        """Take a request; its handle is new.

        :raises RequestError: if the request asks for something that the engine cannot do
        """

    @abc.abstractmethod
    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop these requests and free what they hold; no output is wanted. Unknown handles are ignored."""

    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether :meth:`step` would do something."""

    @abc.abstractmethod
    def step(self) -> StepOutputs | None:
        """Make one step. The last row of a request has a finish reason; None is a step without any output.

        Arrays in the result must not be changed afterwards.
        """

    def statistics(self) -> Mapping[str, float]:
        """Figures of the moment, for monitoring (running and waiting requests, cache use)."""
        return {}

    def shutdown(self) -> None:  # noqa: B027 - doing nothing is a fine default
        """Free what must not be left behind; called once, when the process ends in good order."""


class Deferred:
    """The answer of a utility that is not known yet: return it, and settle it in a later step.

    Settle it from the engine's own thread, exactly once.
    """

    def __init__(self) -> None:
        self._callback: Callable[[Any, BaseException | None], None] | None = None
        self._outcome: tuple[Any, BaseException | None] | None = None

    def set_result(self, value: Any) -> None:
        """Answer the call with ``value``.

        :raises RuntimeError: if it has been settled before
        """
        self._settle(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Fail the call with ``error``.

        :raises RuntimeError: if it has been settled before
        """
        self._settle(None, error)

    def on_settled(self, callback: Callable[[Any, BaseException | None], None]) -> None:
        """Have ``callback(value, error)`` called once it is settled; at once if it is already. For the caller."""
        if self._outcome is None:
            self._callback = callback
        else:
            callback(*self._outcome)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self._outcome is not None:
            raise RuntimeError("this Deferred has been settled before")
        self._outcome = (value, error)
        if self._callback is not None:
            self._callback(value, error)


def utility(method: Callable[P, R]) -> Callable[P, R]:
    """Mark a method of an engine as callable from the client by its name. Nothing else is."""
    setattr(method, _MARK, True)
    return method


def utilities_of(engine: type[EngineCore]) -> list[str]:
    """The names of an engine's utilities, in alphabetical order."""
    return sorted(name for name in dir(engine) if getattr(getattr(engine, name, None), _MARK, False))
