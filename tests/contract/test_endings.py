"""The end of an engine or of a client, over every kind of client: who waits is told, and what was sent comes first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio import to_thread
from tests.contract.clients import Ability, Opener, Setting, needs
from tests.contract.steps import FOREVER, ONE, eventually, nothing_is_left, nothing_waits, read, work_on

from anyengine import (
    EngineClient,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    RestartPolicy,
    SamplingParams,
    ShutdownPolicy,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

SLOW: dict[str, Any] = {"step_delay": 0.001}


async def read_stream(client: EngineClient) -> None:
    async with client.open_request([0], FOREVER) as request:
        await read(request)


async def read_steps(client: EngineClient) -> None:
    while True:
        await client.get_output()


WAITERS: dict[str, tuple[int, tuple[Ability, ...], Callable[[EngineClient], Awaitable[Any]]]] = {
    "stream": (5, (), read_stream),
    "generate": (5, (), lambda client: client.generate([0], FOREVER)),
    "get_output": (1, (), read_steps),
    "call_utility": (5, ("wait",), lambda client: client.pause_scheduler("wait")),
    "wait_dead": (2, ("watch",), lambda client: client.wait_dead()),
}
"""What can wait for an engine: how many at a time, what a kind of client must be able to do for it."""


async def die(client: EngineClient) -> None:
    """Have the engine die in its next step."""
    await client.call_utility("raise_in_step", "boom-123")


async def errors_of_waiters(client: EngineClient, setting: Setting, end: Callable[[], Awaitable[Any]]) -> list[Any]:
    """The errors of one of each kind of waiter, which ``end`` brings."""
    errors: list[EngineError] = []
    expected = 0

    async def catch(wait: Callable[[EngineClient], Awaitable[Any]]) -> None:
        with pytest.raises(EngineError) as caught:
            await wait(client)
        errors.append(caught.value)

    await client.add_request([0], FOREVER)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for count, abilities, wait in WAITERS.values():
                if all(setting.can(ability) for ability in abilities):
                    expected += count
                    for _ in range(count):
                        group.start_soon(catch, wait)
            if setting.can("wait"):
                await eventually(lambda: client.statistics().pending_calls == 5)
                await eventually(lambda: client.statistics().live_requests == 1 + 10)
            await end()
    assert len(errors) == expected
    return errors


# ---- death ----


async def test_a_death_reaches_every_waiter(open_client: Opener, setting: Setting) -> None:
    async with open_client(SLOW) as client:
        errors = await errors_of_waiters(client, setting, lambda: die(client))
        assert {type(error) for error in errors} == {EngineDeadError}
        assert len({id(error) for error in errors}) == len(errors)
        report = errors[0].report
        assert all(error.report is report for error in errors)
        assert (report.phase, report.exception_type, report.exception_message) == ("serve", "RuntimeError", "boom-123")
        assert "faults.py" in report.traceback
        assert "RuntimeError: boom-123" in str(errors[0])
        await latecomers(client, setting, EngineDeadError)
        if setting.can("watch"):
            assert client.health().state == "dead"
            assert not client.health()


@needs("signal")
async def test_a_kill_reaches_every_waiter(open_client: Opener, setting: Setting) -> None:
    async with open_client(SLOW) as client:

        async def kill() -> None:
            os.kill(client.health().pid, signal.SIGKILL)

        errors = await errors_of_waiters(client, setting, kill)
        assert {type(error) for error in errors} == {EngineDeadError}
        assert len({id(error.report) for error in errors}) == 1
        if setting.can("status"):
            assert errors[0].report.signal == signal.SIGKILL
        await latecomers(client, setting, EngineDeadError)


async def latecomers(client: EngineClient, setting: Setting, kind: type[EngineError]) -> None:
    """Every call of a client that has ended raises an error of this kind."""
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: client.generate([0], ONE),
        lambda: client.open_request([0], ONE).__aenter__(),
        lambda: client.add_request([0], ONE),
        lambda: client.abort_requests([0]),
        lambda: read_steps(client),  # what had come before can be read
        lambda: client.call_utility("echo", 1),
        lambda: client.is_sleeping(),
        lambda: client.pause_scheduler("wait"),
    ]
    if setting.can("watch"):
        calls.append(lambda: client.wait_dead())
    for call in calls:
        with anyio.fail_after(30), pytest.raises(kind) as caught:
            await call()
        assert type(caught.value) is kind
    if setting.can("watch"):
        assert nothing_waits(client)


async def test_what_came_before_the_death_is_read_before_the_error(open_client: Opener, setting: Setting) -> None:
    async with open_client(SLOW) as client:
        async with client.open_request([0], FOREVER) as request:
            tokens = (await anext(request)).token_ids
            await client.add_request([5000], FOREVER)
            steps = list((await client.get_output()).token_ids)
            await die(client)
            if setting.can("watch"):
                with pytest.raises(EngineDeadError):
                    await client.wait_dead()
            with pytest.raises(EngineDeadError, match="boom-123"):
                while True:
                    tokens += (await anext(request)).token_ids
            with pytest.raises(EngineDeadError, match="boom-123"):
                while True:
                    steps += (await client.get_output()).token_ids
        assert len(tokens) > len(steps) >= 1
        assert tokens == list(range(1, 1 + len(tokens)))
        assert steps == list(range(5001, 5001 + len(steps)))


@needs("watch")
async def test_a_death_that_nobody_was_told_of_comes_out_of_the_block(open_client: Opener) -> None:
    with pytest.raises(EngineDeadError, match="boom-123"):
        async with open_client() as client:
            await die(client)
            await eventually(lambda: client.health().state == "dead")


async def test_the_bodys_own_error_comes_out_bare(open_client: Opener) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        async with open_client(SLOW) as client:
            await client.add_request([0], FOREVER)
            await client.get_output()
            1 / 0  # noqa: B018
    assert caught.value.__cause__ is None


async def test_a_death_concerns_one_client_alone(open_client: Opener) -> None:
    async with open_client() as other, open_client(SLOW) as client:
        await die(client)
        with pytest.raises(EngineDeadError, match="boom-123"):
            await client.generate([0], FOREVER)
        await work_on(other)


@needs("options", "restart")
async def test_an_engine_that_died_is_started_again(open_client: Opener, setting: Setting) -> None:
    restart = RestartPolicy(limit=3, window=600, backoff=0)
    async with open_client(SLOW, restart=restart) as client:
        reports: set[int] = set()
        for _ in range(2):
            errors = await errors_of_waiters(client, setting, lambda: die(client))
            assert {type(error) for error in errors} == {EngineDeadError}
            reports |= {id(error.report) for error in errors}
            await work_on(client)
            assert await client.call_utility("echo", "alive") == "alive"
        assert len(reports) == 2
        await eventually(lambda: nothing_is_left(client))


@needs("options", "restart")
async def test_who_reads_steps_is_told_of_a_death_once(open_client: Opener) -> None:
    """While the engine is down, reading waits for its next life like any other call: a dispatcher does not spin."""
    told: list[EngineDeadError] = []
    tokens: list[int] = []

    async def dispatch(client: EngineClient) -> None:
        while 8 not in tokens:
            try:
                tokens.extend((await client.get_output()).token_ids)
            except EngineDeadError as error:
                told.append(error)

    restart = RestartPolicy(limit=1, backoff=0.2)
    async with open_client(SLOW, restart=restart) as client, anyio.create_task_group() as group:
        await client.add_request([100], FOREVER)
        group.start_soon(dispatch, client)
        await die(client)
        await eventually(lambda: told)
        await client.add_request([7], ONE)  # which waits for the next life
    assert tokens == [*range(101, 100 + len(tokens)), 8]
    assert len(told) == 1


# ---- closing ----


async def test_after_the_block_every_call_says_that_the_client_is_closed(open_client: Opener, setting: Setting) -> None:
    async with open_client(SLOW) as client:
        unopened = client.open_request([0], ONE)
        await client.add_request([0], FOREVER)
        await client.get_output()
    await latecomers(client, setting, EngineClosedError)
    with pytest.raises(EngineClosedError):
        await unopened.__aenter__()
    if setting.can("watch"):
        assert client.health().state == "closed"
        assert not client.health()


@needs("wait")
async def test_closing_reaches_every_waiter(open_client: Opener, setting: Setting) -> None:
    """Requests end, each with its last output; calls and those who wait for a death are told."""
    told: list[Exception] = []
    reasons: list[str | None] = []
    steps: list[Any] = []

    async def catch(wait: Awaitable[Any]) -> None:
        with pytest.raises(EngineClosedError) as caught:
            await wait
        told.append(caught.value)

    async def end(client: EngineClient, request: bool) -> None:
        if request:
            async with client.open_request([0], FOREVER) as stream:
                async for output in stream:
                    if output.finish_reason is not None:
                        reasons.append(output.finish_reason)
                        break
        else:
            reasons.append((await client.generate([0], FOREVER)).finish_reason)

    async def collect(client: EngineClient) -> None:
        with pytest.raises(EngineClosedError):
            while True:
                steps.append(await client.get_output())

    async with anyio.create_task_group() as group:
        async with open_client(SLOW) as client:
            await client.add_request([0], FOREVER)
            group.start_soon(collect, client)
            for number in range(6):
                group.start_soon(end, client, number % 2 == 0)
            for _ in range(3):
                group.start_soon(catch, client.pause_scheduler("wait"))
                group.start_soon(catch, client.wait_dead())
            await eventually(lambda: client.statistics().live_requests == 7)
            await eventually(lambda: client.statistics().pending_calls == 3)
    assert reasons == ["abort"] * 6
    assert len({id(error) for error in told}) == 6
    assert steps


@needs("options")
@pytest.mark.parametrize("limit", [30.0, 0.1])
async def test_draining_gives_every_open_request_its_last_output(limit: float, open_client: Opener) -> None:
    ended: list[tuple[int, str | None]] = []

    async def run_steps(client: EngineClient) -> None:
        count, reason = 0, None
        while reason is None:
            try:
                step = await client.get_output()
            except EngineClosedError:  # the last answer for what was aborted here
                reason = "abort"
                break
            for _, tokens, details in step.rows():
                count += len(tokens)
                reason = None if details is None else details.finish_reason
        ended.append((count, reason))

    async def run(client: EngineClient, number: int, length: int) -> None:
        if number % 2:
            completion = await client.generate([0], SamplingParams(max_tokens=length))
            ended.append((len(completion.token_ids), completion.finish_reason))
            return
        async with client.open_request([0], SamplingParams(max_tokens=length)) as request:
            count = 0
            async for output in request:
                count += len(output.token_ids)
                if output.finish_reason is not None:
                    ended.append((count, output.finish_reason))
                    break

    length = 100 if limit == 30 else 10**6
    policy = ShutdownPolicy(mode="drain", drain_limit=limit)
    async with anyio.create_task_group() as group:
        async with open_client(SLOW, shutdown=policy) as client:
            for number in range(6):
                group.start_soon(run, client, number, length)
            await client.add_request([0], SamplingParams(max_tokens=length))
            group.start_soon(run_steps, client)
            await eventually(lambda: client.statistics().live_requests == 7)
    if limit == 30:
        assert ended == [(100, "length")] * 7
    else:
        assert [reason for _, reason in ended] == ["abort"] * 7


# ---- where it runs ----


async def test_a_client_works_off_the_main_thread_and_leaves_signals_alone(
    open_client: Opener, setting: Setting
) -> None:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]

    async def main() -> None:
        assert threading.current_thread() is not threading.main_thread()
        async with open_client(SLOW) as client:
            await work_on(client)
            assert await client.call_utility("echo", 1) == 1
            async with client.open_request([0], FOREVER) as request:
                await anext(request)
            assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers

    def run() -> None:
        for _ in range(2):
            anyio.run(main, backend=setting.backend, backend_options=setting.backend_options)

    await to_thread.run_sync(run)
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
