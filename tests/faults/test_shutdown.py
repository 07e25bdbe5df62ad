"""Leaving: nothing stays, within a bound, whoever goes first and however."""

from __future__ import annotations

import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.helpers import children_of, is_running, until, until_sync

from anyengine import EngineSpec, RequestOutput, SamplingParams, ShutdownPolicy, open_engine_client
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

FOREVER = SamplingParams(max_tokens=10_000_000)


async def test_the_process_is_gone_when_the_block_is_left() -> None:
    async with open_engine_client(scripted_spec()) as client:
        pid = client.health().pid
        grandchild = await client.call_utility("spawn_grandchild")
    assert not is_running(pid)
    assert not is_running(grandchild)


async def test_the_process_is_gone_when_the_block_is_cancelled() -> None:
    with anyio.CancelScope() as scope:
        async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
            pid = client.health().pid
            async with client.open_request([0], FOREVER) as request:
                async for _ in request:
                    scope.cancel()
    assert scope.cancelled_caught
    assert not is_running(pid)


async def test_a_thread_that_still_loads_is_left_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with anyio.CancelScope() as scope:
        async with open_engine_client(
            scripted_spec(load_seconds=10.0), placement="thread", on_progress=lambda stage, fraction: scope.cancel()
        ):
            pass
    assert scope.cancelled_caught
    assert "engine 0 cannot be killed from here" in caplog.text
    # It ends where it next has something to tell.
    await until(lambda: not any(thread.name == "anyengine-0" for thread in threading.enumerate()))


async def test_open_streams_get_a_last_output_when_the_client_closes() -> None:
    lasts: list[RequestOutput] = []
    async with anyio.create_task_group() as group:
        async with open_engine_client(scripted_spec(step_delay=0.001)) as client:

            async def run() -> None:
                async with client.open_request([0], FOREVER) as request:
                    async for output in request:
                        last = output
                    lasts.append(last)

            for _ in range(10):
                group.start_soon(run)
            await until(lambda: client.statistics().live_requests == 10)
    assert [last.finish_reason for last in lasts] == ["abort"] * 10


async def test_draining_lets_open_streams_finish() -> None:
    completions: list[list[int]] = []
    policy = ShutdownPolicy(mode="drain", drain_limit=20)
    async with anyio.create_task_group() as group:
        async with open_engine_client(scripted_spec(step_delay=0.002), shutdown=policy) as client:

            async def run() -> None:
                completions.append((await client.generate([0], SamplingParams(max_tokens=200))).token_ids)

            for _ in range(10):
                group.start_soon(run)
            await until(lambda: client.statistics().live_requests == 10)
    assert completions == [list(range(1, 201))] * 10


async def test_draining_has_a_limit() -> None:
    reasons: list[str | None] = []
    policy = ShutdownPolicy(mode="drain", drain_limit=0.2)
    async with anyio.create_task_group() as group:
        async with open_engine_client(scripted_spec(step_delay=0.002), shutdown=policy) as client:

            async def run() -> None:
                async with client.open_request([0], FOREVER) as request:
                    async for output in request:
                        last = output
                reasons.append(last.finish_reason)

            group.start_soon(run)
            await until(lambda: client.statistics().live_requests == 1)
            started = time.monotonic()
    assert reasons == ["abort"]
    assert time.monotonic() - started < 5


async def test_a_frozen_engine_is_ended_within_the_policy(caplog: pytest.LogCaptureFixture) -> None:
    policy = ShutdownPolicy(grace=0.2, terminate=0.2)
    async with open_engine_client(scripted_spec(), shutdown=policy) as client:
        pid = client.health().pid
        await client.call_utility("freeze", 60, True)
        await until(lambda: not client.health(timeout=0.5))
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert not is_running(pid)
    assert "sending SIGTERM" in caplog.text
    assert "ignores SIGTERM" in caplog.text


async def test_a_stopped_engine_is_ended_too() -> None:
    async with open_engine_client(scripted_spec(), shutdown=ShutdownPolicy(grace=0.2, terminate=0.2)) as client:
        pid = client.health().pid
        os.kill(pid, signal.SIGSTOP)
    assert not is_running(pid)


async def test_closing_with_much_unsent_is_quick() -> None:
    async with open_engine_client(scripted_spec(), shutdown=ShutdownPolicy(grace=0.2, terminate=0.2)) as client:
        os.kill(client.health().pid, signal.SIGSTOP)
        with anyio.move_on_after(0.5):
            await client.call_utility("echo", b"x" * 100_000_000)
        os.kill(client.health().pid, signal.SIGKILL)
        started = time.monotonic()
        await until(lambda: client.health().state == "dead")
        with pytest.raises(Exception, match="SIGKILL"):
            await client.wait_dead()
    assert time.monotonic() - started < 2


