"""Pausing and sleeping a real engine in its process, with streams running."""

from __future__ import annotations

import signal
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from tests.helpers import kill, until

from anyengine import (
    Completion,
    EngineClient,
    EngineDeadError,
    EngineSpec,
    RequestRefusedError,
    SamplingParams,
    ShutdownPolicy,
    UtilityError,
    open_engine_client,
)
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

STREAMS = 8
LONG = SamplingParams(max_tokens=10**6)
SHORT = SamplingParams(max_tokens=30)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with open_engine_client(scripted_spec(step_delay=0.002)) as client:
        yield client


class Streams:
    """Requests that run in tasks of their own, and what has come of them."""

    def __init__(self, client: EngineClient, group: anyio.abc.TaskGroup, sampling: SamplingParams) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(STREAMS)]
        self.reasons: list[str | None] = [None] * STREAMS
        self._client = client
        for number in range(STREAMS):
            group.start_soon(self._run, number, sampling)

    async def _run(self, number: int, sampling: SamplingParams) -> None:
        async with self._client.open_request([number * 1000], sampling) as request:
            async for output in request:
                self.tokens[number] += output.token_ids
                self.reasons[number] = output.finish_reason

    async def started(self) -> None:
        await until(lambda: all(self.tokens))

    def all_in_order(self) -> bool:
        return all(
            tokens == list(range(number * 1000 + 1, number * 1000 + 1 + len(tokens)))
            for number, tokens in enumerate(self.tokens)
        )


async def steps_of(client: EngineClient) -> int:
    """The step counter; a step between these calls would have been told before the next answer."""
    for number in range(30):
        await client.call_utility("echo", number)
    return client.health().steps


# ---- the modes ----


async def test_abort_ends_every_stream_before_it_answers(client: EngineClient) -> None:
    async with anyio.create_task_group() as group:
        streams = Streams(client, group, LONG)
        await streams.started()
        await client.pause_scheduler("abort")
        assert client.statistics().live_requests == 0
        await until(lambda: all(streams.reasons))
    assert streams.reasons == ["abort"] * STREAMS
    assert streams.all_in_order()
    assert await client.is_scheduler_paused()


async def test_keep_stops_at_once_and_resume_goes_on_without_a_gap(client: EngineClient) -> None:
    async with anyio.create_task_group() as group:
        streams = Streams(client, group, SamplingParams(max_tokens=200))
        await streams.started()
        await client.pause_scheduler("keep")
        steps = await steps_of(client)
        assert await steps_of(client) == steps
        assert client.statistics().live_requests == STREAMS
        await client.resume_scheduler()
    assert [len(tokens) for tokens in streams.tokens] == [200] * STREAMS
    assert streams.all_in_order()
    assert not await client.is_scheduler_paused()


async def test_wait_lets_every_stream_finish_and_holds_new_ones(client: EngineClient) -> None:
    late: list[Completion] = []

    async def come_late() -> None:
        late.append(await client.generate([7], SHORT))

    async with anyio.create_task_group() as group:
        streams = Streams(client, group, SamplingParams(max_tokens=100))
        await streams.started()
        async with anyio.create_task_group() as pausing:
            pausing.start_soon(client.pause_scheduler, "wait")
            await until(lambda: client.statistics().pending_calls == 1)
            assert await client.is_scheduler_paused()
            group.start_soon(come_late)
        assert client.statistics().live_requests == 1
        steps = await steps_of(client)
        assert streams.reasons == ["length"] * STREAMS
        assert streams.all_in_order()
        assert not late
        assert await steps_of(client) == steps
        await client.resume_scheduler()
    assert late[0].token_ids == list(range(8, 38))


async def test_a_resume_fails_who_still_waits(client: EngineClient) -> None:
    async def wait_in_vain() -> None:
        with pytest.raises(UtilityError, match="the scheduler was resumed before the requests had finished"):
            await client.pause_scheduler("wait")

    async with client.open_request([0], LONG) as request:
        await anext(request)
        async with anyio.create_task_group() as group:
            group.start_soon(wait_in_vain)
            await until(lambda: client.statistics().pending_calls == 1)
            await client.resume_scheduler()
        assert (await anext(request)).token_ids


async def test_a_cancelled_wait_goes_on_in_the_engine(client: EngineClient) -> None:
    async with client.open_request([0], LONG) as request:
        await anext(request)
        with anyio.move_on_after(0.05):
            await client.pause_scheduler("wait")
        assert client.statistics().pending_calls == 0
        assert await client.is_scheduler_paused()
    await client.pause_scheduler("wait")  # the request was aborted with its block, so this comes true
    await client.resume_scheduler()
    assert len((await client.generate([0], SHORT)).token_ids) == 30


# ---- held requests ----


async def test_held_requests_run_after_the_resume_in_their_order(client: EngineClient) -> None:
    await client.pause_scheduler()
    handles = [await client.add_request([number], SamplingParams(max_tokens=1)) for number in range(5)]
    with anyio.move_on_after(0.2):
        pytest.fail(f"a paused engine sent {await client.get_output()}")
    await client.resume_scheduler()
    assert list((await client.get_output()).handles) == handles


