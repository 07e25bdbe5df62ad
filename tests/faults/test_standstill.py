"""Our own standstill is not blamed on the engine: a blocked loop, and an application that is stopped for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import anyio
import pytest
from tests.helpers import until

from anyengine import (
    EngineDeadError,
    RequestStalledError,
    SamplingParams,
    ShutdownPolicy,
    StartLimits,
    UtilityTimeoutError,
    open_engine_client,
)
from anyengine.client.engine_client import session_of
from anyengine.client.services import UNREACHABLE_PULSES
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


def block(seconds: float = 1.0) -> None:
    """Hold the loop's thread."""
    time.sleep(seconds)


async def test_a_stall_limit_does_not_strike_for_a_blocked_loop() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.02)) as client:
        async with client.open_request([0], SamplingParams(max_tokens=60), stall_limit=0.5) as request:
            tokens = (await anext(request)).token_ids
            async with anyio.create_task_group() as group:

                async def read() -> None:
                    async for output in request:
                        tokens.extend(output.token_ids)

                group.start_soon(read)
                await anyio.wait_all_tasks_blocked()
                block()
        assert tokens == list(range(1, 61))


async def test_a_call_whose_answer_lies_in_the_socket_has_not_timed_out() -> None:
    async with open_engine_client(scripted_spec()) as client:
        answers: list[Any] = []

        async def call() -> None:
            answers.append(await client.call_utility("sleep_for", 0.1, timeout=0.4))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await until(lambda: client.statistics().pending_calls)
            block()
        assert answers == [0.1]


@pytest.mark.parametrize("step", ["hello", "silence"])
async def test_a_limit_of_the_start_does_not_strike_for_a_blocked_loop(step: str) -> None:
    limits = StartLimits(hello=1.0) if step == "hello" else StartLimits(silence=1.0)
    blocked: list[str] = []

    def on_progress(stage: str, fraction: float | None) -> None:
        if step == "silence" and not blocked:
            blocked.append(step)
            block(1.5)

    async def block_at_hello() -> None:
        await until(lambda: session_of_block().link.host is not None)
        blocked.append(step)
        block(1.5)

    block_ = open_engine_client(scripted_spec(load_seconds=0.3), start_limits=limits, on_progress=on_progress)

    def session_of_block() -> Any:
        return block_._session

    async with anyio.create_task_group() as group:
        if step == "hello":
            # Its first turn comes when the session is there.
            async def later() -> None:
                await until(lambda: hasattr(block_, "_session"))
                await block_at_hello()

            group.start_soon(later)
        async with block_ as client:
            assert client.health()
    assert blocked == [step]


async def test_a_drain_that_has_ended_is_not_aborted_for_a_blocked_loop() -> None:
    policy = ShutdownPolicy(mode="drain", drain_limit=0.6)
    reasons: list[Any] = []
    async with anyio.create_task_group() as group:
        async with open_engine_client(scripted_spec(step_delay=0.02), shutdown=policy) as client:

            async def generate() -> None:
                reasons.append((await client.generate([0], SamplingParams(max_tokens=20))).finish_reason)

            async def block_in_the_close() -> None:
                await until(lambda: client.health().state == "closing")
                block()

            group.start_soon(generate)
            group.start_soon(block_in_the_close)
            await until(lambda: client.statistics().live_requests)
    assert reasons == ["length"]


async def test_the_last_outputs_before_a_death_come_though_the_loop_was_blocked() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.01)) as client:
        await client.add_request([0], SamplingParams(max_tokens=100_000))
        await until(lambda: client.statistics().unread_outputs)
        pid = client.health().pid
        block(0.3)
        os.kill(pid, signal.SIGKILL)
        block(0.3)
        tokens: list[int] = []
        with pytest.raises(EngineDeadError):
            while True:
                tokens += (await client.get_output()).token_ids
        assert len(tokens) > 20
        assert tokens == list(range(1, len(tokens) + 1))


async def test_limits_strike_where_it_is_the_engine_that_stands_still() -> None:
    quick = ShutdownPolicy(grace=0.1, terminate=0.1)
    async with open_engine_client(scripted_spec(step_delay=0.01), shutdown=quick) as client:
        os.kill(client.health().pid, signal.SIGSTOP)
        with anyio.fail_after(20):
            with pytest.raises(UtilityTimeoutError):
                await client.call_utility("echo", 1, timeout=0.3)
            with pytest.raises(RequestStalledError):
                await client.generate([0], stall_limit=0.3)


async def test_a_socket_that_is_gone_is_counted_in_pulses_and_forgotten_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anyengine.client.services.PULSE", 0.02)
    async with open_engine_client(scripted_spec()) as client:
        link = session_of(client).link
        link.unreachable_pulses = UNREACHABLE_PULSES
        link.is_unreachable = True  # a message could not be sent, a moment ago
        await until(lambda: link.unreachable_pulses == 0)
        assert await client.call_utility("echo", 1) == 1


PROGRAM = """
import os, sys, time
import anyio
from anyengine import SamplingParams, open_engine_client, open_sync_engine_client
from anyengine.testing import scripted_spec

FIRST = SamplingParams(max_tokens=60)
spec = scripted_spec(step_delay=0.02)
states = set()

def say(*words):
    print(*words, flush=True)

async def main():
    async with open_engine_client(spec) as client:
        async def look():
            while True:
                states.add(client.health(timeout=0.8).state)
                await anyio.sleep(0.005)

        async def call():
            while True:
                await client.call_utility("echo", 1, timeout=0.5)

        async with anyio.create_task_group() as group:
            group.start_soon(look)
            group.start_soon(call)
            async with client.open_request([0], FIRST, stall_limit=0.5) as request:
                tokens = (await anext(request)).token_ids
                say(client.health().pid)
                async for output in request:
                    tokens += output.token_ids
            await anyio.sleep(0.6)
            group.cancel_scope.cancel()
        say(len(tokens), sorted(states))

def run_sync():
    with open_sync_engine_client(spec) as client:
        tokens = []
        with client.stream([0], FIRST, stall_limit=0.5) as stream:
            for output in stream:
                if not tokens:
                    say(client.health().pid)
                tokens += output.token_ids
                states.add(client.health(timeout=0.8).state)
        client.call_utility("echo", 1, timeout=0.5)
        say(len(tokens), sorted(states))

kind = sys.argv[1]
run_sync() if kind == "sync" else anyio.run(main, backend=kind)
"""


@pytest.mark.parametrize("stopped", ["application", "both"])
@pytest.mark.parametrize("kind", ["asyncio", "trio", "sync"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
def test_an_application_that_is_stopped_blames_nobody(kind: str, stopped: str, anyio_backend: Any) -> None:
    """As a shell's Ctrl-Z does with the application, and a paused container with both."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        pids = [program.pid, pid] if stopped == "both" else [program.pid]
        for each in pids:
            os.kill(each, signal.SIGSTOP)
        time.sleep(2)  # longer than each of its limits
        for each in reversed(pids):
            os.kill(each, signal.SIGCONT)
        out, err = program.communicate(timeout=30)
    assert (program.returncode, out, err) == (0, "60 ['alive']\n", "")
