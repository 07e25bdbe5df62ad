"""Starting: each step is bounded, each failure names its step, and nothing of a failed start stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
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

from anyengine import (
    EngineDeadError,
    EngineSpec,
    EngineStartError,
    ProcessLauncher,
    SamplingParams,
    StartLimits,
    open_engine_client,
)
from anyengine.client import opening
from anyengine.process.host import EngineHost
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.testing import StartFault, faulty_launcher, scripted_spec
from anyengine.transport.endpoints import Endpoints

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


async def fails_to_start(limit: float = 15, **arguments: Any) -> EngineStartError:
    spec = arguments.pop("spec", scripted_spec())
    with anyio.fail_after(limit), pytest.raises(EngineStartError) as caught:
        async with open_engine_client(spec, **arguments):
            pytest.fail("the block was entered")
    assert isinstance(caught.value, EngineDeadError)
    assert caught.value.report.pid is None or not is_running(caught.value.report.pid)
    return caught.value


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", ["exit code 1", "RuntimeError: failed before HELLO"]),
        ("exit", ["exit code 0"]),
        ("kill", ["signal SIGKILL (9)"]),
    ],
)
async def test_a_death_before_hello_is_told_at_once(fault: StartFault, words: list[str]) -> None:
    error = await fails_to_start(launcher=faulty_launcher(fault))
    assert error.report.phase == "hello"
    for word in [*words, "before it said HELLO", f"about to fail: {fault}", str(error.report.pid)]:
        assert word in str(error)


@pytest.mark.parametrize(
    ("fault", "phase", "setting"),
    [("hang", "hello", "start_limits.hello"), ("hang_after_hello", "load", "start_limits.silence")],
)
async def test_a_stalled_start_names_step_limit_and_setting(fault: StartFault, phase: str, setting: str) -> None:
    # The other limit is one that a busy machine keeps.
    limits = StartLimits(hello=0.5) if phase == "hello" else StartLimits(hello=30.0, silence=0.5)
    started = time.monotonic()
    error = await fails_to_start(launcher=faulty_launcher(fault), start_limits=limits)
    assert 0.5 <= time.monotonic() - started < 10
    assert error.report.phase == phase
    assert f"within 0.5 s; the limit is the setting {setting}" in str(error)


async def test_a_slow_start_that_reports_progress_is_not_stalled() -> None:
    stages: list[tuple[str, float | None]] = []
    limits = StartLimits(silence=0.6)
    async with open_engine_client(
        scripted_spec(load_seconds=1.2), start_limits=limits, on_progress=lambda *stage: stages.append(stage)
    ) as client:
        assert client.info.engine == "scripted"
    assert [fraction for _, fraction in stages] == [tenth / 10 for tenth in range(11)]


async def test_without_a_limit_the_wait_ends_when_the_child_dies() -> None:
    error = await fails_to_start(
        spec=scripted_spec(load_seconds=1, load_fault="kill"), start_limits=StartLimits(hello=None, silence=None)
    )
    assert (error.report.phase, error.report.signal) == ("load", 9)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (EngineSpec("no_such_module:Engine"), ["ModuleNotFoundError", "no_such_module"]),
        (
            EngineSpec("anyengine.engines.scripted:NoSuch"),
            ["AttributeError: ", "it has the engines ScriptedEngine"],
        ),
        (EngineSpec("collections:OrderedDict"), ["TypeError", "not a subclass of anyengine.engine.EngineCore"]),
        (scripted_spec(constructor_fault="bad day"), ["RuntimeError: bad day", "scripted.py"]),
        (
            scripted_spec(no_such_argument=1),
            ["TypeError: ScriptedEngine has no argument 'no_such_argument'"],
        ),
        (scripted_spec(stepdelay=1), ["TypeError", "did you mean 'step_delay'?"]),
        (scripted_spec(load_fault="raise"), ["RuntimeError: loading failed", "in load"]),
        (scripted_spec(load_fault="exit"), ["exit code 3"]),
    ],
)
async def test_what_the_engine_raises_while_it_starts_comes_with_its_traceback(
    spec: EngineSpec, words: list[str]
) -> None:
    error = await fails_to_start(spec=spec)
    assert error.report.phase == "load"
    for word in words:
        assert word in str(error)


async def test_an_interpreter_that_does_not_exist() -> None:
    error = await fails_to_start(launcher=ProcessLauncher(python="/no/such/python"))
    assert error.report.phase == "launch"
    assert "/no/such/python" in str(error)


async def test_another_protocol_version_is_refused_with_both_numbers() -> None:
    error = await fails_to_start(launcher=faulty_launcher("other_version"))
    assert "speaks version 2 of the protocol and this client version 1" in str(error)


async def test_a_hello_without_the_token_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    error = await fails_to_start(launcher=faulty_launcher("wrong_token"), start_limits=StartLimits(hello=2))
    assert error.report.phase == "hello"
    assert "without this engine's token" in caplog.text


async def test_a_cancelled_start_leaves_nothing() -> None:
    for delay in (0.0, 0.01, 0.03, 0.08, 0.15):
        with anyio.move_on_after(delay) as scope:
            async with open_engine_client(scripted_spec(load_seconds=30)):
                pytest.fail("the block was entered")
        assert scope.cancelled_caught


async def test_an_error_in_the_progress_callback_is_the_callers_own() -> None:
    def fail(stage: str, fraction: float | None) -> None:
        raise KeyError(stage)

    with pytest.raises(KeyError, match="loading"):
        async with open_engine_client(scripted_spec(), on_progress=fail):
            pytest.fail("the block was entered")


async def test_eight_clients_start_at_once() -> None:
    async def run(number: int) -> None:
        async with open_engine_client(scripted_spec(), transport="tcp" if number % 2 else "ipc") as client:
            assert (await client.generate([number], SamplingParams(max_tokens=1))).token_ids == [number + 1]

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(run, number)


async def test_a_child_finds_modules_that_lie_beside_the_application(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_engine.py").write_text(
        "from anyengine.engines.scripted import ScriptedEngine\nclass MyEngine(ScriptedEngine):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with open_engine_client(EngineSpec("my_engine:MyEngine", {"vocab_size": 7})) as client:
        assert client.info.vocab_size == 7


async def test_the_launchers_environment_reaches_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_engine_env.py").write_text(
        textwrap.dedent("""
            import os
            from anyengine.engine import utility
            from anyengine.engines.scripted import ScriptedEngine
            class MyEngine(ScriptedEngine):
                @utility
                def variable(self, name):
                    return os.environ.get(name)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = ProcessLauncher(environment={"MY_DEVICE": "3"})
    async with open_engine_client(EngineSpec("my_engine_env:MyEngine"), launcher=launcher) as client:
        assert await client.call_utility("variable", "MY_DEVICE") == "3"


