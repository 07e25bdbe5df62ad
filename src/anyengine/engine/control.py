"""``SchedulerControl``: it stands between an engine and whoever runs it, pauses the engine and finds its utilities.

The loop of the engine's process and the in-process client run their engine through it alike, and an adapter need not
know of pauses: requests that come during one are held here and handed over when it ends.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, get_args

from anyengine.brief import brief
from anyengine.engine import contract
from anyengine.engine.core import Deferred, EngineCore, EngineRequest, StepOutputs, can_sleep, utilities_of, utility
from anyengine.engine.failures import message_of, name_of
from anyengine.engine.sleeping import Sleep
from anyengine.lengths import token_limit
from anyengine.logprob_limits import within_max_logprobs
from anyengine.types import EngineInfo
from anyengine.utilities import PauseMode

_SLEEP_UTILITIES = frozenset({"sleep", "wake_up", "is_sleeping"})


class SchedulerState(enum.Enum):
    """Whether the engine makes steps, and what becomes of new requests."""

    RUNNING = "running"
    FINISHING = "finishing"  # a pause waits for the engine's requests: it makes steps, new requests are held
    PAUSED = "paused"  # no steps, new requests are held


class _WaitingCall(NamedTuple):
    """A pause or sleep that is answered when the engine's requests have finished."""

    answer: Deferred
    clear_cache: bool
    level: int


