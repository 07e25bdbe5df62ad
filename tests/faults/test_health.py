"""Silence is told apart from death: frozen, busy and idle engines."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import anyio
import pytest
from tests.helpers import until

from anyengine import (
    EngineClient,
    EngineSpec,
    Health,
    SamplingParams,
    ShutdownPolicy,
    UtilityTimeoutError,
    open_engine_client,
)
from anyengine.client import services
from anyengine.client.link import EngineLink
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

QUICK = ShutdownPolicy(grace=0.3, terminate=0.3)


async def test_a_stopped_engine_is_unresponsive_and_recovers() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.005)) as client:
        async with client.open_request([0], SamplingParams(max_tokens=100)) as request:
            await anext(request)
            assert client.health(timeout=1).state == "alive"
            os.kill(client.health().pid, signal.SIGSTOP)
            stopped_at = time.monotonic()
            await until(lambda: not client.health(timeout=1))
            health = client.health(timeout=1)
            assert health.state == "unresponsive"
            assert health.unresponsive_for is not None
            assert 1 <= health.unresponsive_for <= time.monotonic() - stopped_at + 0.1
            os.kill(health.pid, signal.SIGCONT)
            await until(lambda: client.health(timeout=1).state == "alive")
            tokens = [token async for output in request for token in output.token_ids]
        assert tokens[-1] == 100


async def test_a_step_that_holds_the_gil_is_unresponsive_not_dead() -> None:
    async with open_engine_client(scripted_spec()) as client:
        await client.call_utility("freeze", 1.6, True)
        seen: set[str] = set()
        with anyio.fail_after(10):
            while "unresponsive" not in seen:
                seen.add(client.health(timeout=0.5).state)
                await anyio.sleep(0.02)
            assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]
            await until(lambda: client.health(timeout=0.5).state == "alive")
        assert seen == {"alive", "unresponsive"}


async def test_a_busy_engine_is_never_called_unresponsive() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.02)) as client:

        async def run(start: int) -> None:
            await client.generate([start], SamplingParams(max_tokens=100))

        async with anyio.create_task_group() as group:
            for start in range(200):
                group.start_soon(run, start)
            await until(lambda: client.statistics().live_requests == 200)
            while client.statistics().live_requests:
                assert client.health(timeout=1)
                await anyio.sleep(0.01)


async def test_an_idle_engine_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked: nothing to do is no standstill."""
    asked = 0
    pinged = EngineLink.pinged

    def count(link: EngineLink) -> None:
        nonlocal asked
        asked += 1
        pinged(link)

    monkeypatch.setattr(services, "PULSE", 0.05)
    monkeypatch.setattr(EngineLink, "pinged", count)
    async with open_engine_client(scripted_spec()) as client:
        started = time.monotonic()
        while asked < 20 or time.monotonic() - started < 0.8:
            assert client.health(timeout=0.6)
            await anyio.sleep(0.01)
        assert client.health().last_step_age is None


async def test_a_blocked_loop_of_ours_is_not_the_engines_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = anyio.Event()
    pinged = EngineLink.pinged

    def block(link: EngineLink) -> None:
        pinged(link)  # the PING is on its way, and nobody here can read the answer
        if not blocked.is_set():
            time.sleep(1.2)
            healths.append(client.health(timeout=1))
            blocked.set()

    healths: list[Health] = []
    async with open_engine_client(scripted_spec()) as client:
        monkeypatch.setattr(EngineLink, "pinged", block)
        await blocked.wait()
        healths.append(client.health(timeout=1))
    assert [health.state for health in healths] == ["alive", "alive"]


async def test_an_engine_that_answers_but_makes_no_step_is_unresponsive() -> None:
    """Progress with work outstanding counts, not reachability; for an engine of another make than ours."""
    now = 100.0
    link = EngineLink(0, itertools.count(), lambda: now, None)
    link.machine.requests[7] = object()
    for _ in range(4):
        link.pinged()
        link.heard(0)
        link.looked()
        now += 0.5
    link.heard(0)
    link.looked()
    health = link.health(1.0, None)
    assert (health.state, health.unresponsive_for) == ("unresponsive", 2.0)
    link.heard(1)
    assert link.health(1.0, None).state == "alive"


async def test_figures_that_cannot_travel_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "boastful_engine.py").write_text(
        "from anyengine.engines.scripted import ScriptedEngine\n"
        "class BoastfulEngine(ScriptedEngine):\n"
        "    def statistics(self):\n"
        "        return {'speed': 'high'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with open_engine_client(EngineSpec("boastful_engine:BoastfulEngine")) as client:
        assert (await client.generate([1], SamplingParams(max_tokens=2))).token_ids == [2, 3]
        assert await client.call_utility("echo", 1) == 1
        assert client.statistics().engine == {}
    assert "'speed': 'high' is not a name with a number" in capfd.readouterr().err


async def test_step_counter_and_age() -> None:
    async with open_engine_client(scripted_spec()) as client:
        await client.generate([0], SamplingParams(max_tokens=20))
        health = client.health()
        assert health.steps == 20
        assert health.last_step_age is not None
        assert 0 <= health.last_step_age < 10
        await until(lambda: client.statistics().engine == {"running": 0, "waiting": 0})


async def test_health_during_the_close_says_closing() -> None:
    client: EngineClient
    async with anyio.create_task_group() as group:
        seen: list[str] = []
        async with open_engine_client(scripted_spec(step_delay=1), shutdown=QUICK) as client:
            await client.add_request([0], SamplingParams(max_tokens=1000))

            async def look() -> None:
                while not seen or seen[-1] != "closed":
                    state = client.health().state
                    if not seen or seen[-1] != state:
                        seen.append(state)
                    await anyio.sleep(0.005)

            group.start_soon(look)
            await until(lambda: seen == ["alive"])
    assert seen == ["alive", "closing", "closed"]


async def test_a_call_that_gets_no_answer_names_method_limit_and_state() -> None:
    async with open_engine_client(scripted_spec()) as client:
        with pytest.raises(UtilityTimeoutError) as caught:
            await client.call_utility("sleep_for", 0.5, timeout=0.1)
        message = str(caught.value)
        assert "utility 'sleep_for' on engine 0" in message
        assert "within 0.1 s" in message
        assert isinstance(caught.value, TimeoutError)
        assert client.statistics().pending_calls == 0
        assert await client.call_utility("echo", "after the late answer") == "after the late answer"
