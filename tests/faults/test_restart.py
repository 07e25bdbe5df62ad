"""A dead engine is started again as often as the policy allows, and nothing is replayed behind the caller's back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from tests.helpers import is_running, until

from anyengine import (
    EngineClient,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineSpec,
    EngineStartError,
    ProcessLauncher,
    RestartPolicy,
    SamplingParams,
    UtilityTimeoutError,
    open_engine_client,
)
from anyengine.client.engine_client import session_of
from anyengine.client.keeper import EngineKeeper
from anyengine.testing import scripted_spec
from anyengine.transport.endpoints import Endpoints

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

FOREVER = SamplingParams(max_tokens=10_000_000)
AT_ONCE = RestartPolicy(limit=3, window=600, backoff=0)


async def is_over(client: EngineClient, pid: int) -> None:
    """Return when the life of the engine ``pid`` is over; the next one may have begun by then."""
    await until(lambda: client.health().state != "alive" or client.health().pid != pid)


async def die(client: EngineClient) -> None:
    """Kill the engine, and return when its death is known."""
    os.kill(client.health().pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await client.wait_dead()


async def test_a_child_killed_in_a_loop_serves_again_each_time() -> None:
    async with open_engine_client(scripted_spec(), restart=AT_ONCE) as client:
        pids: set[int] = set()
        for start in range(3):
            assert (await client.generate([start], SamplingParams(max_tokens=2))).token_ids == [start + 1, start + 2]
            pids.add(client.health().pid)
            os.kill(client.health().pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await client.wait_dead()
            assert client.health().state == "restarting"
        assert (await client.generate([7], SamplingParams(max_tokens=1))).token_ids == [8]
        assert client.health().state == "alive"
        pids.add(client.health().pid)
        assert len(pids) == 4
        assert [pid for pid in pids if is_running(pid)] == [client.health().pid]


async def test_each_waiter_of_the_dead_life_is_told_and_the_next_life_knows_nothing_of_them() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001), restart=AT_ONCE) as client:
        errors: list[EngineDeadError] = []

        async def read() -> None:
            with pytest.raises(EngineDeadError) as caught:
                async with client.open_request([0], FOREVER) as request:
                    async for _ in request:
                        pass
            errors.append(caught.value)

        async def call() -> None:
            with pytest.raises(EngineDeadError) as caught:
                await client.call_utility("sleep_for", 0.3)
                await client.call_utility("kill", signal.SIGKILL)
            errors.append(caught.value)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(read)
            await until(lambda: client.statistics().live_requests == 20)
            group.start_soon(call)
        assert len(errors) == 21
        assert len({id(error) for error in errors}) == 21
        await client.call_utility("echo", 1)
        await until(lambda: client.statistics().engine in ({}, {"running": 0, "waiting": 0}))
        assert client.statistics().live_requests == client.statistics().pending_calls == 0


async def test_requests_made_while_it_is_down_wait_for_the_next_life() -> None:
    policy = RestartPolicy(limit=1, backoff=0.2)
    async with open_engine_client(scripted_spec(), restart=policy) as client:
        os.kill(client.health().pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await client.wait_dead()
        results: list[Any] = []

        async def keep(awaitable: Any) -> None:
            results.append(await awaitable)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(keep, client.generate([1], SamplingParams(max_tokens=1)))
                group.start_soon(keep, client.call_utility("echo", "later"))
                group.start_soon(keep, client.add_request([5], SamplingParams(max_tokens=1)))
                await anyio.wait_all_tasks_blocked()
                assert not results
            assert (await client.get_output()).token_ids.tolist() == [6]  # type: ignore[attr-defined]
        assert len(results) == 3


async def test_requests_made_while_it_is_down_fail_if_the_policy_says_so() -> None:
    policy = RestartPolicy(limit=1, backoff=0.3, while_down="fail")
    async with open_engine_client(scripted_spec(), restart=policy) as client:
        pid = client.health().pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await client.wait_dead()
        for attempt in (client.generate([1]), client.add_request([1]), client.call_utility("echo", 1)):
            with pytest.raises(EngineDeadError, match=str(pid)):
                await attempt
        await until(lambda: client.health().state == "alive")
        assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]


async def test_after_the_limit_it_stays_dead() -> None:
    with pytest.raises(EngineDeadError) as at_exit:
        async with open_engine_client(scripted_spec(), restart=RestartPolicy(limit=1, backoff=0)) as client:
            for _ in range(2):
                await client.call_utility("echo", 1)
                pid = client.health().pid
                os.kill(pid, signal.SIGKILL)
                await is_over(client, pid)
            await until(lambda: client.health().state == "dead")
    assert at_exit.value.report.pid == pid


async def test_an_old_restart_counts_no_longer() -> None:
    async with open_engine_client(scripted_spec(), restart=RestartPolicy(limit=1, window=0.001, backoff=0)) as client:
        for _ in range(3):
            await client.call_utility("echo", 1)
            os.kill(client.health().pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await client.wait_dead()
        await client.call_utility("echo", 1)


async def test_a_start_that_fails_counts_and_the_waiters_learn_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once_engine.py").write_text(
        "import pathlib\n"
        "from anyengine.engines.scripted import ScriptedEngine\n"
        "class OnceEngine(ScriptedEngine):\n"
        "    def load(self, progress):\n"
        "        marker = pathlib.Path(__file__).with_name('started')\n"
        "        if marker.exists():\n"
        "            raise RuntimeError('the device is gone-417')\n"
        "        marker.touch()\n"
        "        super().load(progress)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineDeadError, match="gone-417"):
        async with open_engine_client(
            EngineSpec("once_engine:OnceEngine"), restart=RestartPolicy(limit=2, backoff=0)
        ) as client:
            os.kill(client.health().pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await client.wait_dead()
            await client.generate([1])


async def test_leaving_the_block_ends_a_restart_and_tells_who_waits_for_it() -> None:
    errors: list[EngineError] = []

    async def wait(client: EngineClient) -> None:
        with pytest.raises(EngineError) as caught:
            await client.generate([1])
        errors.append(caught.value)

    for backoff in (0.0, 30.0):
        errors.clear()
        async with anyio.create_task_group() as group:
            with anyio.fail_after(10):
                async with open_engine_client(
                    scripted_spec(load_seconds=0.3), restart=RestartPolicy(limit=1, backoff=backoff)
                ) as client:
                    os.kill(client.health().pid, signal.SIGKILL)
                    with pytest.raises(EngineDeadError):
                        await client.wait_dead()
                    group.start_soon(wait, client)
                    await anyio.wait_all_tasks_blocked()
                    assert client.health().state == "restarting"
        assert [type(error) for error in errors] == [EngineClosedError]


async def test_a_close_in_the_moment_of_a_death_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart's task has not had its first turn when the block is left; what it would start, nobody would end."""
    started: list[int] = []
    start = ProcessLauncher.start

    def note(self: ProcessLauncher, bootstrap: Any) -> Any:
        host = start(self, bootstrap)
        started.append(host.pid)
        return host

    monkeypatch.setattr(ProcessLauncher, "start", note)
    for _ in range(5):
        with contextlib.suppress(EngineDeadError):
            async with open_engine_client(scripted_spec(), restart=AT_ONCE) as client:
                await client.call_utility("raise_in_step", "x" * 200_000)
                await client.generate([0])
    assert not [pid for pid in started if is_running(pid)]


