"""The real engine fails: everybody who waits is told why, and nothing of it stays on the host."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from tests.helpers import children_of, until
from tests.vllm import setups
from tests.vllm.setups import Topology, Traces

from anyengine import (
    EngineClient,
    EngineDeadError,
    EngineStartError,
    SamplingParams,
    ShutdownPolicy,
    StartLimits,
    open_engine_client,
)
from anyengine.directories import sweep_directories

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

PROMPT = [504, 3575, 282, 4649, 314]
LONG = SamplingParams(max_tokens=250, temperature=0, ignore_eos=True)

TOPOLOGIES = pytest.mark.parametrize(
    ("topology", "anyio_backend"), [("uni", "trio"), pytest.param("mp", "asyncio", marks=pytest.mark.slow)]
)


async def expect_deaths(client: EngineClient, kill: Callable[[], None], expected: str) -> None:
    """Start waiters of several kinds, kill, and look at what each of them is told."""
    errors: list[EngineDeadError] = []
    started = 0

    async def catch(wait: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(EngineDeadError) as caught:
            await wait()
        errors.append(caught.value)

    async def stream() -> None:
        nonlocal started
        async with client.open_request(PROMPT, LONG) as request:
            async for _ in request:
                started += 1

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(catch, stream)
            group.start_soon(catch, client.wait_dead)
            await until(lambda: started >= 8, limit=50)
            # Pending while the engine steps: a call is answered between two steps, and this one takes longer than that.
            group.start_soon(catch, lambda: client.collective_rpc("tests.vllm.in_workers:sleep_for", args=[30]))
            await until(lambda: client.statistics().pending_calls == 1)
            kill()
    assert len(errors) == 6
    assert len({id(error) for error in errors}) == 6
    assert all(expected in str(error) for error in errors), str(errors[0])


@TOPOLOGIES
async def test_stopped_and_killed(topology: Topology, traces: Traces) -> None:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            open_engine_client(setups.spec(topology), launcher=traces.launcher(topology))
        )
        pid = client.health().pid
        workers = traces.look(pid)
        assert len(workers) == (0 if topology == "uni" else 1)
        assert traces.has_segments == (topology == "mp")

        os.kill(pid, signal.SIGSTOP)
        await until(lambda: client.health().state == "unresponsive", limit=20)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: client.health().state == "alive", limit=20)

        await expect_deaths(client, lambda: os.kill(pid, signal.SIGKILL), "signal SIGKILL (9)")
        assert client.health().state == "dead"
    traces.expect_none()


@pytest.mark.slow
@pytest.mark.parametrize(("idle", "anyio_backend"), [(False, "trio"), (True, "asyncio")])
async def test_a_worker_is_killed(idle: bool, traces: Traces) -> None:
    async with open_engine_client(setups.spec("mp"), launcher=traces.launcher("mp")) as client:
        (worker,) = traces.look(client.health().pid)
        expected = f"pid {worker}) was killed by signal 9 (SIGKILL)"
        if idle:
            os.kill(worker, signal.SIGKILL)
            with anyio.fail_after(10), pytest.raises(EngineDeadError, match="WorkerDiedError") as caught:
                await client.wait_dead()
            assert expected in str(caught.value)
        else:
            await expect_deaths(client, lambda: os.kill(worker, signal.SIGKILL), expected)
    traces.expect_none()


@TOPOLOGIES
async def test_closed_under_load(topology: Topology, traces: Traces) -> None:
    closed = 0

    async def stream(client: EngineClient) -> None:
        nonlocal closed
        with contextlib.suppress(EngineDeadError):
            await client.generate(PROMPT, LONG)
        closed += 1

    async with anyio.create_task_group() as group:
        policy = ShutdownPolicy(grace=20)
        async with open_engine_client(
            setups.spec(topology), launcher=traces.launcher(topology), shutdown=policy
        ) as client:
            traces.look(client.health().pid)
            for _ in range(20):  # more than run at once
                group.start_soon(stream, client)
            await until(lambda: client.statistics().engine.get("running"), limit=30)
        group.cancel_scope.cancel()
    traces.expect_none()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ({"model": "/there/is/no/such/model"}, {}, "/there/is/no/such/model"),
        ({"max_modell_len": 5}, {}, "vLLM's EngineArgs have no 'max_modell_len'; did you mean 'max_model_len'?"),
        pytest.param(
            {"num_gpu_blocks_override": 1},
            {},
            "No available memory for the cache",
            marks=pytest.mark.slow,
            id="no memory",
        ),
    ],
)
async def test_failing_starts(
    arguments: dict[str, object], environment: dict[str, str], expected: str, traces: Traces
) -> None:
    launcher = traces.launcher(**environment)
    with pytest.raises(EngineStartError) as caught:
        async with open_engine_client(setups.spec(**arguments), launcher=launcher):
            pass
    assert expected in str(caught.value)
    traces.expect_none()


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_killed_while_it_loads(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(children_of(os.getpid()))
    stages: list[str] = []

    def on_progress(stage: str, fraction: float | None) -> None:
        stages.append(stage)
        if stage == "loading weights":
            (pid,) = set(children_of(os.getpid())) - before
            os.kill(pid, signal.SIGKILL)

    # vLLM blocks for longer than that, and is not taken for stalled.
    limits = StartLimits(silence=5)
    with pytest.raises(EngineStartError, match="SIGKILL"):
        async with open_engine_client(
            setups.spec(), launcher=traces.launcher(), on_progress=on_progress, start_limits=limits
        ):
            pass
    assert len(stages) > len(set(stages))
    # The next client of this user sweeps away what a kill at such a time leaves behind.
    assert traces.left()
    monkeypatch.setattr(tempfile, "tempdir", str(traces.directory))
    sweep_directories()
    traces.expect_none()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "anyio_backend"),
    [("loading weights", "trio"), ("measuring memory", "asyncio"), ("warming up", "trio")],
)
async def test_a_worker_is_killed_while_it_loads(stage: str, traces: Traces) -> None:
    before = set(children_of(os.getpid()))
    killed: list[int] = []

    def on_progress(told: str, fraction: float | None) -> None:
        if told == stage and not killed:
            (pid,) = set(children_of(os.getpid())) - before
            for worker in traces.look_at_workers(pid):
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)

    with pytest.raises(EngineStartError) as caught:
        async with open_engine_client(setups.spec("mp"), launcher=traces.launcher("mp"), on_progress=on_progress):
            pass
    assert caught.value.report is not None
    assert caught.value.report.exception_message == (
        f"worker VllmWorker-0 (pid {killed[0]}) was killed by signal 9 (SIGKILL)"
    )
    traces.expect_none()


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_a_worker_raises_while_it_loads_is_the_reason(
    directory: Path, tmp_path: Path, traces: Traces
) -> None:
    for file in directory.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
    with (directory / "model.safetensors").open("rb") as file:
        (tmp_path / "model.safetensors").write_bytes(file.read(1_000_000))
    with pytest.raises(EngineStartError) as caught:
        async with open_engine_client(setups.spec("mp", model=str(tmp_path)), launcher=traces.launcher("mp")):
            pass
    assert caught.value.report is not None
    message = caught.value.report.exception_message or ""
    assert re.match(r"worker VllmWorker-0 \(pid \d+\) raised SafetensorError: .*incomplete metadata", message), message
    traces.expect_none()
