"""Utility calls, over every kind of client: values and failures, the typed ones, pausing, sleeping."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from tests.contract.clients import Opener, Setting, needs
from tests.contract.steps import FOREVER, ONE, eventually, is_quiet, nothing_is_left, read, tokens_of, work_on
from tests.engine_control.test_utilities import CALLS, RECORDED

from anyengine import (
    EngineClient,
    EngineSpec,
    SamplingParams,
    UnencodableError,
    UnencodableResultError,
    UtilityError,
    UtilityTimeoutError,
)
from anyengine.utilities import PauseMode

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

SLOW: dict[str, Any] = {"step_delay": 0.001}


# ---- values and failures ----


async def test_values_come_back_as_they_went(open_client: Opener) -> None:
    values = [None, True, -1, 2**64 - 1, 1.5, "ü\0", b"\xff", [], {}, {"a": [[1], {"b": None}]}, "x" * 300_000]
    async with open_client() as client:
        for value in values:
            assert await client.call_utility("echo", value) == value
        assert nothing_is_left(client)


async def test_an_exception_comes_with_type_text_and_traceback(open_client: Opener) -> None:
    async with open_client(SLOW) as client, client.open_request([0], SamplingParams(max_tokens=50)) as other:
        with pytest.raises(UtilityError) as caught:
            await client.call_utility("raise_error", "boom-123")
        error = caught.value
        assert (error.method, error.rank) == ("raise_error", 0)
        assert (error.exception_type, error.message) == ("RuntimeError", "boom-123")
        assert "faults.py" in (error.traceback or "")
        assert "RuntimeError: boom-123" in str(error)
        with pytest.raises(UtilityError) as caught:
            await client.call_utility("echo")
        assert caught.value.exception_type == "TypeError"
        assert tokens_of(await read(other)) == list(range(1, 51))


async def test_an_engine_knows_whether_its_process_is_its_own(open_client: Opener, setting: Setting) -> None:
    async with open_client(EngineSpec("tests.contract.owning_engine:OwningEngine")) as client:
        assert await client.call_utility("owned") is (setting.kind in ("process", "attached", "sync"))


async def test_an_unknown_utility_is_refused_by_name(open_client: Opener) -> None:
    async with open_client() as client:
        for name in ("nonsense", "", "step", "__init__", "describe"):
            with pytest.raises(UtilityError, match=r"has no such utility; it has .*echo") as caught:
                await client.call_utility(name)
            assert (caught.value.method, caught.value.exception_type) == (name, None)
        with pytest.raises(TypeError, match="method=3"):
            await client.call_utility(3)  # type: ignore[arg-type]


@needs("encode")
async def test_what_cannot_travel_fails_its_call_alone(open_client: Opener) -> None:
    async with open_client() as client:
        for value in ({1}, 2**70, [object()], {"a": {"b": print}}):
            with pytest.raises(UnencodableError, match=r"args\[1\]"):
                await client.call_utility("echo", "fine", value)
        with pytest.raises(UnencodableResultError, match=r"result\['items'\]\[1\].*function"):
            await client.call_utility("return_unencodable")
        assert await client.call_utility("echo", "alive") == "alive"
        assert nothing_is_left(client)


@needs("wait")
async def test_a_call_ends_with_its_timeout_and_the_late_answer_is_ignored(open_client: Opener) -> None:
    async with open_client() as client:
        with pytest.raises(UtilityTimeoutError, match=r"'sleep_for'.*no answer within 0\.05 s") as caught:
            await client.call_utility("sleep_for", 0.2, timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert client.statistics().pending_calls == 0
        assert await client.call_utility("echo", "mine", timeout=30) == "mine"


async def test_each_typed_utility_reaches_the_engine(open_client: Opener) -> None:
    async with open_client() as client:
        for name, arguments, expected in CALLS:
            assert await getattr(client, name)(**arguments) == expected, name
        recorded = await client.call_utility("recorded_calls")
        assert [list(call) for call in recorded] == RECORDED


# ---- pausing ----


async def running(client: EngineClient, group: anyio.abc.TaskGroup, max_tokens: int) -> list[tuple[int, str | None]]:
    """Start three requests, which have begun when this returns: the list to which each adds its tokens and reason."""
    ended: list[tuple[int, str | None]] = []
    begun: set[int] = set()

    async def run(number: int) -> None:
        tokens: list[int] = []
        async with client.open_request([number * 1000], SamplingParams(max_tokens=max_tokens)) as request:
            async for output in request:
                begun.add(number)
                tokens += output.token_ids
        assert tokens == list(range(number * 1000 + 1, number * 1000 + 1 + len(tokens)))
        ended.append((len(tokens), output.finish_reason))

    for number in range(3):
        group.start_soon(run, number)
    await eventually(lambda: len(begun) == 3)
    return ended


async def test_pause_that_aborts_ends_everything_first(open_client: Opener) -> None:
    async with open_client(SLOW) as client:
        added = await client.add_request([0], FOREVER)
        async with anyio.create_task_group() as group:
            ended = await running(client, group, 10**6)
            await client.pause_scheduler("abort")
            assert await is_quiet(client)
        assert [reason for _, reason in ended] == ["abort"] * 3
        last = None
        while last is None:
            for handle, _, details in (await client.get_output()).rows():
                assert handle == added
                last = details
        assert last.finish_reason == "abort"
        assert await client.is_scheduler_paused()
        await client.resume_scheduler()
        await work_on(client)


async def test_pause_that_keeps_stops_at_once_and_goes_on_without_a_gap(open_client: Opener) -> None:
    async with open_client(SLOW) as client:
        async with anyio.create_task_group() as group:
            ended = await running(client, group, 100)
            await client.pause_scheduler("keep")
            assert await is_quiet(client)
            assert not ended
            await client.resume_scheduler()
        assert ended == [(100, "length")] * 3
        assert not await client.is_scheduler_paused()


@needs("wait")
async def test_pause_that_waits_lets_everything_finish_first(open_client: Opener) -> None:
    async with open_client(SLOW) as client:
        async with anyio.create_task_group() as group:
            ended = await running(client, group, 100)
            await client.pause_scheduler("wait")
            assert client.statistics().live_requests == 0
            assert await is_quiet(client)
        assert ended == [(100, "length")] * 3


async def test_a_pause_that_waits_for_nothing_is_answered_at_once(open_client: Opener) -> None:
    async with open_client() as client:
        await client.pause_scheduler("wait")
        assert await client.is_scheduler_paused()


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_what_comes_in_a_pause_is_held_and_runs_after_it(mode: PauseMode, open_client: Opener) -> None:
    async with open_client(SLOW) as client:
        await client.pause_scheduler(mode)
        handles = [await client.add_request([number * 100], SamplingParams(max_tokens=2)) for number in range(3)]
        async with client.open_request([1000], SamplingParams(max_tokens=30)) as request:
            assert await is_quiet(client)
            assert client.statistics().unread_outputs == 0
            await client.resume_scheduler()
            assert tokens_of(await read(request)) == list(range(1001, 1031))
        tokens: dict[int, list[int]] = {handle: [] for handle in handles}
        while sum(map(len, tokens.values())) < 6:
            for handle, more, _ in (await client.get_output()).rows():
                tokens[handle] += more
        assert list(tokens.values()) == [[1, 2], [101, 102], [201, 202]]
        await eventually(lambda: nothing_is_left(client))


async def test_what_is_held_can_be_cancelled(open_client: Opener) -> None:
    async with open_client(SLOW) as client:
        await client.pause_scheduler()
        for _ in range(3):
            async with client.open_request([0], FOREVER, request_id="held"):
                pass
            handle = await client.add_request([0], FOREVER)
            await client.abort_requests([handle])
        kept = await client.add_request([7], ONE)
        await client.resume_scheduler()
        rows = [(kept, [8])]
        while rows:  # of the cancelled ones nothing comes, but for the last rows of the in-process client
            for handle, tokens, _ in (await client.get_output()).rows():
                if tokens:
                    assert (handle, list(tokens)) == rows.pop()
        await work_on(client)


# ---- sleeping ----


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_sleep_keeps_requests_and_wake_up_goes_on_with_them(level: int, open_client: Opener) -> None:
    async with open_client(SLOW) as client:
        async with anyio.create_task_group() as group:
            ended = await running(client, group, 100)
            await client.sleep(level, "keep")
            assert await client.is_sleeping()
            assert await is_quiet(client)
            await client.wake_up()
            assert not await client.is_sleeping()
        assert ended == [(100, "length")] * 3


async def test_an_engine_wakes_up_part_by_part(open_client: Opener) -> None:
    async with open_client() as client:
        await client.sleep(1)
        held = await client.add_request([5], ONE)
        with pytest.raises(UtilityError, match="wake_up"):
            await client.resume_scheduler()
        await client.wake_up(["weights"])
        assert await client.is_sleeping()
        await client.wake_up(["kv_cache"])
        assert not await client.is_sleeping()
        assert [list(row[1]) for row in (await client.get_output()).rows() if row[0] == held] == [[6]]
        recorded = await client.call_utility("recorded_calls")
        assert [list(call) for call in recorded[1:]] == [
            ["sleep", [1]],
            ["wake_up", [["weights"]]],
            ["wake_up", [["kv_cache"]]],
        ]
