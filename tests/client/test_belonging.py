"""A client belongs to the loop, the process and the task that opened it: calls from elsewhere are refused in words."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import threading
import traceback
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio
from tests.helpers import until

from anyengine import (
    EngineClient,
    EngineClosedError,
    InprocEngineClient,
    SamplingParams,
    forks,
    open_engine_client,
    open_sync_engine_client,
)
from anyengine.engines.scripted import ScriptedEngine
from anyengine.testing import scripted_spec
from anyengine.transport import collector

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

ENDLESS = SamplingParams(max_tokens=10**6)
LOOPS: dict[str, Callable[[Any], object]] = {
    "asyncio": lambda main: asyncio.run(main()),
    "trio": trio.run,
}


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with open_engine_client(scripted_spec()) as client:
        yield client


async def gather(client: EngineClient) -> None:
    async with client.open_request([1]):
        pass


ASYNC_CALLS: dict[str, Callable[[EngineClient], Awaitable[object]]] = {
    "generate": lambda client: client.generate([1]),
    "open_request": gather,
    "encode": lambda client: client.encode([1]),
    "add_request": lambda client: client.add_request([1]),
    "abort_requests": lambda client: client.abort_requests([1]),
    "get_output": lambda client: client.get_output(),
    "call_utility": lambda client: client.call_utility("echo", 1),
    "a typed utility": lambda client: client.is_sleeping(),
    "connect_client": lambda client: client.connect_client("ipc:///nowhere"),
    "wait_dead": lambda client: client.wait_dead(),
}
PLAIN_CALLS: dict[str, Callable[[EngineClient], object]] = {
    "open_request": lambda client: client.open_request([1]),
    "get_outputs_nowait": lambda client: client.get_outputs_nowait(),
}
REMEDIES = r"(?s)belongs to the event loop that opened it.*anyio\.from_thread\.run.*open_sync_engine_client"


async def in_thread(function: Callable[[], object]) -> list[BaseException]:
    """What ``function`` raises in a thread without a loop."""
    raised: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    await until(ended.is_set)
    thread.join()
    return raised


@pytest.mark.parametrize("loop", LOOPS)
async def test_no_call_from_another_threads_loop_goes_through(client: EngineClient, loop: str) -> None:
    for name, call in ASYNC_CALLS.items():

        async def main(call: Callable[[EngineClient], Awaitable[object]] = call) -> None:
            await call(client)

        (error,) = await in_thread(lambda main=main: LOOPS[loop](main))
        assert type(error) is RuntimeError, name
        assert re.search(REMEDIES, str(error)), name
    assert (await client.generate([1], SamplingParams(max_tokens=2))).finish_reason == "length"
    assert client.statistics().live_requests == 0


async def test_no_plain_call_from_a_thread_without_a_loop_goes_through(client: EngineClient) -> None:
    for name, call in PLAIN_CALLS.items():
        (error,) = await in_thread(lambda call=call: call(client))
        assert type(error) is RuntimeError, name


async def test_four_loops_at_once_are_refused_and_hurt_nobody(client: EngineClient) -> None:
    async def work() -> object:
        return await client.generate([1, 2], SamplingParams(max_tokens=50))

    errors: list[list[BaseException]] = []

    async def elsewhere() -> None:
        errors.append(await in_thread(lambda: asyncio.run(work())))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(elsewhere)
        assert len((await client.generate([1], SamplingParams(max_tokens=100))).token_ids) == 100
    assert [type(error) for (error,) in errors] == [RuntimeError] * 4


async def test_a_stream_is_refused_elsewhere_and_goes_on_at_home(client: EngineClient) -> None:
    async with client.open_request([1], ENDLESS) as request:
        for call in (request.__anext__, request.completion, lambda: request.__aexit__(None, None, None)):
            (error,) = await in_thread(lambda call=call: anyio.run(call))
            assert type(error) is RuntimeError
        assert (await anext(request)).token_ids
    (error,) = await in_thread(lambda: anyio.run(client.open_request, [1]))
    assert type(error) is RuntimeError


@pytest.mark.parametrize("loop", LOOPS)
async def test_a_loop_that_runs_inside_this_one_is_another(client: EngineClient, loop: str, anyio_backend: Any) -> None:
    if anyio_backend[0] == loop:
        pytest.skip("no loop runs inside one of its kind")

    async def main() -> None:
        with pytest.raises(RuntimeError, match="another event loop, or none, in the same thread"):
            await client.generate([1])
        with pytest.raises(RuntimeError, match="another event loop"):
            client.open_request([1])

    LOOPS[loop](main)
    assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids


async def test_looking_is_safe_in_any_thread(client: EngineClient) -> None:
    def look() -> None:
        for _ in range(200):
            assert client.health().state == "alive"
            assert client.statistics().aborting_requests == 0
            assert client.info.max_model_len

    async with client.open_request([1], ENDLESS) as request:
        assert (await anext(request)).token_ids
        assert await in_thread(look) == []


async def test_the_remedy_works(client: EngineClient) -> None:
    completion = await anyio.to_thread.run_sync(
        lambda: anyio.from_thread.run(client.generate, [1], SamplingParams(max_tokens=3))
    )
    assert len(completion.token_ids) == 3


# ---- the block ----


async def test_a_block_left_by_another_task_ends_its_engine_and_says_what_to_do() -> None:
    block = open_engine_client(scripted_spec())
    caught: list[BaseException] = []
    left = anyio.Event()

    async def leave() -> None:
        try:
            await block.__aexit__(None, None, None)
        except BaseException as error:
            caught.append(error)
        left.set()

    async def enter() -> None:
        # A task of its own: its stack of scopes is spoiled.
        client = await block.__aenter__()
        group.start_soon(leave)
        await left.wait()
        assert client.health().state == "closed"
        with pytest.raises(EngineClosedError):
            await client.generate([1])
        # What the entering task has to do all the same, so that this test's own loop is whole.
        block._body_scope.__exit__(None, None, None)  # type: ignore[union-attr]
        await block._group.__aexit__(None, None, None)

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
    (error,) = caught
    assert type(error) is RuntimeError
    for remedy in ("AnyIO's plugin", "event is set", "open_sync_engine_client", "docs/whose-client.md"):
        assert remedy in str(error)


async def test_a_block_left_by_another_task_can_still_be_left_by_its_own() -> None:
    users = collector._users
    block = open_engine_client(scripted_spec())

    async def leave() -> None:
        with pytest.raises(RuntimeError, match="left by another task"):
            await block.__aexit__(None, None, None)

    async with block as client:
        async with anyio.create_task_group() as group:
            group.start_soon(leave)
            group.start_soon(leave)  # while the first one ends the engine
        assert client.health().state == "closed"
    assert collector._users == users


def test_a_unittests_context_is_left_by_another_task() -> None:
    class Case(unittest.IsolatedAsyncioTestCase):
        async def asyncSetUp(self) -> None:
            self.client = await self.enterAsyncContext(open_engine_client(scripted_spec()))

        async def test(self) -> None:
            self.assertEqual(len((await self.client.generate([1], SamplingParams(max_tokens=2))).token_ids), 2)

    result = unittest.TestResult()
    Case("test").run(result)
    assert result.testsRun == 1 and not result.failures
    ((_, text),) = result.errors
    assert "left by another task" in text


def test_a_generator_that_the_loops_end_finalizes() -> None:
    async def clients() -> AsyncIterator[EngineClient]:
        async with open_engine_client(scripted_spec()) as client:
            yield client

    problems: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        generator = clients()
        client = await anext(generator)
        assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids
        keep.append(generator)

    keep: list[object] = []
    asyncio.run(main())
    assert any("left by another task" in str(problem.get("exception")) for problem in problems)


def test_a_second_loop_is_told_and_leaves_nothing_of_the_first() -> None:
    block = open_engine_client(scripted_spec())

    async def enter() -> EngineClient:
        return await block.__aenter__()

    async def again() -> None:
        with pytest.raises(RuntimeError, match="event loop that opened it"):
            await client.generate([1])
        with pytest.raises(RuntimeError, match="event loop that opened it"):
            await block.__aexit__(None, None, None)

    client = asyncio.run(enter())
    asyncio.run(again())
    assert client.health().state == "closed"


# ---- forks ----


def in_fork(function: Callable[[], object]) -> int:
    """Run ``function`` in a forked child, which it must not leave; its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_blocking_client_in_a_fork_says_whose_it_is_and_its_leaving_does_nothing(anyio_backend: Any) -> None:
    block = open_sync_engine_client(scripted_spec(), backend=anyio_backend[0])
    with block as client:
        stream = client.stream([1], ENDLESS)
        stream.__enter__()
        many = client.generate_many([[1]] * 3, SamplingParams(max_tokens=2), max_concurrency=1)
        next(many)

        def use() -> None:
            calls: list[Callable[[], object]] = [
                lambda: client.generate([1]),
                lambda: client.stream([1]),
                lambda: client.add_request([1]),
                lambda: client.get_output(),
                lambda: client.abort_requests([0]),
                lambda: client.call_utility("echo", 1),
                lambda: client.health(),
                lambda: client.statistics(),
                lambda: client.wait_dead(),
                lambda: next(stream),
                lambda: list(client.generate_many([[1]])),
                lambda: list(many),
            ]
            for call in calls:
                with pytest.raises(EngineClosedError, match=f"belongs to process {os.getppid()}, and this is a fork"):
                    call()
            stream.__exit__(None, None, None)
            block.__exit__(None, None, None)

        assert in_fork(use) == 0
        assert len(next(stream).token_ids) > 0
        stream.__exit__(None, None, None)
        assert len(list(many)) == 2
        assert client.health().state == "alive"


