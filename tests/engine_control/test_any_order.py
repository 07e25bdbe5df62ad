"""Requests, aborts, pauses, sleeps and steps in any order, against a model that only counts tokens.

- A held request never reaches the engine before it is handed over, and is handed over in its order.
- Nothing steps while the engine is paused, and nothing at all while part of it sleeps (the engine itself objects).
- Each request gets exactly one last row, for the reason that the model gives.
- Each call that waits is answered exactly once, and with success only if what it waited for has ended.
"""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.engine_control.harness import Runner, SpiedEngine

from anyengine.engine import Deferred

MODES = st.sampled_from(["abort", "wait", "wait", "keep", "keep"])  # after an abort there is least to see
PARTIAL_TAGS = st.lists(st.sampled_from(["weights", "kv_cache", "scheduling"]), min_size=1, max_size=3)
# Mostly everything: with an engine of which something sleeps there is not much more to do.
TAGS = st.one_of(st.none(), st.none(), st.none(), PARTIAL_TAGS)
REQUESTS = st.lists(st.tuples(st.integers(2, 20), st.sampled_from([False] * 5 + [True])), min_size=1, max_size=4)


class Control(RuleBasedStateMachine):
    """The control with an engine, and beside it the model."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = SpiedEngine()
        self.runner = Runner(self.engine)
        self.numbers = itertools.count()
        # The model.
        self.running: dict[int, int] = {}  # tokens left
        self.held: dict[int, tuple[int, bool]] = {}  # tokens, and whether the engine will refuse it
        self.taken: list[int] = []
        self.reasons: dict[int, str] = {}
        self.paused = False
        self.asleep: set[str] = set()
        self.level = 0
        self.waiting: dict[str, int] = {}  # by name of the call: the level to fall asleep at
        self.answers: dict[str, bool] = {}

    # ---- the model's own moves ----

    def hand_over(self, handle: int, tokens: int, refused: bool) -> None:
        if refused:
            self.reasons[handle] = "error"
        else:
            self.taken.append(handle)
            self.running[handle] = tokens

    def fall_asleep(self, level: int) -> bool:
        if not level:
            return True
        if self.asleep:
            return level == self.level and len(self.asleep) == 2
        self.asleep, self.level = {"weights", "kv_cache"}, level
        return True

    def answer_waiting(self, success: bool) -> None:
        for name, level in self.waiting.items():
            self.answers[name] = success and self.fall_asleep(level)
        self.waiting = {}

    def pause(self, mode: str, level: int) -> bool | None:
        """Whether the call succeeds; None if it waits."""
        if mode == "wait" and self.running:
            return None if not self.asleep else False
        if mode == "abort":
            self.reasons |= dict.fromkeys([*self.running, *self.held], "abort")
            self.running, self.held = {}, {}
        self.paused = True
        self.answer_waiting(not self.running)
        return self.fall_asleep(level)

    def resume(self) -> None:
        self.paused = False
        self.answer_waiting(False)
        held, self.held = self.held, {}
        for handle, (tokens, refused) in held.items():
            self.hand_over(handle, tokens, refused)

    def call(self, expected: bool | None, level: int, method: str, *args: object) -> None:
        name = f"{method}-{next(self.numbers)}"
        if expected is None:
            self.paused = False
            self.waiting[name] = level
        try:
            value = self.runner.call(method, *args, name=name)
        except (RuntimeError, ValueError):
            assert expected is False
        else:
            assert isinstance(value, Deferred) is (expected is None)
            assert expected is not False

    # ---- what can happen ----

    @rule(requests=REQUESTS)
    def add(self, requests: list[tuple[int, bool]]) -> None:
        for tokens, refused in requests:
            handle = next(self.numbers)
            if self.paused or self.waiting:
                self.held[handle] = tokens, refused
            else:
                self.hand_over(handle, tokens, refused)
            self.runner.add(handle, max_tokens=tokens, prompt=10**6 if refused else 0)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [*self.running, *self.held]
        if live:
            handles = data.draw(st.lists(st.sampled_from(live), unique=True, max_size=3))
            self.runner.control.abort_requests(handles)
            for handle in handles:
                self.reasons[handle] = "abort"
                self.running.pop(handle, None)
                self.held.pop(handle, None)

    @rule(mode=MODES, clear_cache=st.booleans())
    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        self.call(self.pause(mode, 0), 0, "pause_scheduler", mode, clear_cache)

    @precondition(lambda self: self.running or self.asleep)
    @rule(mode=MODES, level=st.sampled_from([0, 1, 1, 2]))
    def sleep(self, mode: str, level: int) -> None:
        fits = not level or not self.asleep or (level == self.level and len(self.asleep) == 2)
        self.call(self.pause(mode, level) if fits else False, level, "sleep", level, mode)

    @rule()
    def resume_scheduler(self) -> None:
        awake = not self.asleep
        if awake:
            self.resume()
        self.call(awake, 0, "resume_scheduler")

    @rule(tags=TAGS)
    def wake_up(self, tags: list[str] | None) -> None:
        left = set() if tags is None else self.asleep - set(tags)
        possible = not (left and tags is not None and "scheduling" in tags)
        if possible:
            self.asleep = left
            if not left:
                self.resume()
        self.call(possible, 0, "wake_up", tags)

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            steps = bool(self.running) and not self.paused
            if not steps and self.waiting:
                self.paused = True
                self.answer_waiting(True)
            assert self.runner.step() is steps
            for handle in list(self.running) if steps else ():
                self.running[handle] -= 1
                if not self.running[handle]:
                    del self.running[handle]
                    self.reasons[handle] = "length"

    # ---- what must always be ----

    @invariant()
    def agrees_with_the_model(self) -> None:
        runner = self.runner
        assert runner.live == self.running.keys() | self.held.keys()
        assert runner.last_rows() == self.reasons
        assert self.engine.taken == self.taken
        assert {name: value is None for name, value in runner.answers().items()} == self.answers
        assert runner.call("is_scheduler_paused") is (self.paused or bool(self.waiting))
        assert runner.call("is_sleeping") is (self.paused or bool(self.waiting) or bool(self.asleep))

    def teardown(self) -> None:
        self.wake_up(None)
        while self.running:
            self.step(1)
        self.step(1)
        self.agrees_with_the_model()
        assert not self.runner.live
        assert not self.waiting
        assert not self.runner.control.has_work()


def test_any_order() -> None:
    run_state_machine_as_test(Control, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))