async def test_a_held_request_can_be_cancelled(client: EngineClient) -> None:
    await client.pause_scheduler()
    started = time.monotonic()
    for _ in range(20):
        with anyio.CancelScope() as scope:
            async with client.open_request([0], LONG):
                scope.cancel()
                await anyio.sleep_forever()
        handle = await client.add_request([0], LONG)
        await client.abort_requests([handle])
    await until(lambda: client.statistics().aborting_requests == 0)
    assert client.statistics().live_requests == 0
    # Leaving a block waits a second at most for the engine's last row: none of them needed that.
    assert time.monotonic() - started < 5
    await until(lambda: client.statistics().engine.get("held") == 0)
    await client.resume_scheduler()
    assert len((await client.generate([0], SHORT)).token_ids) == 30


async def test_a_held_request_that_the_engine_refuses_fails_at_the_resume(client: EngineClient) -> None:
    await client.pause_scheduler()

    async def be_refused() -> None:
        with pytest.raises(RequestRefusedError, match="prompt token id 1000000 is not below vocab_size"):
            await client.generate([10**6], SHORT)

    async with anyio.create_task_group() as group:
        group.start_soon(be_refused)
        await until(lambda: client.statistics().live_requests == 1)
        await client.resume_scheduler()


async def test_statistics_tell_of_the_pause(client: EngineClient) -> None:
    await client.pause_scheduler()
    await client.add_request([0], SHORT)
    await until(lambda: client.statistics().engine.get("held") == 1)
    assert client.statistics().engine["paused"] == 1
    await client.resume_scheduler()
    await until(lambda: client.statistics().engine == {"running": 0, "waiting": 0})


# ---- sleeping ----


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_sleep_and_wake_with_streams(level: int, client: EngineClient) -> None:
    async with anyio.create_task_group() as group:
        streams = Streams(client, group, SamplingParams(max_tokens=200))
        await streams.started()
        await client.sleep(level, "keep")
        assert await client.is_sleeping()
        steps = await steps_of(client)
        assert await steps_of(client) == steps
        await client.wake_up()
        assert not await client.is_sleeping()
    assert [len(tokens) for tokens in streams.tokens] == [200] * STREAMS
    assert streams.all_in_order()


async def test_sleep_that_waits_answers_when_the_engine_sleeps(client: EngineClient) -> None:
    async with anyio.create_task_group() as group:
        streams = Streams(client, group, SHORT)
        await streams.started()
        await client.sleep(1, "wait")
        assert client.statistics().live_requests == 0
    assert ["sleep", [1]] in await client.call_utility("recorded_calls")
    await client.wake_up(["weights"])
    assert await client.is_sleeping()
    await client.wake_up(["kv_cache"])
    assert len((await client.generate([0], SHORT)).token_ids) == 30


# ---- endings ----


@pytest.mark.parametrize("mode", ["abort", "drain"])
async def test_leaving_a_paused_engine_does_not_wait_for_it(mode: str) -> None:
    policy = ShutdownPolicy(mode=mode, drain_limit=30)  # type: ignore[arg-type]
    async with open_engine_client(scripted_spec(step_delay=0.002), shutdown=policy) as client:
        await client.add_request([0], LONG)
        await client.get_output()
        await client.sleep(1, "keep")
        await client.add_request([0], LONG)
        left = time.monotonic()
    assert time.monotonic() - left < 10


async def test_draining_while_a_pause_waits_ends_with_the_last_request() -> None:
    async with anyio.create_task_group() as group:
        policy = ShutdownPolicy(mode="drain", drain_limit=30)
        async with open_engine_client(scripted_spec(step_delay=0.002), shutdown=policy) as client:
            await client.add_request([0], SamplingParams(max_tokens=100))
            await client.get_output()
            with anyio.move_on_after(0.02):
                await client.pause_scheduler("wait")
            await client.add_request([0], LONG)
            left = time.monotonic()
        assert time.monotonic() - left < 10
        group.cancel_scope.cancel()


async def test_the_death_of_an_engine_fails_who_waits_for_a_pause(client: EngineClient) -> None:
    async def be_told() -> None:
        with pytest.raises(EngineDeadError):
            await client.pause_scheduler("wait")

    await client.add_request([0], LONG)
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(be_told)
        await until(lambda: client.statistics().pending_calls == 20)
        kill(client.health().pid, signal.SIGKILL)


async def test_an_engine_that_fails_to_abort_dies_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
    from anyengine.engines.scripted import ScriptedEngine

    class StubbornEngine(ScriptedEngine):
        def abort_requests(self, handles):
            raise RuntimeError("cannot abort")
    """
    (tmp_path / "stubborn_engine.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    async with open_engine_client(EngineSpec("stubborn_engine:StubbornEngine", {"step_delay": 0.001})) as client:
        await client.add_request([0], LONG)
        with pytest.raises(EngineDeadError, match="RuntimeError: cannot abort"):
            await client.pause_scheduler("abort")


async def test_figures_of_an_engine_that_has_none_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
    from anyengine.engines.scripted import ScriptedEngine

    class SilentEngine(ScriptedEngine):
        def statistics(self):
            return {}
    """
    (tmp_path / "silent_engine.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    async with open_engine_client(EngineSpec("silent_engine:SilentEngine")) as client:
        await client.pause_scheduler()
        await until(lambda: client.statistics().engine == {"paused": 1, "held": 0})
        await client.resume_scheduler()
        await until(lambda: client.statistics().engine == {})