def run_to_end(code: str, limit: float = 20, **arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
        **arguments,
    )


@pytest.mark.parametrize("way", ["clean", "generator_left_open", "loop_ended", "never_entered"])
def test_a_normal_exit_prints_nothing(way: str, anyio_backend: Any) -> None:
    code = f"""
        import anyio, sys
        from anyengine import SamplingParams, open_engine_client
        from anyengine.testing import scripted_spec

        async def main():
            way = {way!r}
            if way == "clean":
                async with open_engine_client(scripted_spec()) as client:
                    await client.generate([1])
            elif way == "generator_left_open":
                async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
                    request = client.open_request([1], SamplingParams(max_tokens=10**6))
                    await request.__aenter__()
                    await anext(request)
                    del request
            elif way == "never_entered":
                open_engine_client(scripted_spec())
            else:
                block = open_engine_client(scripted_spec())
                await block.__aenter__()
        try:
            anyio.run(main, backend={anyio_backend[0]!r})
        except BaseException as error:
            # trio itself refuses to end with a nursery left open; asyncio does not notice
            assert {way!r} == "loop_ended" and {anyio_backend[0]!r} == "trio", error
    """
    result = run_to_end(code)
    assert (result.returncode, result.stdout) == (0, "")
    if way != "loop_ended":
        assert result.stderr == ""
    assert "died" not in result.stderr


@pytest.mark.parametrize("state", ["serving", "loading", "frozen"])
def test_a_killed_application_takes_child_and_grandchild_along(state: str, anyio_backend: Any) -> None:
    code = f"""
        import anyio
        from anyengine import open_engine_client
        from anyengine.testing import scripted_spec

        async def main():
            arguments = dict(load_seconds=30) if {state!r} == "loading" else dict()
            spec = scripted_spec(**arguments)
            async with open_engine_client(spec, on_progress=lambda *stage: print("up", flush=True)) as client:
                print(await client.call_utility("spawn_grandchild"), flush=True)
                if {state!r} == "frozen":
                    await client.call_utility("freeze", 10, True)
                    while client.health(timeout=0.5):
                        await anyio.sleep(0.01)
                print("go", flush=True)
                await anyio.sleep(60)

        anyio.run(main, backend={anyio_backend[0]!r})
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines: list[str] = []
    for line in parent.stdout:
        lines.append(line.strip())
        if line.strip() == "go" or (state == "loading" and len(lines) == 2):
            break
    (child,) = children_of(parent.pid)
    family = [child, *(int(line) for line in lines if line.isdigit())]
    assert len(family) == (1 if state == "loading" else 2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until_sync(lambda: not any(map(is_running, family)), 3)


def test_engines_go_though_a_forked_sibling_lives_on(anyio_backend: Any) -> None:
    """A process forked by the application inherits the lifelines' ends; it must not keep the engines alive."""
    code = f"""
        import anyio, os, sys, time
        from anyengine import open_engine_client
        from anyengine.testing import scripted_spec

        async def main():
            async with open_engine_client(scripted_spec()) as one, open_engine_client(scripted_spec()) as two:
                sibling = os.fork()
                if sibling == 0:
                    time.sleep(60)
                    os._exit(0)
                print(one.health().pid, two.health().pid, sibling, flush=True)
                await anyio.sleep(60)

        anyio.run(main, backend={anyio_backend[0]!r})
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    one, two, sibling = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        until_sync(lambda: not is_running(one) and not is_running(two), 3)
        assert is_running(sibling)
    finally:
        os.kill(sibling, signal.SIGKILL)


def test_ctrl_c_in_a_terminal_lets_the_parent_decide(anyio_backend: Any) -> None:
    code = f"""
        import anyio
        from anyengine import SamplingParams, open_engine_client
        from anyengine.testing import scripted_spec

        async def main():
            async with open_engine_client(scripted_spec(step_delay=0.01)) as client:
                try:
                    async with client.open_request([0], SamplingParams(max_tokens=10**6)) as request:
                        async for output in request:
                            print("token", flush=True)
                finally:
                    print("engine is", client.health().state, flush=True)

        try:
            anyio.run(main, backend={anyio_backend[0]!r})
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", textwrap.dedent(code)])
    screen = b""
    while screen.count(b"token") < 3:
        screen += os.read(terminal, 1024)
    (child,) = children_of(pid)
    os.write(terminal, b"\x03")
    started = time.monotonic()
    try:
        while chunk := os.read(terminal, 1024):
            screen += chunk
    except OSError:  # the other end of a terminal that is gone
        pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert time.monotonic() - started < 5
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"engine is alive" in screen, "the child must not have got the terminal's interrupt"
    assert b"interrupted" in screen
    assert b"Traceback" not in screen
    assert not is_running(child)


