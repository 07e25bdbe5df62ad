"""Each decision about pausing and sleeping, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine_control.harness import Runner, SpiedEngine
from tests.engine_control.plain_engine import PlainEngine

from anyengine.engine import Deferred, StepOutputs, utility
from anyengine.engine.control import SchedulerState


@pytest.fixture
def engine() -> SpiedEngine:
    return SpiedEngine()


@pytest.fixture
def runner(engine: SpiedEngine) -> Runner:
    return Runner(engine)


def recorded(engine: SpiedEngine, name: str) -> list[list[Any]]:
    return [arguments for method, arguments in engine.recorded_calls() if method == name]


# ---- what costs nothing ----


def test_while_running_the_methods_are_the_engines_own(engine: SpiedEngine, runner: Runner) -> None:
    control = runner.control
    assert (control.has_work, control.step) == (engine.has_work, engine.step)
    runner.call("pause_scheduler")
    runner.call("resume_scheduler")
    assert (control.has_work, control.step) == (engine.has_work, engine.step)


# ---- the modes ----


def test_abort_ends_what_runs_before_it_answers(engine: SpiedEngine, runner: Runner) -> None:
    runner.add(1)
    runner.step()
    assert runner.call("pause_scheduler", "abort") is None
    assert runner.sent == [(1, 1, None), (1, 0, "abort")]
    assert not engine.has_work()
    assert not runner.step()
    assert recorded(engine, "reset_prefix_cache") == [[False, False]]


def test_keep_stops_at_once_and_goes_on_where_it_was(engine: SpiedEngine, runner: Runner) -> None:
    runner.add(1, max_tokens=3)
    runner.step()
    assert runner.call("pause_scheduler", "keep") is None
    assert runner.run() == 0
    assert not recorded(engine, "reset_prefix_cache")
    runner.call("resume_scheduler")
    assert runner.run() == 2
    assert runner.last_rows() == {1: "length"}


def test_wait_answers_after_the_last_row_and_no_step_comes_after_it(runner: Runner) -> None:
    runner.add(1, max_tokens=3)
    runner.step()
    assert isinstance(runner.call("pause_scheduler", "wait"), Deferred)
    runner.add(2)
    assert runner.control.state is SchedulerState.FINISHING
    assert runner.run() == 2
    assert runner.sent[-2:] == [(1, 1, "length"), ("answer", "pause_scheduler", None)]
    assert runner.control.state is SchedulerState.PAUSED
    runner.call("resume_scheduler")
    assert runner.run() == 4
    assert runner.last_rows() == {1: "length", 2: "length"}


def test_wait_answers_at_once_if_nothing_runs(engine: SpiedEngine, runner: Runner) -> None:
    assert runner.call("pause_scheduler", "wait", True) is None
    assert runner.call("pause_scheduler", "wait", False) is None
    assert len(recorded(engine, "reset_prefix_cache")) == 1


def test_wait_ends_when_what_it_waits_for_is_aborted(runner: Runner) -> None:
    runner.add(1)
    runner.call("pause_scheduler", "wait")
    runner.control.abort_requests([1])
    assert runner.run() == 0
    assert runner.sent == [(1, 0, "abort"), ("answer", "pause_scheduler", None)]


# ---- held requests ----


def test_held_requests_are_handed_over_in_order(engine: SpiedEngine, runner: Runner) -> None:
    runner.call("pause_scheduler", "keep")
    for handle in (7, 3, 5):
        runner.add(handle)
    assert (engine.taken, runner.control.statistics()["held"]) == ([], 3)
    runner.call("resume_scheduler")
    assert engine.taken == [7, 3, 5]
    assert "held" not in runner.control.statistics()


def test_a_held_request_is_released_at_once_when_aborted(engine: SpiedEngine, runner: Runner) -> None:
    runner.call("pause_scheduler", "keep")
    runner.add(1)
    runner.add(2)
    runner.control.abort_requests([1])
    assert runner.sent == [(1, 0, "abort")]
    runner.call("resume_scheduler")
    assert engine.taken == [2]


def test_a_held_request_that_the_engine_refuses_fails_alone(engine: SpiedEngine, runner: Runner) -> None:
    runner.call("pause_scheduler", "keep")
    runner.add(1, prompt=10**6)
    runner.add(2)
    runner.call("resume_scheduler")
    runner.run()
    assert runner.last_rows() == {1: "error", 2: "length"}


@pytest.mark.parametrize("paused", [False, True])
def test_too_many_log_probabilities_do_not_reach_the_engine(engine: SpiedEngine, runner: Runner, paused: bool) -> None:
    if paused:
        runner.call("pause_scheduler", "keep")
    for handle, logprobs in enumerate((20, 21, 2**32 - 1, -1, None)):
        runner.add(handle, logprobs=logprobs)
    assert runner.last_rows() == {1: "error", 2: "error", 3: "error"}
    if paused:
        runner.call("resume_scheduler")
    assert engine.taken == [0, 4]


# ---- one pause after another ----


def test_abort_after_keep_ends_what_was_kept_and_held(runner: Runner) -> None:
    runner.add(1)
    runner.step()
    runner.call("pause_scheduler", "keep")
    runner.add(2)
    runner.call("pause_scheduler", "abort")
    assert runner.last_rows() == {1: "abort", 2: "abort"}
    assert runner.call("is_scheduler_paused") is True


def test_wait_after_keep_lets_what_was_kept_finish_but_not_what_is_held(runner: Runner) -> None:
    runner.add(1)
    runner.step()
    runner.call("pause_scheduler", "keep")
    runner.add(2)
    runner.call("pause_scheduler", "wait")
    runner.run()
    assert runner.last_rows() == {1: "length"}
    assert runner.answers() == {"pause_scheduler": None}


def test_two_waits_are_answered_together(runner: Runner) -> None:
    runner.add(1)
    runner.call("pause_scheduler", "wait", name="first")
    runner.call("pause_scheduler", "wait", name="second")
    runner.run()
    assert runner.sent[-3:] == [(1, 1, "length"), ("answer", "first", None), ("answer", "second", None)]


def test_abort_during_a_wait_answers_both(runner: Runner) -> None:
    runner.add(1)
    runner.call("pause_scheduler", "wait")
    runner.add(2)
    assert runner.call("pause_scheduler", "abort") is None
    assert runner.sent == [(1, 0, "abort"), (2, 0, "abort"), ("answer", "pause_scheduler", None)]


@pytest.mark.parametrize(
    ("method", "args"), [("resume_scheduler", ()), ("wake_up", ()), ("pause_scheduler", ("keep",))]
)
def test_what_ends_a_wait_early_fails_it(method: str, args: Sequence[Any], runner: Runner) -> None:
    runner.add(1)
    runner.call("pause_scheduler", "wait", name="waiting")
    runner.call(method, *args)
    error = runner.answers()["waiting"]
    assert isinstance(error, RuntimeError)
    assert "before the requests had finished" in str(error)
    assert runner.step() is (method != "pause_scheduler")


def test_keep_after_a_wait_that_has_come_true_does_not_fail_it(runner: Runner) -> None:
    runner.add(1)
    runner.call("pause_scheduler", "wait", name="waiting")
    runner.control.abort_requests([1])
    runner.call("pause_scheduler", "keep")
    assert runner.answers() == {"waiting": None}


def test_resume_without_a_pause_does_nothing(runner: Runner) -> None:
    assert runner.call("resume_scheduler") is None
    assert runner.call("is_scheduler_paused") is False


# ---- sleeping ----


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_and_wake(level: int, engine: SpiedEngine, runner: Runner) -> None:
    runner.add(1)
    runner.step()
    runner.call("sleep", level, "keep")
    assert runner.call("is_sleeping") is True
    assert runner.run() == 0
    runner.call("wake_up")
    assert runner.call("is_sleeping") is False
    assert recorded(engine, "sleep") == ([[level]] if level else [])
    assert recorded(engine, "wake_up") == ([[["weights", "kv_cache"]]] if level else [])
    runner.run()
    assert runner.last_rows() == {1: "length"}


def test_sleep_waits_for_requests_and_falls_asleep_then(engine: SpiedEngine, runner: Runner) -> None:
    runner.add(1)
    runner.call("sleep", 1, "wait")
    runner.step()
    assert not recorded(engine, "sleep")
    runner.run()
    assert recorded(engine, "sleep") == [[1]]
    assert runner.sent[-2:] == [(1, 1, "length"), ("answer", "sleep", None)]


def test_parts_wake_up_one_by_one_and_the_last_one_resumes(engine: SpiedEngine, runner: Runner) -> None:
    runner.call("sleep", 2)
    runner.call("wake_up", ["weights"])
    with pytest.raises(RuntimeError, match=r"the engine sleeps \(kv_cache\): call wake_up\(\)"):
        runner.call("resume_scheduler")
    with pytest.raises(ValueError, match="while kv_cache would sleep on"):
        runner.call("wake_up", ["weights", "scheduling"])
    runner.call("wake_up", ["weights"])
    assert runner.call("is_scheduler_paused")
    runner.call("wake_up", ["kv_cache"])
    assert not runner.call("is_scheduler_paused")
    assert recorded(engine, "wake_up") == [[["weights"]], [["kv_cache"]]]


def test_scheduling_wakes_level_0(runner: Runner) -> None:
    runner.call("sleep", 0)
    runner.call("wake_up", ["scheduling"])
    assert not runner.call("is_sleeping")


def test_sleep_while_asleep(engine: SpiedEngine, runner: Runner) -> None:
    runner.add(1)
    runner.call("sleep", 1, "keep")
    runner.add(2)
    runner.call("sleep", 1, "abort")
    runner.call("sleep", 0)
    assert recorded(engine, "sleep") == [[1]]
    assert runner.last_rows() == {1: "abort", 2: "abort"}
    with pytest.raises(ValueError, match="level=2: the engine sleeps at level 1 already"):
        runner.call("sleep", 2)
    runner.call("wake_up", ["weights"])
    with pytest.raises(ValueError, match="level=1: only kv_cache sleeps now"):
        runner.call("sleep", 1)
    assert not recorded(engine, "reset_prefix_cache")[1:]


def test_two_waiting_sleeps_of_different_levels(engine: SpiedEngine, runner: Runner) -> None:
    runner.add(1)
    runner.call("sleep", 1, "wait", name="first")
    runner.call("sleep", 2, "wait", name="second")
    runner.run()
    assert runner.answers()["first"] is None
    assert "at level 1 already" in str(runner.answers()["second"])
    assert recorded(engine, "sleep") == [[1]]


def test_an_engine_that_sleeps_cannot_be_waited_for(runner: Runner) -> None:
    runner.add(1)
    runner.call("sleep", 1, "keep")
    with pytest.raises(RuntimeError, match="the engine sleeps, so the requests that it kept cannot finish"):
        runner.call("pause_scheduler", "wait")
    runner.call("wake_up")
    assert runner.run() == 4


def test_wake_up_of_an_engine_that_is_awake_does_nothing(engine: SpiedEngine, runner: Runner) -> None:
    assert runner.call("wake_up") is None
    assert runner.call("wake_up", ["weights"]) is None
    assert not recorded(engine, "wake_up")


# ---- bad input ----


@pytest.mark.parametrize(
    ("method", "args", "kind", "message"),
    [
        ("pause_scheduler", ("later",), ValueError, "mode='later': expected 'abort', 'wait' or 'keep'"),
        ("pause_scheduler", (["abort"],), ValueError, r"mode=\['abort'\]: expected"),
        ("pause_scheduler", ("abort", "yes"), TypeError, r"clear_cache='yes' \(str\): expected a bool"),
        ("sleep", (3,), ValueError, "level=3: expected 0, 1 or 2"),
        ("sleep", (True,), TypeError, r"level=True \(bool\): expected 0, 1 or 2"),
        ("sleep", (1, "no"), ValueError, "mode='no'"),
        ("wake_up", (["weight"],), ValueError, "there is no 'weight'; expected a list of 'weights', 'kv_cache', 'sch"),
        ("wake_up", ([],), ValueError, r"tags=\[\]: expected a list of"),
        ("wake_up", ("weights",), TypeError, r"tags='weights' \(str\): expected a list"),
        ("wake", (), LookupError, "this engine has no utility 'wake'"),
    ],
)  # fmt: skip
def test_bad_input_changes_nothing(
    method: str, args: Sequence[Any], kind: type[Exception], message: str, runner: Runner
) -> None:
    runner.add(1)
    with pytest.raises(kind, match=message):
        runner.call(method, *args)
    assert not runner.control.broken
    assert runner.run() == 4


# ---- engines that fail, and engines that lack something ----


def test_an_engine_that_cannot_sleep_has_no_such_utilities() -> None:
    control = Runner(PlainEngine()).control
    assert control.info.utilities == [
        "get_supported_tasks",
        "is_scheduler_paused",
        "pause_scheduler",
        "resume_scheduler",
    ]
    assert control.call("get_supported_tasks", ()) == ["embed", "score"]
    with pytest.raises(LookupError, match="no utility 'sleep'"):
        control.call("sleep", (0,))
    assert control.call("pause_scheduler", ()) is None


def test_utilities_are_those_that_can_be_called_sorted(engine: SpiedEngine, runner: Runner) -> None:
    names = runner.control.info.utilities
    assert names == sorted(set(names))
    assert {"sleep", "wake_up", "is_sleeping", "pause_scheduler", "echo", "collective_rpc"} <= set(names)


def test_an_engine_overrides_both_hooks_or_none() -> None:
    class HalfEngine(PlainEngine):
        def sleep(self, level: int) -> None:
            pass

    with pytest.raises(TypeError, match="HalfEngine overrides sleep but not wake_up"):
        Runner(HalfEngine())


def test_an_engine_cannot_take_the_name_of_a_common_utility() -> None:
    class ClashingEngine(PlainEngine):
        @utility
        def resume_scheduler(self) -> None:
            pass

    with pytest.raises(TypeError, match="ClashingEngine marks 'resume_scheduler' as a utility, which every engine has"):
        Runner(ClashingEngine())


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_an_engine_that_fails_to_fall_asleep_is_paused_until_it_wakes_up(mode: str) -> None:
    class InsomniacEngine(SpiedEngine):
        def sleep(self, level: int) -> None:
            super().sleep(level)
            raise MemoryError("no room on the host")

    engine = InsomniacEngine()
    runner = Runner(engine)
    if mode == "wait":
        runner.add(1)
        runner.call("sleep", 1, "wait")
        runner.run()
        error = runner.answers()["sleep"]
    else:
        with pytest.raises(RuntimeError) as caught:
            runner.call("sleep", 1, "abort")
        error = caught.value
    assert "the scheduler is paused, but the engine failed to fall asleep (MemoryError: no room on the host)" in str(
        error
    )
    with pytest.raises(RuntimeError, match="call wake_up"):
        runner.call("resume_scheduler")
    runner.call("wake_up")
    runner.add(2)
    assert runner.run() == 4


def test_an_engine_that_fails_to_wake_up_still_sleeps() -> None:
    class SleepyEngine(SpiedEngine):
        failures = 1

        def wake_up(self, tags: Sequence[str]) -> None:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("five more minutes")
            super().wake_up(tags)

    runner = Runner(SleepyEngine())
    runner.call("sleep")
    runner.add(1)
    with pytest.raises(RuntimeError, match="five more minutes"):
        runner.call("wake_up")
    assert runner.run() == 0
    runner.call("wake_up")
    assert runner.run() == 4


@pytest.mark.parametrize("answer", [False, OSError("disk")])
def test_a_cache_that_is_not_emptied_fails_the_call_but_not_the_pause(answer: Any) -> None:
    class StickyEngine(SpiedEngine):
        @utility
        def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
            if answer is not False:
                raise answer
            return False

    runner = Runner(StickyEngine())
    with pytest.raises(RuntimeError, match="the scheduler is paused, but its prefix cache was not emptied"):
        runner.call("pause_scheduler")
    assert runner.call("is_scheduler_paused")
    runner.add(1)
    runner.call("resume_scheduler")
    assert runner.run() == 4


def test_an_engine_that_fails_to_abort_is_broken() -> None:
    class StubbornEngine(SpiedEngine):
        def abort_requests(self, handles: Sequence[int]) -> None:
            raise RuntimeError("never")

    runner = Runner(StubbornEngine())
    runner.add(1)
    with pytest.raises(RuntimeError, match="never"):
        runner.call("pause_scheduler", "abort")
    assert runner.control.broken


class BatchedEngine(SpiedEngine):
    """Steps as an engine with a batch under way: its rows come a step later."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: StepOutputs | None = None
        self.rows: StepOutputs | None = None
        self.asked: list[str] = []

    def has_work(self) -> bool:
        return super().has_work() or self.batch is not None or self.rows is not None

    def step(self) -> StepOutputs | None:
        rows, self.rows = self.rows, None
        if rows is None:
            rows, self.batch = self.batch, super().step() if super().has_work() else None
        return rows

    def quiesce(self) -> None:
        self.asked.append("quiesce")
        if self.batch is not None:
            self.rows, self.batch = self.batch, None

    @utility
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.asked.append("reset_prefix_cache")
        return self.batch is None

    def sleep(self, level: int) -> None:
        self.asked.append("sleep")
        assert self.batch is None

    def wake_up(self, tags: Sequence[str]) -> None:
        pass