async def test_the_timeout_of_a_call_covers_the_wait_for_a_restart() -> None:
    async with open_engine_client(scripted_spec(), restart=RestartPolicy(limit=1, backoff=20)) as client:
        os.kill(client.health().pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await client.wait_dead()
        with anyio.fail_after(10), pytest.raises(UtilityTimeoutError, match="restarting"):
            await client.call_utility("echo", 1, timeout=0.2)


async def test_steps_of_both_lives_and_the_death_between_come_in_their_order() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001), restart=AT_ONCE) as client:
        await client.add_request([100], FOREVER)
        await until(lambda: client.statistics().unread_outputs > 3)
        pid = client.health().pid
        os.kill(pid, signal.SIGKILL)
        await is_over(client, pid)
        await client.add_request([5000], SamplingParams(max_tokens=3))
        await until(lambda: client.statistics().live_requests == 0)
        tokens: list[int] = []
        with pytest.raises(EngineDeadError):
            while True:
                tokens += (await client.get_output()).token_ids
        assert len(tokens) > 3
        assert tokens == list(range(101, 101 + len(tokens)))
        later: list[int] = []
        while len(later) < 3:
            later += (await client.get_output()).token_ids
        assert later == [5001, 5002, 5003]


async def test_a_death_that_concerns_nobody_is_logged_and_not_handed_to_the_next_reader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_engine_client(scripted_spec(), restart=AT_ONCE) as client:
        with caplog.at_level(logging.WARNING, "anyengine"):
            os.kill(client.health().pid, signal.SIGKILL)
            await until(lambda: "restart 1 of 3" in caplog.text)
        assert "SIGKILL" in caplog.text
        await client.add_request([5], SamplingParams(max_tokens=1))
        assert list((await client.get_output()).token_ids) == [6]