SCRIPT = """
import anyio, sys
from anyengine import SamplingParams, open_engine_client
from anyengine.testing import scripted_spec

async def main():
    async with open_engine_client(scripted_spec({arguments})) as client:
        print((await client.generate([1], SamplingParams(max_tokens=3))).token_ids, flush=True)

anyio.run(main, backend={backend!r})
"""


@pytest.mark.parametrize("how", ["script", "command", "stdin"])
def test_a_program_without_a_main_guard_works(how: str, anyio_backend: Any, tmp_path: Path) -> None:
    code = SCRIPT.format(arguments="", backend=anyio_backend[0])
    (tmp_path / "script.py").write_text(code)
    arguments = {"script": [str(tmp_path / "script.py")], "command": ["-c", code], "stdin": ["-"]}[how]
    result = subprocess.run(
        [sys.executable, *arguments],
        input=code if how == "stdin" else "",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "[2, 3, 4]\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_the_start_leaves_no_process(number: int, anyio_backend: Any) -> None:
    code = SCRIPT.format(arguments="load_seconds=30", backend=anyio_backend[0])
    chance = random.Random(int(number))
    parents = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
        for _ in range(5)
    ]
    started, children = time.monotonic(), set[int]()
    for parent, moment in zip(parents, sorted(chance.uniform(0.3, 1.5) for _ in parents), strict=True):
        time.sleep(max(0.0, started + moment - time.monotonic()))  # a random moment is the point, not a condition
        children.update(children_of(parent.pid))
        parent.send_signal(number)
    for parent in parents:
        parent.wait(timeout=30)
    until_sync(lambda: not any(map(is_running, children)))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancellation_at_any_moment_of_the_start_leaves_no_process(anyio_backend: Any) -> None:
    """Timeouts of asyncio itself ignore AnyIO's shields: the process may start after nobody waits for it any more."""
    before = set(children_of(os.getpid()))
    for delay in range(0, 60, 3):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay / 1000):
                async with open_engine_client(scripted_spec(load_seconds=30)):
                    pytest.fail("the block was entered")
    await until(lambda: set(children_of(os.getpid())) <= before)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancellation_while_the_services_start_ends_them(anyio_backend: Any) -> None:
    async def open_it() -> None:
        block = open_engine_client(scripted_spec())
        serve = block._serve

        async def serve_for_one_that_is_cancelled(serving: anyio.Event) -> None:
            task.cancel()
            await serve(serving)

        block._serve = serve_for_one_that_is_cancelled  # type: ignore[method-assign]
        async with block:
            pytest.fail("the block was entered")

    task = asyncio.create_task(open_it())
    done, _ = await asyncio.wait([task], timeout=20)
    assert done
    assert task.cancelled()


