"""Utility calls: answers, failures, late answers, and values of every kind on the way there and back."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.helpers import until

from anyengine import (
    EngineClient,
    EngineSpec,
    SamplingParams,
    UnencodableError,
    UnencodableResultError,
    UtilityError,
    open_engine_client,
)
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

ENGINE = """
import math, numpy
from anyengine.engine import Deferred, utility
from anyengine.engines.scripted import ScriptedEngine

def cycle():
    items = []
    items.append(items)
    return items

def tower():
    items = []
    for _ in range(50):
        items = [items, items]
    return items

VALUES = {
    "lambda": lambda: (lambda: 0),
    "numpy_scalar": lambda: numpy.int64(3),
    "dtype": lambda: __import__("torch").bfloat16,
    "big": lambda: 2**70,
    "cycle": cycle,
    "tower": tower,
    "set": lambda: {1},
    "nan": lambda: math.nan,
}

class OddEngine(ScriptedEngine):
    @utility
    def give(self, name):
        return {"value": [VALUES[name]()]}

    @utility
    def promise(self):
        self.promised = Deferred()
        return self.promised

    @utility
    def keep(self, value):
        self.promised.set_result(value)

    @utility
    def break_it(self):
        self.promised.set_exception(ValueError("changed its mind"))

    @utility
    def kinds(self, *values):
        return [type(value).__module__ + "." + type(value).__name__ for value in values]

    @utility
    def import_torch(self):
        import torch

    def unmarked(self):
        return "secret"
"""


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    (tmp_path / "odd_engine.py").write_text(textwrap.dedent(ENGINE))
    monkeypatch.syspath_prepend(str(tmp_path))
    async with open_engine_client(EngineSpec("odd_engine:OddEngine", {"step_delay": 0.001})) as client:
        yield client


async def test_values_come_back_as_they_went() -> None:
    numbers = [0, -1, 2**64 - 1, -(2**63), 1.5, float("inf")]
    others = [None, True, "", "ü\0", b"", b"\xff", [], {}, [[1], {"a": [None]}], {1: "int key"}]
    async with open_engine_client(scripted_spec()) as client:
        for value in numbers + others:
            answer = await client.call_utility("echo", value)
            assert (type(answer), answer) == (type(value), value)


async def test_a_result_that_cannot_travel_names_type_and_place_and_others_go_on(client: EngineClient) -> None:
    words = {
        "lambda": "function",
        "numpy_scalar": "numpy.int64",
        "dtype": "torch.dtype",
        "big": "64 bits",
        "cycle": "cycle",
        "tower": "on several paths",
        "set": "set",
    }
    async with client.open_request([0], SamplingParams(max_tokens=100)) as other:
        for name, word in words.items():
            with pytest.raises(UnencodableResultError) as caught:
                await client.call_utility("give", name)
            assert isinstance(caught.value, TypeError)
            assert isinstance(caught.value, UtilityError)
            assert word in str(caught.value)
            assert "result['value'][0]" in str(caught.value)
        answer = await client.call_utility("give", "nan")
        assert answer["value"][0] != answer["value"][0]
        tokens = [token async for output in other for token in output.token_ids]
    assert tokens == list(range(1, 101))


async def test_an_argument_without_end_is_refused_and_the_loop_goes_on(client: EngineClient) -> None:
    tower: list[Any] = []
    for _ in range(50):
        tower = [tower, tower]
    with pytest.raises(UnencodableError, match="lists and maps"):
        await client.call_utility("echo", tower)
    assert await client.call_utility("echo", "still here") == "still here"


async def test_an_exception_comes_with_type_text_and_traceback() -> None:
    async with open_engine_client(scripted_spec()) as client:
        with pytest.raises(UtilityError) as caught:
            await client.call_utility("raise_error", "boom-789")
    error = caught.value
    assert (error.method, error.rank, error.exception_type, error.message) == (
        "raise_error",
        0,
        "RuntimeError",
        "boom-789",
    )
    assert "faults.py" in (error.traceback or "")


async def test_an_answer_may_come_later(client: EngineClient) -> None:
    got: list[Any] = []

    async def ask() -> None:
        got.append(await client.call_utility("promise"))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until(lambda: client.statistics().pending_calls == 1)
        assert await client.call_utility("echo", "meanwhile") == "meanwhile"
        await client.call_utility("keep", [1, 2])
    assert got == [[1, 2]]
    async with anyio.create_task_group() as group:

        async def ask_in_vain() -> None:
            with pytest.raises(UtilityError, match="ValueError: changed its mind"):
                await client.call_utility("promise")

        group.start_soon(ask_in_vain)
        await until(lambda: client.statistics().pending_calls == 1)
        await client.call_utility("break_it")


async def test_a_thousand_cancelled_calls_leave_an_empty_table() -> None:
    async with open_engine_client(scripted_spec()) as client:
        os.kill(client.health().pid, signal.SIGSTOP)
        async with anyio.create_task_group() as group:
            for number in range(1000):
                group.start_soon(client.call_utility, "echo", number)
            await until(lambda: client.statistics().pending_calls == 1000)
            group.cancel_scope.cancel()
        assert client.statistics().pending_calls == 0
        os.kill(client.health().pid, signal.SIGCONT)
        assert await client.call_utility("echo", "alive") == "alive"


async def test_only_marked_methods_can_be_called(client: EngineClient) -> None:
    assert "unmarked" not in client.info.utilities
    # The client refuses; and so does the engine, should a client not.
    object.__setattr__(client.info, "utilities", ["unmarked", "__init__", "add_request"])
    for name in client.info.utilities:
        with pytest.raises(UtilityError, match=f"LookupError: this engine has no utility '{name}'"):
            await client.call_utility(name)


async def test_arrays_arrive_as_what_they_were(client: EngineClient) -> None:
    import numpy
    import torch

    await client.call_utility("import_torch")  # who has not loaded it gets a WireArray
    kinds = await client.call_utility("kinds", torch.zeros(2), numpy.zeros(2), numpy.float64(1.5), b"bytes")
    assert kinds == ["torch.Tensor", "numpy.ndarray", "builtins.float", "builtins.bytes"]
