"""Mistakes in an engine of somebody's own: the error names the class, the method and what it did, wherever it runs."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tests.engine_control.mistaken_engine import MistakenEngine
from tests.helpers import BUSY

from anyengine import (
    EngineDeadError,
    EngineSpec,
    EngineStartError,
    InprocEngineClient,
    RequestFailedError,
    SamplingParams,
    UtilityError,
    open_engine_client,
)
from anyengine.engine import EngineCore, OutputDetails, StepOutputs, utility
from anyengine.engine.contract import EngineContractError, check_methods, is_sound, sound
from anyengine.engines.scripted import ScriptedEngine

FEW = SamplingParams(max_tokens=5)
PLACEMENTS: list[Any] = ["process", "thread"]

NOT_LOADED = {
    "describe": r"MistakenEngine\.describe\(\) returned \{'engine': 'mine'\} \(dict\): expected an EngineInfo",
    "unavailable_utilities": r"MistakenEngine\.unavailable_utilities\(\) returned 'sleep' \(str\): expected a set",
    "has_work": r"MistakenEngine\.has_work\(\) returned 1 \(int\): expected a bool",
}
ONE_REQUEST = {
    "negative token": r"MistakenEngine\.step\(\) returned the token -1: a token id is an integer, 0 to 4294967295",
    "text as token": r"MistakenEngine\.step\(\) returned the token 'a'",
    "details": r"MistakenEngine\.step\(\) returned \{'stop': 1\} \(dict\) as details of a row: expected OutputDetails",
    "finish reason": r"MistakenEngine\.step\(\) returned details that cannot travel: .*finish",
    "forget": r"MistakenEngine forgot this request: its has_work\(\) is false, but no step\(\) returned",
}
THE_ENGINE = {
    "list": r"MistakenEngine\.step\(\) returned \[\(.*\(list\): expected StepOutputs, which from_rows\(\)",
    "coroutine": r"MistakenEngine\.step\(\) returned <coroutine object .*: expected StepOutputs",
    "names as handles": r"MistakenEngine\.step\(\) returned '0' \(str\): expected as a row's handle that of a request",
}


def mistaken(mistake: str) -> EngineSpec:
    return EngineSpec("tests.engine_control.mistaken_engine:MistakenEngine", {"mistake": mistake})


def run_in_process(mistake: str, prompts: list[list[int]]) -> dict[int, Any]:
    """What comes of each prompt: its tokens, or the error that its last row brings."""
    with InprocEngineClient(MistakenEngine(mistake)) as client:
        handles = [client.add_request(prompt, FEW) for prompt in prompts]
        found: dict[int, Any] = {handle: [] for handle in handles}
        for _ in range(50):
            for handle, tokens, details in client.get_output().rows():
                if details is not None and details.finish_reason == "error":
                    found[handle] = details.to_error(str(handle))
                elif isinstance(found[handle], list):
                    found[handle] += tokens
        assert not client.has_unfinished_requests()
        return found


@pytest.mark.anyio
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mistake", [*NOT_LOADED, "failure_fd"])
async def test_what_is_asked_once_is_checked_before_the_engine_is_ready(mistake: str, placement: Any) -> None:
    expected = NOT_LOADED.get(mistake, r"MistakenEngine\.failure_fd\(\) returned 10000 \(int\): expected an open")
    with pytest.raises(EngineStartError, match=expected):
        async with open_engine_client(mistaken(mistake), placement=placement):
            pytest.fail("it is ready")


@pytest.mark.parametrize("mistake", NOT_LOADED)
def test_the_same_in_process(mistake: str) -> None:
    with pytest.raises(EngineContractError, match=NOT_LOADED[mistake]):
        InprocEngineClient(MistakenEngine(mistake))


@pytest.mark.anyio
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mistake", ONE_REQUEST)
async def test_what_concerns_one_request_fails_that_one_alone(mistake: str, placement: Any) -> None:
    async with open_engine_client(mistaken(mistake), placement=placement) as client:
        failed: list[RequestFailedError] = []

        async def fail() -> None:
            with pytest.raises(RequestFailedError, match=ONE_REQUEST[mistake]) as caught:
                await client.generate([13, 1], FEW)
            failed.append(caught.value)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(fail)
                other = await client.generate([20], FEW)
        assert other.token_ids == [21, 22, 23, 24, 25]
        assert len(failed) == 1
        assert (await client.generate([1], FEW)).token_ids == [2, 3, 4, 5, 6]
        assert client.statistics().live_requests == 0


@pytest.mark.parametrize("mistake", ONE_REQUEST)
def test_one_request_alone_in_process(mistake: str) -> None:
    unlucky, other = run_in_process(mistake, [[13, 1], [20]]).values()
    assert isinstance(unlucky, RequestFailedError)
    assert re.search(ONE_REQUEST[mistake], str(unlucky))
    assert other == [21, 22, 23, 24, 25]


@pytest.mark.anyio
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mistake", THE_ENGINE)
async def test_what_cannot_be_attributed_ends_the_engine(mistake: str, placement: Any) -> None:
    async with open_engine_client(mistaken(mistake), placement=placement) as client:
        with pytest.raises(EngineDeadError, match=THE_ENGINE[mistake]):
            await client.generate([13, 1], FEW)


@pytest.mark.parametrize("mistake", THE_ENGINE)
def test_what_cannot_be_attributed_in_process(mistake: str) -> None:
    with pytest.raises(EngineDeadError, match=THE_ENGINE[mistake]):
        run_in_process(mistake, [[13, 1]])


@pytest.mark.anyio
async def test_figures_that_are_none_are_dropped_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    async with open_engine_client(mistaken("statistics")) as client:
        assert (await client.generate([1], FEW)).token_ids == [2, 3, 4, 5, 6]
        await client.pause_scheduler()
        assert await client.is_scheduler_paused()
    assert "MistakenEngine.statistics() returned [('running', 1)] (list): expected a mapping" in capfd.readouterr().err


@pytest.mark.anyio
async def test_a_row_of_a_request_that_nobody_made_is_ignored() -> None:
    async with open_engine_client(mistaken("stranger"), placement="thread") as client:
        assert (await client.generate([13, 1], FEW)).token_ids == [2, 3, 4, 5, 6]


@pytest.mark.anyio
async def test_requests_that_a_pause_holds_or_keeps_are_not_forgotten() -> None:
    async with open_engine_client(mistaken(""), placement="thread") as client:
        async with client.open_request([0], SamplingParams(max_tokens=10**6)) as kept:
            await anext(kept)
            await client.pause_scheduler("keep")
            held = await client.add_request([5], SamplingParams(max_tokens=1))
            assert client.statistics().live_requests == 2
            await client.call_utility("echo", "the engine has been idle since")
            assert client.statistics().live_requests == 2
            await client.resume_scheduler()
            await anext(kept)
            assert list((await client.get_output()).handles) == [held]


def _class(name: str, method: Callable[..., Any]) -> type[EngineCore]:
    return type("MyEngine", (ScriptedEngine,), {name: method})


async def _async_method(self: Any, *args: Any) -> None: ...


def _generator_method(self: Any, *args: Any) -> Any:
    yield 1


@pytest.mark.parametrize("name", ["load", "describe", "add_request", "abort_requests", "has_work", "step", "shutdown"])
def test_a_method_that_is_async_or_a_generator_is_refused_before_it_is_called(name: str) -> None:
    with pytest.raises(
        EngineContractError, match=rf"MyEngine\.{name} is an async function: an engine has no event loop"
    ):
        check_methods(_class(name, _async_method))
    with pytest.raises(EngineContractError, match=rf"MyEngine\.{name} is a generator function"):
        check_methods(_class(name, _generator_method))


def test_a_method_with_other_arguments_is_named_with_them() -> None:
    with pytest.raises(EngineContractError, match=r"MyEngine\.load\(self\) cannot be called as load\(self, progress"):
        check_methods(_class("load", lambda self: None))


def test_an_async_utility_is_refused_where_it_is_marked() -> None:
    with pytest.raises(TypeError, match=r"@utility: .*_async_method is an async or generator function"):
        utility(_async_method)
    with pytest.raises(TypeError, match=r"@utility: .*_generator_method is an async or generator function"):
        utility(_generator_method)


@pytest.mark.anyio
async def test_a_deferred_is_settled_in_the_engines_thread_alone() -> None:
    async with open_engine_client(mistaken(""), placement="thread") as client:
        problem = await client.call_utility("settle_in_a_thread")
        assert "settled in the engine's own thread" in problem


@pytest.mark.anyio
async def test_a_deferred_that_another_thread_tries_to_settle_fails_its_call() -> None:
    async with open_engine_client(mistaken("")) as client:
        with pytest.raises(UtilityError, match="a Deferred is settled in the engine's own thread"):
            await client.call_utility("settle_in_a_thread_later", timeout=BUSY)


def test_several_rows_of_one_request_are_not_the_mistake_that_another_has() -> None:
    engine = ScriptedEngine()
    step = sound(engine, StepOutputs([1, 1, 2], [5, 6, -1]))
    assert [(handle, list(tokens)) for handle, tokens, _ in step.rows()] == [(1, [5]), (1, [6]), (2, [])]
    assert step.details.keys() == {2} and "the token -1" in str(step.details[2].error)
    ended = {2: OutputDetails(finish_reason="stop")}
    step = sound(engine, StepOutputs([1, 1, 2], [5, 6, 7], None, ended))
    assert [(handle, list(tokens)) for handle, tokens, _ in step.rows()] == [(2, [7]), (1, [])]
    assert "two rows of one request" in str(step.details[1].error)


@pytest.mark.parametrize("typecode", "iqd")
def test_a_column_of_another_type_is_looked_at(typecode: str) -> None:
    value: Any = array(typecode, [-1])
    assert not is_sound(StepOutputs([1], value))
    counts: Any = [2.0]
    assert not is_sound(StepOutputs([1], [5, 6], counts))


def test_what_python_passes_no_self_to_is_a_method_too() -> None:
    class Nothing:
        def __call__(self) -> None:
            pass

    class Engine(ScriptedEngine):
        shutdown: Any = Nothing()
        check_health: Any = max  # native, and says nothing of its parameters

        @staticmethod
        def statistics() -> dict[str, float]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return {}

        @classmethod
        def failure_fd(cls) -> None:
            return None

    check_methods(Engine)

    class Wrong(ScriptedEngine):
        @staticmethod
        def has_work(what: int) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
            return True

    with pytest.raises(EngineContractError, match=r"Wrong.has_work\(what: 'int'\) -> 'bool' cannot be called"):
        check_methods(Wrong)


@pytest.mark.anyio
async def test_keyword_arguments_of_a_call_are_refused_by_name() -> None:
    async with open_engine_client(mistaken(""), placement="thread") as client:
        with pytest.raises(TypeError, match="value"):
            await client.call_utility("echo", value=1)  # type: ignore[call-arg]