class SchedulerControl:
    """One engine, loaded, with the utilities that every engine has. Its methods are called from the engine's thread.

    Whoever runs the engine makes a :meth:`step` while :meth:`has_work`. Both are the engine's own methods as long as it
    is not paused, so that the control costs nothing per step.

    :param live: the handles of all requests that were added and have not had their last row, kept by whoever runs the
        engine
    :param release: called with handles of live requests that were aborted, to give each its last row
    :param refuse: called with the handle of a request that was held, and the exception with which the engine then
        refused it, to give it its last row
    :param more: utilities of whoever runs the engine
    :param can_wait: whether the engine is stepped while somebody waits for the answer of a utility
    :raises TypeError: if the engine overrides one of ``sleep`` and ``wake_up`` alone, or has a utility with the name of
        one that every engine has
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        live: AbstractSet[int],
        release: Callable[[Sequence[int]], None],
        refuse: Callable[[int, Exception], None],
        can_wait: bool,
        more: Mapping[str, Callable[..., Any]],
    ) -> None:
        common = utilities_of(type(self))
        if not can_sleep(type(core)):
            common = [name for name in common if name not in _SLEEP_UTILITIES]
        own = utilities_of(type(core))
        if clash := [name for name in own if name in common or name in more]:
            raise TypeError(f"{type(core).__name__} marks {clash[0]!r} as a utility, which every engine has already")
        self.core = core
        self.state: SchedulerState = SchedulerState.RUNNING
        self.broken: bool = False
        self.has_work: Callable[[], bool] = core.has_work
        self.step: Callable[[], StepOutputs | None] = core.step
        self._utilities: dict[str, Callable[..., Any]] = {
            **{name: getattr(self, name) for name in common},
            **more,
            **{name: getattr(core, name) for name in own},
        }
        for name in contract.unavailable_utilities(core):
            self._utilities.pop(name, None)
        self.info: EngineInfo = dataclasses.replace(contract.describe(core), utilities=sorted(self._utilities))
        contract.check_loaded(core)
        self._live = live
        self._release = release
        self._refuse = refuse
        self._can_wait = can_wait
        self._held: dict[int, EngineRequest] = {}
        self._waiting: list[_WaitingCall] = []
        self._sleep = Sleep(core)

    @property
    def is_asleep(self) -> bool:
        """Whether anything sleeps."""
        return bool(self._sleep.asleep)

    # ---- requests ----

    def add_request(self, request: EngineRequest) -> None:
        """Hand a live request to the engine, or hold it while the engine is paused.

        :raises RequestRefusedError: if the model's length has no room for it, or it asks for too many log-probabilities
        :raises Exception: what the engine's ``add_request`` raised; that request is refused
        """
        if request.pooling is None:
            request = _within_limits(request, self.info)
        if self.state is SchedulerState.RUNNING:
            self.core.add_request(request)
        else:
            self._held[request.handle] = request

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop live requests, held or handed over, and release them.

        :raises Exception: what the engine's ``abort_requests`` raised; the engine is then ``broken``
        """
        handed_over = [handle for handle in handles if self._held.pop(handle, None) is None]
        if handed_over:
            try:
                self.core.abort_requests(handed_over)
            except BaseException:
                self.broken = True
                raise
        if handles:
            self._release(handles)

    def forgotten(self) -> Sequence[int]:
        """Live requests of which nothing will come any more, for the engine that has them has no work; now dropped.

        :raises Exception: what the engine's ``abort_requests`` raised; the engine is then ``broken``
        """
        if self.state is not SchedulerState.RUNNING or not self._live or self.core.has_work():
            return ()
        handles = list(self._live)
        try:
            self.core.abort_requests(handles)
        except BaseException:
            self.broken = True
            raise
        return handles

    def statistics(self) -> Mapping[str, float]:
        """The engine's own figures; while it is paused or about to be, also ``paused`` (0 or 1) and ``held``."""
        figures = contract.statistics(self.core)
        if self.state is SchedulerState.RUNNING:
            return figures
        return {**figures, "paused": int(self.state is SchedulerState.PAUSED), "held": len(self._held)}

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Call a utility; its result may be a :class:`Deferred`.

        :raises LookupError: if the engine has no such utility
        :raises Exception: what the utility raised, or what the engine failed of meanwhile; that call fails, and if
            ``broken`` is set now, the engine with it
        """
        if method not in self._utilities:
            raise LookupError(f"this engine has no utility {method!r}")
        try:
            return self._utilities[method](*args)
        except Exception:
            try:
                self.core.check_health()
            except BaseException:
                self.broken = True
                raise
            raise

    # ---- the utilities that every engine has; anyengine.utilities describes them for those who call ----

    @utility
    def get_supported_tasks(self) -> list[str]:
        """What the engine said of itself."""
        return list(self.info.supported_tasks)

    @utility
    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Deferred | None:
        """Stop making steps, at once or when the engine has finished what it has.

        :raises TypeError, ValueError: if an argument is not what it should be; nothing has happened then
        :raises RuntimeError: if the requests to wait for cannot go on, or the cache could not be emptied
        """
        if not isinstance(clear_cache, bool):
            raise TypeError(f"clear_cache={brief(clear_cache)} ({type(clear_cache).__name__}): expected a bool")
        return self._pause(mode, clear_cache, level=0)

    @utility
    def resume_scheduler(self) -> None:
        """Make steps again, and take in what was held, in the order in which it came.

        :raises RuntimeError: if the engine sleeps
        """
        if self._sleep.asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(self._sleep.asleep)}): call wake_up() instead")
        self._resume()

    @utility
    def is_scheduler_paused(self) -> bool:
        """Whether new requests are held."""
        return self.state is not SchedulerState.RUNNING

    @utility
    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Deferred | None:
        """Pause, then have the engine give memory back.

        :raises TypeError, ValueError: if an argument is not what it should be; nothing has happened then
        :raises RuntimeError: as :meth:`pause_scheduler`, or if the engine could not fall asleep
        """
        return self._pause(mode, self._sleep.check_level(level) > 0, level)

    @utility
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Have the engine bring back what sleeps of ``tags``; resume when nothing sleeps any more.

        :raises TypeError, ValueError: if ``tags`` is not what it should be; nothing has happened then
        :raises Exception: what the engine raised; what it was to bring back counts as asleep
        """
        self._sleep.wake_up(tags)
        if not self._sleep.asleep:
            self._resume()

    @utility
    def is_sleeping(self) -> bool:
        """Whether anything sleeps, or the scheduler is paused (that is level 0)."""
        return bool(self._sleep.asleep) or self.is_scheduler_paused()

    # ---- from state to state ----

    def _pause(self, mode: PauseMode, clear_cache: bool, level: int) -> Deferred | None:
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode={brief(mode)}: expected 'abort', 'wait' or 'keep'")
        if mode == "wait" and self.core.has_work():
            if self._sleep.asleep:
                raise RuntimeError("mode='wait': the engine sleeps, so the requests that it kept cannot finish")
            if not self._can_wait:
                raise RuntimeError(
                    "mode='wait': nobody steps the engine while this call waits; call get_output() until "
                    "has_unfinished_requests() is false, or use mode='abort' or 'keep'"
                )
            self._enter(SchedulerState.FINISHING)
            self._waiting.append(_WaitingCall(Deferred(), clear_cache, level))
            return self._waiting[-1].answer
        if mode == "abort":
            self.abort_requests(list(self._live))
        unfinished = mode == "keep" and self.core.has_work()
        self._enter(SchedulerState.PAUSED)
        if unfinished:
            self._fail_waiting("the scheduler was paused with mode='keep' before the requests had finished")
        else:
            self._finish_waiting()
        self._settle_down(clear_cache and mode != "keep", level)
        return None

    def _resume(self) -> None:
        self._enter(SchedulerState.RUNNING)
        self._fail_waiting("the scheduler was resumed before the requests had finished")
        held, self._held = self._held, {}
        for request in held.values():
            try:
                self.core.add_request(request)
            except Exception as error:
                self._refuse(request.handle, error)

    def _enter(self, state: SchedulerState) -> None:
        self.state = state
        if state is SchedulerState.RUNNING:
            self.has_work = self.core.has_work
        elif state is SchedulerState.FINISHING:
            self.has_work = self._has_work_to_finish
        else:
            self.has_work = _has_no_work
            try:
                self.core.quiesce()
            except BaseException:
                self.broken = True
                raise

    def _has_work_to_finish(self) -> bool:
        # Asked before each step, so the rows of the last one are out when the calls that waited for it are answered.
        if self.core.has_work():
            return True
        self._enter(SchedulerState.PAUSED)
        self._finish_waiting()
        return False

    def _finish_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            try:
                self._settle_down(call.clear_cache, call.level)
            except Exception as error:
                call.answer.set_exception(error)
            else:
                call.answer.set_result(None)

    def _fail_waiting(self, problem: str) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.answer.set_exception(RuntimeError(problem))

    def _settle_down(self, clear_cache: bool, level: int) -> None:
        """Do what was asked for once no step is made any more."""
        if clear_cache and "kv_cache" not in self._sleep.asleep:
            self._clear_cache()
        self._sleep.fall_asleep(level)

    def _clear_cache(self) -> None:
        reset = self._utilities.get("reset_prefix_cache")
        if reset is None:
            return
        problem: str = "the engine could not do it now"
        cause: Exception | None = None
        try:
            if reset() is not False:
                return
        except Exception as error:
            problem, cause = f"{name_of(error)}: {message_of(error)}", error
        raise RuntimeError(
            f"the scheduler is paused, but its prefix cache was not emptied ({problem}); resume_scheduler() resumes"
        ) from cause


def _has_no_work() -> bool:
    return False


def _within_limits(request: EngineRequest, info: EngineInfo) -> EngineRequest:
    tokens = request.prompt_token_ids
    sampling = within_max_logprobs(request.sampling, info)
    length = request.prompt_embeds.shape[0] if tokens is None else len(tokens)
    limit = token_limit(sampling, length, info.max_model_len)
    if sampling.max_tokens is None:
        sampling = dataclasses.replace(sampling, max_tokens=limit)
    return request if sampling is request.sampling else dataclasses.replace(request, sampling=sampling)