class RefusingLauncher(ProcessLauncher):
    """Starts ``good`` engines, then raises ``error`` in place of ``bad`` more."""

    def __init__(self, error: BaseException, *, good: int, bad: int) -> None:
        super().__init__()
        object.__setattr__(self, "calls", iter([None] * good + [error] * bad))

    def start(self, bootstrap: Any) -> Any:
        error = next(self.calls, None)  # type: ignore[attr-defined]
        if error is not None:
            raise error
        return super().start(bootstrap)


class DevicesGoneError(Exception):
    """An error of a launcher of one's own."""


LAUNCH_ERRORS = [
    BlockingIOError(11, "Resource temporarily unavailable"),
    UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
    ValueError("embedded null byte"),
    RuntimeError("can't start new thread"),
    MemoryError(),
    DevicesGoneError("all of them"),
    StopIteration(),
    SystemExit("a launcher's own"),
    EngineClosedError("a launcher's own"),
]


@pytest.mark.parametrize("error", LAUNCH_ERRORS, ids=lambda error: type(error).__name__)
async def test_a_restart_whose_launch_raises_is_a_death_of_phase_launch(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = RefusingLauncher(error, good=1, bad=2)
    with anyio.fail_after(20):
        async with open_engine_client(
            scripted_spec(), restart=AT_ONCE, launcher=launcher, on_progress=lambda *_: None
        ) as client:
            await die(client)
            # Two launches fail, which counts, and the third serves.
            assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]
    assert "could not be started; restart 3 of 3" in caplog.text
    assert "on_progress" not in caplog.text

    launcher = RefusingLauncher(error, good=1, bad=9)
    with anyio.fail_after(20), pytest.raises(EngineDeadError) as caught:
        async with open_engine_client(
            scripted_spec(), restart=AT_ONCE, launcher=launcher, on_progress=lambda *_: None
        ) as client:
            await die(client)
            await client.generate([1])
    report = caught.value.report
    assert (report.phase, report.pid, report.exception_type) == ("launch", None, type(error).__name__)
    assert str(error) in (report.exception_message or "")


@pytest.mark.parametrize("error", LAUNCH_ERRORS, ids=lambda error: type(error).__name__)
async def test_a_first_launch_that_raises_is_a_failed_start(error: BaseException) -> None:
    with pytest.raises(EngineStartError) as caught:
        async with open_engine_client(scripted_spec(), launcher=RefusingLauncher(error, good=0, bad=9)):
            pytest.fail("the block was entered")
    report = caught.value.report
    assert (report.phase, report.pid, report.exception_type) == ("launch", None, type(error).__name__)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyError("mine"), asyncio.CancelledError("mine"), trio.TooSlowError("mine")])
