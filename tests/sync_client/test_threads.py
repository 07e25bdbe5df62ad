"""Where the client can be used: in any thread, in many, inside a running loop, and not in its own thread."""

from __future__ import annotations

import contextvars
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import anyio
import pytest
from anyio import to_thread
from tests.helpers import until_sync
from tests.sync_client.conftest import Opener
from tests.sync_client.test_calls import FOREVER, nothing_runs

from anyengine import (
    EngineClosedError,
    EngineDeadError,
    RestartPolicy,
    SamplingParams,
    ShutdownPolicy,
    open_sync_engine_client,
)
from anyengine.sync_client.loop_handle import Backend
from anyengine.testing import scripted_spec

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_many_threads_at_once_get_each_their_own(open_scripted: Opener) -> None:
    results: queue.SimpleQueue[tuple[int, list[int], list[int]]] = queue.SimpleQueue()

    with open_scripted() as client:

        def run(start: int) -> None:
            for number in range(start, start + 20):
                whole = client.generate([number], SamplingParams(max_tokens=3)).token_ids
                with client.stream([number], SamplingParams(max_tokens=3)) as request:
                    streamed = [token for output in request for token in output.token_ids]
                results.put((number, whole, streamed))

        threads = [threading.Thread(target=run, args=(1000 * index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert nothing_runs(client)
    assert results.qsize() == 160
    while not results.empty():
        number, whole, streamed = results.get()
        assert whole == streamed == [number + 1, number + 2, number + 3]


def test_several_threads_take_steps_and_each_step_goes_to_one(open_scripted: Opener) -> None:
    tokens: list[int] = []
    with open_scripted() as client:
        client.add_request([0], SamplingParams(max_tokens=3000))
        until_sync(lambda: client.statistics().unread_outputs == 3000)
        tokens += client.get_output().token_ids  # all the others cross with it

        def take() -> None:
            for _ in range(500):
                tokens.append(client.get_output().token_ids[0])

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(client._steps) == 999
    assert sorted(tokens) == list(range(1, 2002))


def test_one_thread_at_a_time_waits_for_steps(open_scripted: Opener) -> None:
    with open_scripted() as client:
        ended = threading.Event()

        def wait() -> None:
            with pytest.raises(EngineClosedError):
                client.get_output()
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        until_sync(lambda: client._portal._calls)
        until_sync(lambda: client._steps._waiter is not None)
        with pytest.raises(anyio.BusyResourceError):
            client.get_output()
    thread.join()
    assert ended.is_set()


def test_closing_ends_the_calls_of_other_threads(open_scripted: Opener) -> None:
    endings: dict[str, object] = {}

    def end(name: str, call: Callable[[], object]) -> None:
        try:
            endings[name] = call()
        except BaseException as error:
            endings[name] = type(error)

    with open_scripted({"step_delay": 0.001}) as client:

        def iterate() -> object:
            with client.stream([0], FOREVER) as request:
                return [output.finish_reason for output in request][-1]

        calls: dict[str, Callable[[], object]] = {
            "generate": lambda: client.generate([0], FOREVER).finish_reason,
            "stream": iterate,
            "get_output": client.get_output,
            "wait_dead": client.wait_dead,
        }
        threads = [threading.Thread(target=end, args=item) for item in calls.items()]
        for thread in threads:
            thread.start()
        until_sync(lambda: client.statistics().live_requests == 2)
        until_sync(lambda: client._steps._waiter is not None)
    for thread in threads:
        thread.join(5)
    assert endings == {
        "generate": "abort",
        "stream": "abort",
        "get_output": EngineClosedError,
        "wait_dead": EngineClosedError,
    }


def test_closing_ends_the_calls_of_other_threads_though_the_engine_is_busy(open_scripted: Opener) -> None:
    calls: list[Callable[[], object]] = []
    with open_scripted(shutdown=ShutdownPolicy(grace=0.2, terminate=0.2)) as client:
        calls += [lambda: client.call_utility("sleep_for", 60), lambda: client.generate([0], FOREVER)]

        def run(call: Callable[[], object]) -> None:
            with pytest.raises(EngineClosedError):
                call()
            calls.remove(call)

        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        until_sync(lambda: client.statistics().live_requests == 1 and client.statistics().pending_calls == 1)
    for thread in threads:
        thread.join(5)
    assert calls == []


def test_a_batch_that_another_thread_closes_ends(open_scripted: Opener) -> None:
    reasons: list[str | None] = []
    with open_scripted({"step_delay": 0.001}) as client:

        def run() -> None:
            with pytest.raises(EngineClosedError):
                for _, completion in client.generate_many([[0]] * 10, FOREVER, max_concurrency=5):
                    reasons.append(completion.finish_reason)

        thread = threading.Thread(target=run)
        thread.start()
        until_sync(lambda: client.statistics().live_requests == 5)
    thread.join(5)
    assert not thread.is_alive()
    assert set(reasons) <= {"abort"}


def test_its_own_thread_is_refused(open_scripted: Opener) -> None:
    with open_scripted() as client:
        call = client._portal.call_now
        for blocking in (
            lambda: client.generate([1]),
            lambda: client.stream([1]),
            client.get_output,
            lambda: client.call_utility("echo", 1),
        ):
            with pytest.raises(RuntimeError, match="would wait for itself"):
                call(blocking)
        assert call(client.health).state == "alive"
        assert call(client.statistics).live_requests == 0


def test_a_batch_may_be_finalized_in_the_loops_thread(open_scripted: Opener) -> None:
    with open_scripted({"step_delay": 0.001}) as client:
        batch = client.generate_many(([index] for index in range(100)), SamplingParams(max_tokens=2))
        next(batch)
        client._portal.call_now(batch.close)
        until_sync(lambda: nothing_runs(client))


@pytest.mark.parametrize("around", ["asyncio", "trio"])
def test_it_works_inside_a_running_loop(around: str, backend: Backend) -> None:
    async def main() -> list[int]:
        with open_sync_engine_client(scripted_spec(), backend=backend) as client:
            await anyio.sleep(0)
            tokens = client.generate([1], SamplingParams(max_tokens=3)).token_ids
            with client.stream([1], SamplingParams(max_tokens=3)) as request:
                streamed = await to_thread.run_sync(lambda: [token for output in request for token in output.token_ids])
            assert streamed == tokens
            return tokens

    assert anyio.run(main, backend=around) == [2, 3, 4]


def test_it_works_off_the_main_thread_and_twice_at_a_time(backend: Backend) -> None:
    results: list[list[int]] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]

    def run() -> None:
        with open_sync_engine_client(scripted_spec(), backend=backend) as client:
            with open_sync_engine_client(scripted_spec(), backend="asyncio") as other:
                sampling = SamplingParams(max_tokens=2)
                results.extend(either.generate([1], sampling).token_ids for either in (client, other))

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert results == [[2, 3]] * 4
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]


def test_the_callers_context_stays_with_the_caller(open_scripted: Opener) -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("the caller's")
    with open_scripted() as client:
        assert client._portal.call_now(variable.get) == "outside"


@pytest.mark.parametrize("leave", ["exit", "forget", "raise"])
def test_a_plain_script_needs_no_main_guard(leave: str, backend: Backend) -> None:
    script = f"""
        from anyengine import SamplingParams
        from anyengine import open_sync_engine_client
        from anyengine.testing import scripted_spec
        block = open_sync_engine_client(scripted_spec(), backend={backend!r})
        client = block.__enter__()
        print(client.generate([1], SamplingParams(max_tokens=2)).token_ids)
        if {leave!r} == "exit":
            block.__exit__(None, None, None)
        elif {leave!r} == "raise":
            raise SystemExit(3)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=30)
    assert (result.stdout, result.stderr) == ("[2, 3]\n", "")
    assert result.returncode == (3 if leave == "raise" else 0)


def test_a_refusal_in_the_clients_own_thread_leaves_get_output_to_the_others(open_scripted: Opener) -> None:
    with open_scripted() as client:

        def read_in_own_thread() -> None:
            with pytest.raises(RuntimeError, match="would wait for itself"):
                client.get_output()

        client._portal.call_now(read_in_own_thread)
        client.add_request([1], SamplingParams(max_tokens=1))
        assert client.get_output().token_ids[0] == 2


def test_a_thread_that_waits_for_steps_is_told_of_a_death_that_a_restart_follows(open_scripted: Opener) -> None:
    told: list[Exception] = []
    with open_scripted(restart=RestartPolicy(limit=1, window=600, backoff=0)) as client:

        def read() -> None:
            with pytest.raises(EngineDeadError) as caught:
                client.get_output()
            told.append(caught.value)

        thread = threading.Thread(target=read)
        thread.start()
        until_sync(lambda: client._steps.is_awaited)
        os.kill(client.health().pid, signal.SIGKILL)
        thread.join(20)
        assert len(told) == 1
        assert client.generate([1], SamplingParams(max_tokens=1)).token_ids == [2]
