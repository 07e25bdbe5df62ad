"""Every typed utility: the two classes are alike, and each method reaches the engine, awaited and blocking."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from anyengine import EngineClient, EngineSpec, LoRARequest, UtilityError, open_engine_client
from anyengine.engines.scripted import ScriptedEngine
from anyengine.inproc_client import InprocEngineClient
from anyengine.testing import scripted_spec
from anyengine.utilities import BlockingEngineUtilities, EngineUtilities

LORA = LoRARequest(lora_name="pirate", lora_int_id=7, lora_path="/nowhere")

CALLS: list[tuple[str, dict[str, Any], Any]] = [
    ("get_supported_tasks", {}, ["generate"]),
    ("pause_scheduler", {"mode": "keep", "clear_cache": False}, None),
    ("is_scheduler_paused", {}, True),
    ("resume_scheduler", {}, None),
    ("sleep", {"level": 2, "mode": "wait"}, None),
    ("is_sleeping", {}, True),
    ("wake_up", {"tags": ["weights", "kv_cache", "scheduling"]}, None),
    ("reset_prefix_cache", {"reset_running_requests": True, "reset_connector": True}, True),
    ("reset_mm_cache", {}, None),
    ("reset_encoder_cache", {}, None),
    ("add_lora", {"lora_request": LORA}, True),
    ("list_loras", {}, [7]),
    ("pin_lora", {"lora_id": 7}, True),
    ("remove_lora", {"lora_id": 7}, True),
    ("collective_rpc", {"method": "echo", "args": [3]}, [3]),
    ("collective_rpc", {"method": "builtins:callable"}, [False]),
    ("execute_dummy_batch", {}, None),
    ("profile", {"is_start": False, "profile_prefix": "run"}, None),
    ("save_sharded_state", {"path": "/nowhere", "pattern": "part-{}", "max_size": 100}, None),
]
RECORDED = [
    ["reset_prefix_cache", [False, False]],
    ["sleep", [2]],
    ["wake_up", [["weights", "kv_cache"]]],
    ["reset_prefix_cache", [True, True]],
    ["reset_mm_cache", []],
    ["reset_encoder_cache", []],
    ["execute_dummy_batch", []],
    ["profile", [False, "run"]],
    ["save_sharded_state", ["/nowhere", "part-{}", 100]],
]


def methods(owner: type) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(owner).items() if inspect.isfunction(value) and name[0] != "_")


def test_both_classes_have_the_same_methods_parameters_and_docs() -> None:
    awaited, blocking = dict(methods(EngineUtilities)), dict(methods(BlockingEngineUtilities))
    assert list(awaited) == list(blocking)
    for name, method in awaited.items():
        assert inspect.iscoroutinefunction(method), name
        assert not inspect.iscoroutinefunction(blocking[name]), name
        assert inspect.signature(method) == inspect.signature(blocking[name]), name
        assert inspect.getdoc(method) == inspect.getdoc(blocking[name]), name
    assert set(awaited) == {name for name, _, _ in CALLS} | {"call_utility"}


def test_each_method_calls_the_utility_of_its_name_with_all_parameters_in_order() -> None:
    called: list[tuple[Any, ...]] = []

    class Recorder(BlockingEngineUtilities):
        def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
            called.append((method, *args))

    for name, method in methods(BlockingEngineUtilities):
        if name != "call_utility":
            given = {
                parameter: {"key": number}
                if parameter == "kwargs"
                else LORA
                if parameter == "lora_request"
                else [number]
                for number, parameter in enumerate(list(inspect.signature(method).parameters)[1:])
            }
            method(Recorder(), **given)
            travels = [dataclasses.asdict(value) if value is LORA else value for value in given.values()]
            assert called.pop() == (name, *travels)


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_every_utility_through_the_async_client() -> None:
    async with open_engine_client(scripted_spec()) as client:
        for name, arguments, expected in CALLS:
            assert await getattr(client, name)(**arguments) == expected, name
        assert await client.call_utility("recorded_calls") == RECORDED
        assert set(dict(methods(EngineUtilities))) - {"call_utility"} <= set(client.info.utilities)


def test_every_utility_through_the_in_process_client() -> None:
    with InprocEngineClient(ScriptedEngine()) as client:
        for name, arguments, expected in CALLS:
            assert getattr(client, name)(**arguments) == expected, name
        assert [list(call) for call in client.call_utility("recorded_calls")] == RECORDED


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_what_an_engine_lacks_is_refused_by_name() -> None:
    spec = EngineSpec("tests.engine_control.plain_engine:PlainEngine")
    async with open_engine_client(spec) as client:
        for call in (client.sleep, client.list_loras, client.reset_prefix_cache):
            with pytest.raises(UtilityError, match=f"utility '{call.__name__}': engine 'plain' has no such utility"):
                await call()
        await client.pause_scheduler("wait", clear_cache=True)
        assert await client.is_scheduler_paused()


def worker_name(engine: ScriptedEngine, greeting: str, *, mark: str = "") -> str:
    """Called in the engine's process by its import path."""
    return f"{greeting}, {type(engine).__name__}{mark}"


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_collective_rpc_by_import_path_and_its_refusals() -> None:
    async with open_engine_client(scripted_spec()) as client:
        path = f"{__name__}:worker_name"
        assert await client.collective_rpc(path, None, ["Hello"], {"mark": "!"}) == ["Hello, ScriptedEngine!"]
        await refusals(client)


async def refusals(client: EngineClient) -> None:
    for method, message in (
        ("_private", r"ValueError: method='_private': expected the name of a public method, or 'package.module:func"),
        ("a.b", "ValueError: method='a.b'"),
        ("nothing", "AttributeError: 'ScriptedEngine' object has no attribute 'nothing'"),
        ("no_such_module_here:f", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("math:pi", "TypeError: method='math:pi': float cannot be called"),
        (3, r"TypeError: method=3 \(int\): expected a method's name"),
    ):
        with pytest.raises(UtilityError, match=message):
            await client.collective_rpc(method)  # type: ignore[arg-type]


def test_a_table_of_adapters() -> None:
    with InprocEngineClient(ScriptedEngine()) as client:
        assert client.add_lora(LORA)
        assert not client.add_lora(LORA)
        assert client.list_loras() == [7]
        assert not client.pin_lora(8)
        assert not client.remove_lora(8)
        with pytest.raises(UtilityError, match="lora_path is missing"):
            client.call_utility("add_lora", {"lora_name": "x", "lora_int_id": 1})
        with pytest.raises(TypeError, match=r"lora_request={'lora_name': 'x'} \(dict\): expected a LoRARequest"):
            client.add_lora({"lora_name": "x"})  # type: ignore[arg-type]


def test_a_scripted_engine_objects_to_a_step_while_it_sleeps() -> None:
    engine = ScriptedEngine()
    engine.sleep(1)
    engine.wake_up(["weights"])
    with pytest.raises(RuntimeError, match="a step was made while kv_cache slept"):
        engine.step()
