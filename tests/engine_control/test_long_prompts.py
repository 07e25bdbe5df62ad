"""What it takes an engine to take in long prompts, and many, does not hold up the outputs of the requests that run."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from anyengine import EngineSpec, SamplingParams, open_engine_client
from anyengine.engine import EngineCore, EngineRequest, StepOutputs, utility
from anyengine.engine.core import engine_request
from anyengine.engine.proc import INTAKE
from anyengine.engines.scripted import LOOKED_THROUGH
from anyengine.protocol.sampling import NO_OPTIONS
from anyengine.testing import ScriptedEngine
from anyengine.types import EngineInfo

LENGTH = 10 * LOOKED_THROUGH


def request(handle: int, prompt: Sequence[int]) -> EngineRequest:
    return engine_request(handle, prompt, None, SamplingParams(max_tokens=100), NO_OPTIONS)


@pytest.fixture
def scripted() -> ScriptedEngine:
    """It has made a step with one request."""
    engine = ScriptedEngine(vocab_size=1000)
    engine.add_request(request(1, [1]))
    engine.step()
    return engine


def test_the_scripted_engine_makes_steps_while_it_looks_through_a_long_prompt(scripted: ScriptedEngine) -> None:
    scripted.add_request(request(2, [7] * LENGTH))
    assert scripted.statistics() == {"running": 1, "waiting": 1}
    steps = [scripted.step() for _ in range(11)]
    assert [list(step.handles) for step in steps if step] == [*[[1]] * 9, *[[1, 2]] * 2]
    assert [list(step.token_ids) for step in steps if step][-1] == [13, 9]


def test_a_token_that_is_not_in_the_vocabulary_ends_the_request_alone(scripted: ScriptedEngine) -> None:
    scripted.add_request(request(2, [*[7] * (LENGTH - 1), 1000]))
    rows = [row for _ in range(12) for row in (scripted.step() or StepOutputs((), ())).rows()]
    assert [handle for handle, _, _ in rows].count(1) == 11
    (details,) = [details for handle, _, details in rows if handle == 2]
    assert details is not None
    assert (details.finish_reason, details.error_kind) == ("error", "refused")
    assert details.error == "prompt token id 1000 is not below vocab_size 1000"


def test_an_aborted_long_prompt_is_not_looked_through_any_more(scripted: ScriptedEngine) -> None:
    scripted.add_request(request(2, [7] * LENGTH))
    scripted.abort_requests([1, 2])
    assert not scripted.has_work()
    assert scripted.step() is None


class SlowIntakeEngine(EngineCore):
    """Takes longer to take in a request than there is time for between two steps."""

    def __init__(self) -> None:
        self._live: list[int] = []
        self._log: list[str] = []

    def describe(self) -> EngineInfo:
        return EngineInfo(engine="slow-intake", version="1", max_model_len=10**6)

    def add_request(self, request: EngineRequest) -> None:
        time.sleep(INTAKE * 1.5)
        self._log.append("add")
        self._live.append(request.handle)

    def abort_requests(self, handles: Sequence[int]) -> None:
        self._live = [handle for handle in self._live if handle not in handles]

    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> StepOutputs | None:
        if self._log[-1] != "step":
            self._log.append("step")
        return StepOutputs(list(self._live), [1] * len(self._live))

    @utility
    def log(self) -> list[str]:
        """What was done, consecutive steps as one."""
        return self._log


@pytest.mark.anyio
async def test_a_step_is_made_between_requests_that_take_long_to_take_in() -> None:
    spec = EngineSpec(f"{__name__}:SlowIntakeEngine", {})
    async with open_engine_client(spec) as client:
        handles = [await client.add_request([1], SamplingParams(max_tokens=10**5)) for _ in range(6)]
        assert await client.call_utility("log") == ["add", "step"] * 6
        await client.abort_requests(handles)