async def test_cancellation_in_the_turn_in_which_the_services_start(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(children_of(os.getpid()))
    scope = anyio.CancelScope()

    async def cancelling_reader(session: Any) -> None:
        scope.cancel()
        await anyio.sleep_forever()

    monkeypatch.setattr(opening, "read_router", cancelling_reader)
    for _ in range(10):  # trio starts tasks in an order of its own
        scope = anyio.CancelScope()
        with scope:
            async with open_engine_client(scripted_spec()):
                pytest.fail("the block was entered")
        assert scope.cancelled_caught
    await until(lambda: set(children_of(os.getpid())) <= before)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancellation_while_closing_leaves_no_process(anyio_backend: Any) -> None:
    before = set(children_of(os.getpid()))
    for delay in (0, 1, 3, 10, 20):
        opened = asyncio.Event()
        client_task = asyncio.create_task(_open_and_wait(opened))
        await opened.wait()
        client_task.cancel()
        await asyncio.sleep(delay / 1000)
        client_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client_task
    await until(lambda: set(children_of(os.getpid())) <= before)


async def _open_and_wait(opened: asyncio.Event) -> None:
    async with open_engine_client(scripted_spec()):
        opened.set()
        await anyio.sleep(3600)


async def test_the_loop_runs_on_while_the_system_starts_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes long where the application is large or the machine busy."""
    loop_turned = threading.Event()
    turned_meanwhile: list[bool] = []
    start = ProcessLauncher.start

    def start_slowly(launcher: ProcessLauncher, bootstrap: Bootstrap) -> EngineHost:
        loop_turned.clear()
        turned_meanwhile.append(loop_turned.wait(10))
        return start(launcher, bootstrap)

    async def turn() -> None:
        while True:
            loop_turned.set()
            await anyio.sleep(0.001)

    monkeypatch.setattr(ProcessLauncher, "start", start_slowly)
    async with anyio.create_task_group() as group:
        group.start_soon(turn)
        async with open_engine_client(scripted_spec()):
            group.cancel_scope.cancel()
    assert turned_meanwhile == [True]


async def test_a_long_import_path_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, *(f"/no/such/{'x' * 1000}/{number}" for number in range(400)), 7])
    with anyio.fail_after(20):
        async with open_engine_client(scripted_spec()) as client:
            assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]


def test_launcher_settings_are_checked() -> None:
    with pytest.raises(TypeError, match=r"ProcessLauncher\.python=5"):
        ProcessLauncher(python=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'A': 1"):
        ProcessLauncher(environment={"A": 1})  # type: ignore[dict-item]


async def test_a_deadline_that_passes_before_the_services_have_their_first_turn_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scopes: list[anyio.CancelScope] = []

    def make_slowly(*arguments: Any, **options: Any) -> Endpoints:
        endpoints = Endpoints(*arguments, **options)
        scopes[-1].cancel()
        return endpoints

    monkeypatch.setattr(opening, "Endpoints", make_slowly)
    for _ in range(12):  # trio runs the tasks of one turn in any order
        scopes.append(anyio.CancelScope())
        with scopes[-1]:
            async with open_engine_client(scripted_spec()):
                pytest.fail("it was cancelled before")
        assert scopes[-1].cancelled_caught