def test_an_engine_in_the_callers_thread_is_closed_in_a_fork_and_shut_down_in_its_own_process_alone() -> None:
    shut_down: list[int] = []

    class Engine(ScriptedEngine):
        def shutdown(self) -> None:
            shut_down.append(os.getpid())

    with InprocEngineClient(Engine()) as client:
        client.add_request([1])

        def use() -> None:
            for call in (client.get_output, lambda: client.add_request([1]), lambda: client.call_utility("echo", 1)):
                with pytest.raises(EngineClosedError, match=f"belong to process {os.getppid()}, and this is a fork"):
                    call()
            client.close()
            assert shut_down == []

        assert in_fork(use) == 0
        assert list(client.get_output().token_ids) == [2]
    assert shut_down == [os.getpid()]


def test_what_collects_frames_begins_anew_in_a_fork() -> None:
    with open_sync_engine_client(scripted_spec()):
        assert collector._users == 1  # pyright: ignore[reportPrivateUsage]

        def use() -> None:
            collector.acquire()
            assert collector._users == 1  # pyright: ignore[reportPrivateUsage]
            collector.release()

        assert in_fork(use) == 0


def test_watched_descriptors_lead_nowhere_in_a_fork_that_may_open_no_other() -> None:
    reader, writer = os.pipe()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    for fd in (reader, writer):
        forks.watch(fd)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (writer + 64, limits[1]))
        with pytest.raises(OSError):
            while True:
                taken.append(os.dup(reader))

        def use() -> None:
            os.close(taken[0])  # to look for a file takes a descriptor
            assert [os.readlink(f"/proc/self/fd/{fd}") for fd in (reader, writer)] == [os.devnull] * 2

        assert in_fork(use) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in (reader, writer):
            forks.unwatch(fd)
        for fd in (reader, writer, *taken):
            os.close(fd)