async def test_only_what_on_progress_raises_is_blamed_on_it(error: BaseException) -> None:
    starts: list[str] = []

    def fail_later(stage: str, fraction: float | None) -> None:
        if fraction == 0:
            starts.append(stage)
        if len(starts) > 1:
            raise error

    with anyio.fail_after(20), pytest.raises(EngineDeadError) as caught:
        async with open_engine_client(
            scripted_spec(), restart=RestartPolicy(limit=1, backoff=0), on_progress=fail_later
        ) as client:
            await die(client)
            await client.generate([1])
    assert caught.value.report.phase == "load"
    assert f": on_progress raised {type(error).__name__}: " in str(caught.value)


async def test_arguments_that_cannot_travel_any_more_end_that_life_and_name_themselves() -> None:
    """The application changed them after it had opened the client."""
    arguments: dict[str, Any] = {"vocab_size": 100}
    spec = EngineSpec("anyengine.engines.scripted:ScriptedEngine", arguments)
    with anyio.fail_after(20), pytest.raises(EngineDeadError) as caught:
        async with open_engine_client(spec, restart=RestartPolicy(limit=2, backoff=0)) as client:
            arguments["vocab_size"] = object()
            await die(client)
            await client.generate([1])
    text = str(caught.value)
    assert "the client could not start it again: UnencodableError: " in text
    assert "vocab_size" in text
    assert "on_progress" not in text


async def test_a_guest_that_cannot_be_introduced_does_not_keep_the_engine_in_its_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the introduction raises."""

    async def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async with open_engine_client(scripted_spec(), restart=RestartPolicy(limit=2, backoff=0)) as client:
        monkeypatch.setattr(EngineKeeper, "_introduce_guests", fail)
        await die(client)
        with anyio.fail_after(20), pytest.raises(EngineDeadError, match="could not start it again: OSError"):
            await client.generate([1])


@pytest.mark.parametrize("transport", ["ipc", "tcp", "thread"])
async def test_each_life_sends_its_outputs_to_a_socket_of_its_own(transport: Any) -> None:
    where: dict[str, Any] = {"placement": "thread"} if transport == "thread" else {"transport": transport}
    lives = 50 if transport == "thread" else 6
    async with open_engine_client(
        scripted_spec(), restart=RestartPolicy(limit=lives, window=600, backoff=0), **where
    ) as client:
        endpoints = session_of(client).endpoints
        addresses: set[str] = set()
        descriptors: list[int] = []
        for _ in range(lives):
            await client.call_utility("echo", 1)
            addresses.add(endpoints.output_address)
            descriptors.append(len(os.listdir("/proc/self/fd")))
            await client.call_utility("raise_in_step", "the end of this life")
            with pytest.raises(EngineDeadError):
                await client.wait_dead()
        assert (await client.generate([1], SamplingParams(max_tokens=2))).token_ids == [2, 3]
    assert len(addresses) == lives
    assert max(descriptors[2:]) <= max(descriptors[:2]) + 6  # some are closed by ZeroMQ's thread, a moment later


async def test_no_descriptor_for_the_next_lifes_socket_is_a_death_of_phase_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Endpoints) -> None:
        raise OSError(24, "Too many open files")

    async with open_engine_client(scripted_spec(), restart=RestartPolicy(limit=2, backoff=0)) as client:
        monkeypatch.setattr(Endpoints, "begin_life", fail)
        await die(client)
        with anyio.fail_after(20), pytest.raises(EngineDeadError, match="Too many open files") as caught:
            await client.generate([1])
    assert caught.value.report.phase == "launch"


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"RestartPolicy\.limit=0"):
        RestartPolicy(limit=0)
    with pytest.raises(TypeError, match=r"RestartPolicy\.limit=1\.5"):
        RestartPolicy(limit=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"RestartPolicy\.window=-1"):
        RestartPolicy(window=-1)
    with pytest.raises(ValueError, match=r"RestartPolicy\.backoff=-1"):
        RestartPolicy(backoff=-1)
    with pytest.raises(ValueError, match=r"RestartPolicy\.while_down='hope'"):
        RestartPolicy(while_down="hope")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"on_death='cancel'.*restart"):
        open_engine_client(scripted_spec(), on_death="cancel", restart=RestartPolicy())
    with pytest.raises(TypeError, match="restart=3"):
        open_engine_client(scripted_spec(), restart=3)  # type: ignore[arg-type]
