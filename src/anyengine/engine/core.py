"""``EngineCore``, which an adapter implements to put an engine into the child process."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

from anyengine.multimodal import MultiModalFeature
from anyengine.params import LoRARequest, PoolingParams, RequestOptions, SamplingParams
from anyengine.protocol.outputs import OutputDetails, StepOutputs, from_rows
from anyengine.protocol.sampling import NO_OPTIONS
from anyengine.types import EngineInfo

__all__ = [
    "Deferred",
    "EngineCore",
    "EngineRequest",
    "OutputDetails",
    "ProgressReporter",
    "StepOutputs",
    "can_sleep",
    "from_rows",
    "utilities_of",
    "utility",
]

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "__anyengine_utility__"


class ProgressReporter(Protocol):
    """Tells the client how far loading has come; ``fraction`` is 0.0 to 1.0, or None when nobody can say.

    Any thread may call it during :meth:`EngineCore.load`, but only one at a time.
    """

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        """Report ``stage``, in words for people, and how much of it is done."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as it reaches the engine: exactly one of token ids (u32) and embeddings (tokens x hidden size).

    Embeddings are a torch tensor or a numpy array if the engine has loaded that library, else a ``WireArray``, and so
    are arrays in ``features``, each of which has its place among the token ids. With ``pooling`` the one output is to
    hold the pooled vector or scores in place of tokens; otherwise ``sampling.max_tokens`` is a number that fits beside
    the prompt into the model's length, and ``logprobs`` and ``prompt_logprobs`` are numbers that the engine's
    ``max_logprobs`` allows (-1 has become the size of the vocabulary). What an engine does not list in its
    :class:`EngineInfo` does not come; clients refuse it.
    """

    handle: int
    prompt_token_ids: Sequence[int] | None
    prompt_embeds: Any
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None
    features: Sequence[MultiModalFeature] = ()


_OPTIONS = [field.name for field in dataclasses.fields(RequestOptions)]


def engine_request(
    handle: int,
    prompt_token_ids: Sequence[int] | None,
    prompt_embeds: Any,
    sampling: SamplingParams,
    options: RequestOptions,
) -> EngineRequest:
    """A request as an engine sees it; for the caller of an engine."""
    return EngineRequest(
        handle=handle,
        prompt_token_ids=prompt_token_ids,
        prompt_embeds=prompt_embeds,
        sampling=sampling,
        **({} if options is NO_OPTIONS else {name: getattr(options, name) for name in _OPTIONS}),
    )


class EngineCore(abc.ABC):
    """An engine that is stepped by its caller: one thread, no clock, no sockets.

    The class is built with the keyword arguments of the ``EngineSpec``; it should only check and keep them, and do the
    slow work in :meth:`load`. Methods are called one at a time, from one thread. An exception from
    :meth:`add_request` or from a utility fails that request or call alone; one from :meth:`step` or
    :meth:`abort_requests` ends the engine.
    """

    owns_process: bool = False
    """Whether the process is this engine's alone: it may then change settings of the whole process, like the number of
    torch's threads. Its caller sets it before :meth:`load`."""

    def load(self, progress: ProgressReporter) -> None:  # noqa: B027 - doing nothing is a fine default
        """Load the model. Each call of ``progress`` also tells the client that the engine is alive.

        What is there afterwards is not looked at again by Python's collector of reference cycles, where the engine has
        a process of its own: what is to be freed later must not be in one.
        """

    @abc.abstractmethod
    def describe(self) -> EngineInfo:
        """What this engine is and can do; called once, after :meth:`load`. ``utilities`` is filled in by the caller."""

    @abc.abstractmethod
    def add_request(self, request: EngineRequest) -> None:
        """Take a request; its handle is new.

        :raises RequestRefusedError: if the request asks for something that the engine cannot do
        :raises TooManyRequestsError: if the engine has as many requests as it takes
        :raises Exception: if the engine failed at it. The caller gets a ``RequestFailedError``, also for a ValueError
            or TypeError: those come from mistakes in the engine's code as well, and say nothing of whose fault it is
        """

    @abc.abstractmethod
    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop these requests and free what they hold; no output is wanted. Unknown handles are ignored.

        It may come while the engine sleeps.
        """

    @abc.abstractmethod
    def has_work(self) -> bool:
        """Whether :meth:`step` would do something.

        As long as a request has not ended it is true. When it is false, requests that are still there fail: nothing
        would ever come of them.
        """

    @abc.abstractmethod
    def step(self) -> StepOutputs | None:
        """Make one step. The last row of a request has a finish reason; None is a step without any output.

        Arrays in the result must not be changed afterwards.
        """

    def quiesce(self) -> None:  # noqa: B027 - an engine whose steps end what they begin does not override it
        """Finish what is under way on the device, and begin nothing; called when the engine has been paused.

        No step is made until the pause ends. Outputs of what was finished are kept for the next :meth:`step`, without
        those of requests that were or will be aborted.

        :raises Exception: if it cannot; this ends the engine, as an exception from :meth:`step` does
        """

    def sleep(self, level: int) -> None:  # noqa: B027 - an engine that cannot sleep does not override it
        """Give the accelerator's memory back: the KV cache, and the weights by moving them (1) or dropping them (2).

        It comes after :meth:`quiesce`, when the engine is awake, and no step is made until everything is awake again.
        Requests may be there; they go on then, so what the cache held of them has to be computed anew. An engine can
        sleep if it overrides this and :meth:`wake_up`, and then has the utilities ``sleep``, ``wake_up`` and
        ``is_sleeping``, with pausing and level 0 done by the caller.

        :param level: 1 or 2
        :raises Exception: if it cannot; :meth:`wake_up` is then to bring back what sleeps all the same
        """

    def wake_up(self, tags: Sequence[str]) -> None:  # noqa: B027 - an engine that cannot sleep does not override it
        """Bring back what sleeps.

        :param tags: ``"weights"``, ``"kv_cache"`` or both, in this order: only what was put to sleep and is not back
        :raises Exception: if it cannot; it is then asked for the same again
        """

    def unavailable_utilities(self) -> AbstractSet[str]:
        """Names of utilities that this engine, as it was loaded, cannot serve: they are not offered."""
        return frozenset()

    def failure_fd(self) -> int | None:
        """A descriptor that becomes readable when the engine fails while nobody calls it (a worker of it died).

        It is asked for once, after :meth:`load`. When it is readable, :meth:`check_health` is called, also while the
        engine is paused.
        """
        return None

    def check_health(self) -> None:  # noqa: B027 - an engine without failure_fd() does not override it
        """Find out whether the engine can go on; called when a utility has failed, too.

        :raises Exception: if it cannot; this ends the engine, as an exception from :meth:`step` does
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
        self._misuse: RuntimeError | None = None
        self._thread = threading.get_ident()

    def set_result(self, value: Any) -> None:
        """Answer the call with ``value``.

        :raises RuntimeError: if it has been settled before, or this is not the engine's thread
        """
        self._settle(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Fail the call with ``error``.

        :raises RuntimeError: if it has been settled before, or this is not the engine's thread
        """
        self._settle(None, error)

    def on_settled(self, callback: Callable[[Any, BaseException | None], None]) -> None:
        """Have ``callback(value, error)`` called once it is settled; at once if it is already. For the caller."""
        if self._outcome is None:
            self._callback = callback
        else:
            callback(*self._outcome)

    def is_settled(self) -> bool:
        """Whether it is. One that another thread has tried to settle is failed by this, for the caller waits for it."""
        if self._outcome is None and self._misuse is not None:
            self._settle(None, self._misuse)
        return self._outcome is not None

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self._outcome is not None:
            raise RuntimeError("this Deferred has been settled before")
        if threading.get_ident() != self._thread:
            what = "a Deferred is settled in the engine's own thread, as in step(), and not in another"
            self._misuse = RuntimeError(what)
            raise RuntimeError(what)
        self._outcome = (value, error)
        if self._callback is not None:
            self._callback(value, error)


def kind_of_function(function: Callable[..., Any]) -> Literal["async", "generator"] | None:
    """What an engine's methods must not be, for whoever calls them has no event loop and takes what they return."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "async"
    return "generator" if inspect.isgeneratorfunction(function) else None


def utility(method: Callable[P, R]) -> Callable[P, R]:
    """Mark a method of an engine as callable from the client by its name. Nothing else is.

    :raises TypeError: if it is an async or a generator function: an engine has no event loop
    """
    if kind_of_function(method) is not None:
        raise TypeError(
            f"@utility: {method.__qualname__} is an async or generator function, but an engine has no event loop: "
            "write def and return the value, or a Deferred to answer later"
        )
    setattr(method, _MARK, True)
    return method


def utilities_of(owner: type) -> list[str]:
    """The names of the methods of a class that are marked as utilities, in alphabetical order."""
    return sorted(name for name in dir(owner) if getattr(getattr(owner, name, None), _MARK, False))


def can_sleep(engine: type[EngineCore]) -> bool:
    """Whether an engine overrides both :meth:`EngineCore.sleep` and :meth:`EngineCore.wake_up`.

    :raises TypeError: if it overrides one of them alone
    """
    sleeps, wakes = engine.sleep is not EngineCore.sleep, engine.wake_up is not EngineCore.wake_up
    if sleeps != wakes:
        has, lacks = ("sleep", "wake_up") if sleeps else ("wake_up", "sleep")
        raise TypeError(f"{engine.__name__} overrides {has} but not {lacks}: an engine that can sleep has both")
    return sleeps