async def test_a_client_in_a_fork_says_whose_it_is_and_its_leaving_does_nothing() -> None:
    block = open_engine_client(scripted_spec())
    async with block as client:
        async with client.open_request([1], ENDLESS) as request:

            def use() -> None:
                calls = [call(client) for call in ASYNC_CALLS.values()]
                coroutines = [*calls, request.__anext__(), request.completion()]
                for coroutine in coroutines:
                    with pytest.raises(EngineClosedError, match="this is a fork"):
                        coroutine.send(None)  # type: ignore[attr-defined]
                for plain in (*PLAIN_CALLS.values(), lambda client: client.health(), lambda c: c.statistics()):
                    with pytest.raises(EngineClosedError, match="this is a fork"):
                        plain(client)
                with pytest.raises(StopIteration):
                    request.__aexit__(None, None, None).send(None)

            assert in_fork(use) == 0
            assert (await anext(request)).token_ids
        assert (await client.generate([1], SamplingParams(max_tokens=2))).token_ids
        assert client.health().state == "alive"


PROGRAM = """
import multiprocessing, os, sys
import anyio
from anyengine import EngineClosedError, SamplingParams, open_engine_client, open_sync_engine_client
from anyengine.engines.scripted import ScriptedEngine
from anyengine.testing import scripted_spec

client_kind, backend, how = sys.argv[1:]

def use(client):
    try:
        client.health()
    except EngineClosedError:
        sys.exit(7)

def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def fork(client):
    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=use, args=(client,))
        process.start()
        process.join()
        return process.exitcode
    pid = os.fork()
    if pid == 0:
        sys.exit(7)  # unwinds through all blocks
    return end_of(pid)

async def main():
    async with open_engine_client(scripted_spec()) as client:
        async with client.open_request([1], SamplingParams(max_tokens=10**6)) as request:
            await anext(request)
            code = fork(client)
            await anext(request)
        completion = await client.generate([1], SamplingParams(max_tokens=2))
    print(code, len(completion.token_ids), client.health().state)

if client_kind == "async":
    anyio.run(main, backend=backend)
else:
    with open_sync_engine_client(scripted_spec(), backend=backend) as client:
        with client.stream([1], SamplingParams(max_tokens=10**6)) as request:
            next(request)
            code = fork(client)
            next(request)
        completion = client.generate([1], SamplingParams(max_tokens=2))
    print(code, len(completion.token_ids), client.health().state)
"""


@pytest.mark.parametrize("how", ["sys.exit", "multiprocessing"])
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_fork_that_ends_in_the_middle_of_the_blocks_ends_nothing_of_its_parents(
    kind: str, how: str, anyio_backend: Any
) -> None:
    if (kind, how, anyio_backend[0]) == ("async", "sys.exit", "trio"):
        pytest.skip(
            "a fork that unwinds trio's loop takes the parent's wake-up away, without any client: os._exit is right"
        )
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, anyio_backend[0], how], timeout=60, capture_output=True, text=True
    )
    assert ended.stdout.split("\n") == ["7 2 closed", ""], ended.stderr