def test_a_pause_begins_when_nothing_is_under_way() -> None:
    engine = BatchedEngine()
    runner = Runner(engine)
    runner.add(1, max_tokens=3)
    runner.step()
    runner.step()
    assert runner.sent == [(1, 1, None)]
    assert engine.batch is not None
    runner.call("pause_scheduler", "keep")
    assert engine.batch is None
    assert runner.run() == 0
    runner.call("resume_scheduler")
    runner.run()
    assert runner.sent == [(1, 1, None), (1, 1, None), (1, 1, "length")]
    assert engine.asked == ["quiesce"]


@pytest.mark.parametrize("method", ["pause_scheduler", "sleep"])
def test_the_device_is_idle_before_anything_is_cleared(method: str) -> None:
    engine = BatchedEngine()
    runner = Runner(engine)
    runner.add(1, max_tokens=3)
    waits = runner.call(method, *((1, "wait") if method == "sleep" else ("wait",)))
    assert isinstance(waits, Deferred)
    assert not engine.asked
    runner.run()
    assert runner.answers() == {method: None}
    expected = ["quiesce", "reset_prefix_cache", "sleep"]
    assert engine.asked == (expected if method == "sleep" else expected[:2])


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_an_engine_that_fails_to_quiesce_is_broken(mode: str) -> None:
    class FailingEngine(SpiedEngine):
        def quiesce(self) -> None:
            raise RuntimeError("the device is lost")

    runner = Runner(FailingEngine())
    runner.add(1, max_tokens=1)
    with pytest.raises(RuntimeError, match="the device is lost"):
        runner.call("pause_scheduler", mode)
        runner.run()
    assert runner.control.broken


def test_nobody_steps_so_nobody_can_wait(engine: SpiedEngine) -> None:
    runner = Runner(engine, can_wait=False)
    runner.add(1)
    for method, args in (("pause_scheduler", ("wait",)), ("sleep", (1, "wait"))):
        with pytest.raises(RuntimeError, match="nobody steps the engine while this call waits"):
            runner.call(method, *args)
    assert runner.run() == 4
    assert runner.call("pause_scheduler", "wait") is None