def test_a_second_interrupt_ends_a_slow_close_at_once(anyio_backend: Any) -> None:
    code = f"""
        import anyio
        from anyengine import ShutdownPolicy, open_engine_client
        from anyengine.testing import scripted_spec

        async def main():
            policy = ShutdownPolicy(grace=30, terminate=30)
            async with open_engine_client(scripted_spec(), shutdown=policy) as client:
                await client.call_utility("freeze", 60, True)
                while client.health(timeout=0.5):
                    await anyio.sleep(0.01)
                print("ready", flush=True)
                await anyio.sleep(60)

        anyio.run(main, backend={anyio_backend[0]!r})
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    (child,) = children_of(parent.pid)
    parent.send_signal(signal.SIGINT)
    with parent.stdout:
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(timeout=0.7)
        started = time.monotonic()
        parent.send_signal(signal.SIGINT)
        parent.wait(timeout=10)
    assert time.monotonic() - started < 3
    until_sync(lambda: not is_running(child), 3)


async def test_signal_handlers_stay_as_they_are() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in signal.valid_signals()]

    before = handlers()
    async with open_engine_client(scripted_spec()) as client:
        assert handlers() == before
        await client.generate([1])
    assert handlers() == before


def test_works_off_the_main_thread_and_survives_it(anyio_backend: Any) -> None:
    """Started from a thread that ends: the child must not go with the thread that forked it."""
    results: list[object] = []

    async def use() -> None:
        async with open_engine_client(scripted_spec()) as client:
            results.append((await client.generate([1], SamplingParams(max_tokens=2))).token_ids)
            results.append(client.health().state)

    def run() -> None:
        anyio.run(use, backend=anyio_backend[0])

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert results == [[2, 3], "alive"] * 2


async def test_the_child_outlives_the_worker_thread_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine_client(scripted_spec()) as client:
        for _ in range(30):  # other work passes through the same worker threads
            await anyio.to_thread.run_sync(time.sleep, 0.001)
        assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]


def _in_pool(backend: str) -> list[int]:
    async def use() -> list[int]:
        async with open_engine_client(scripted_spec()) as client:
            return (await client.generate([1], SamplingParams(max_tokens=2))).token_ids

    return anyio.run(use, backend=backend)


def test_works_in_a_daemonic_pool_worker(anyio_backend: Any) -> None:
    code = f"""
        import multiprocessing, sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from tests.faults.test_shutdown import _in_pool
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(_in_pool, ({anyio_backend[0]!r},)))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout == "[2, 3]\n", result.stderr
    assert multiprocessing.active_children() == []


async def test_two_clients_in_one_program() -> None:
    async with open_engine_client(scripted_spec()) as one, open_engine_client(scripted_spec()) as two:
        assert one.health().pid != two.health().pid
        async with anyio.create_task_group() as group:
            group.start_soon(one.generate, [1])
            group.start_soon(two.generate, [1])
        os.kill(two.health().pid, signal.SIGKILL)
        with pytest.raises(Exception, match="SIGKILL"):
            await two.wait_dead()
        assert (await one.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]


def test_one_block_after_the_other_in_loops_of_their_own(anyio_backend: Any) -> None:
    for _ in range(3):
        assert _in_pool(anyio_backend[0]) == [2, 3]


async def test_what_the_child_prints_reaches_stderr(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "printing_engine.py").write_text(
        textwrap.dedent("""
            import sys
            from anyengine.engine import utility
            from anyengine.engines.scripted import ScriptedEngine
            class PrintingEngine(ScriptedEngine):
                @utility
                def say(self, text, times):
                    for _ in range(times):
                        print(text)
                        print(text.upper(), file=sys.stderr)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with open_engine_client(EngineSpec("printing_engine:PrintingEngine")) as client:
        # Far more than a pipe holds, while nobody reads: the child must not block.
        started = time.monotonic()
        await client.call_utility("say", "hello" * 20, 20_000)
        assert time.monotonic() - started < 20
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.count("hello" * 20 + "\n") == 20_000
    assert shown.err.count("HELLO" * 20 + "\n") == 20_000
