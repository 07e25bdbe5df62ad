"""KeyboardInterrupt: in every blocking call, at the start, at the end, twice; and nothing that is lost by it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tests.helpers import is_running, until_sync
from tests.sync_client.conftest import Interrupting, Opener
from tests.sync_client.test_calls import FOREVER, nothing_runs

from anyengine import SamplingParams, ShutdownPolicy, SyncEngineClient
from anyengine.sync_client.handover import StepHandover
from anyengine.sync_client.loop_handle import LoopHandle

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def read_all(client: SyncEngineClient, request: Callable[[Any], object]) -> None:
    with client.stream([0], FOREVER) as stream:
        request(stream)


REQUESTS: dict[str, Callable[[SyncEngineClient], object]] = {
    "generate": lambda client: client.generate([0], FOREVER),
    "stream": lambda client: read_all(client, list),
    "completion": lambda client: read_all(client, lambda stream: stream.completion()),
    "generate_many": lambda client: list(client.generate_many([[0]] * 50, FOREVER)),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_interrupted_request_is_aborted_and_the_next_gets_its_own(
    name: str, open_scripted: Opener, interrupting: Interrupting
) -> None:
    with open_scripted({"step_delay": 0.001}) as client:
        for attempt in range(3):
            with pytest.raises(KeyboardInterrupt) as caught:
                with interrupting(lambda: client.statistics().live_requests):
                    REQUESTS[name](client)
            assert type(caught.value.__context__) in (type(None), KeyboardInterrupt)
            del caught
            until_sync(lambda: nothing_runs(client))
            assert client.generate([attempt], SamplingParams(max_tokens=3)).token_ids == [
                attempt + 1,
                attempt + 2,
                attempt + 3,
            ]


def test_an_interrupted_stream_is_over(open_scripted: Opener, interrupting: Interrupting) -> None:
    with open_scripted({"step_delay": 0.3}) as client, client.stream([0], FOREVER) as stream:
        with pytest.raises(KeyboardInterrupt):
            with interrupting(lambda: client._portal._calls):
                next(stream)
        assert nothing_runs(client)
        with pytest.raises(anyio.ClosedResourceError, match="its block was left"):
            list(stream)


def test_an_interrupted_utility_call_is_forgotten(open_scripted: Opener, interrupting: Interrupting) -> None:
    with open_scripted() as client:
        with pytest.raises(KeyboardInterrupt):
            with interrupting(lambda: client.statistics().pending_calls):
                client.call_utility("sleep_for", 0.5)
        assert client.statistics().pending_calls == 0
        assert client.call_utility("echo", "mine") == "mine"


def test_an_interrupted_wait_for_death(open_scripted: Opener, interrupting: Interrupting) -> None:
    with open_scripted() as client:
        with pytest.raises(KeyboardInterrupt):
            with interrupting(lambda: len(client._portal._calls)):
                client.wait_dead()
        assert client.health()


class Interrupts:
    """SIGALRM every ``period`` seconds, which raises KeyboardInterrupt where it is ``armed``, once each time."""

    def __init__(self, period: float) -> None:
        self._period = period
        self.armed = False
        self.count = 0

    def __enter__(self) -> Interrupts:
        self._previous = signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, self._period, self._period)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._previous)

    def _interrupt(self, number: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            self.count += 1
            raise KeyboardInterrupt


def test_no_step_is_lost_however_often_reading_is_interrupted(open_scripted: Opener) -> None:
    tokens: list[int] = []
    with open_scripted({"step_delay": 0.0005}) as client, Interrupts(0.002) as interrupts:
        client.add_request([0], SamplingParams(max_tokens=1000))
        while len(tokens) < 1000:
            try:
                interrupts.armed = True
                step = client.get_output()
                interrupts.armed = False
            except KeyboardInterrupt:
                continue
            tokens += step.token_ids
    assert tokens == list(range(1, 1001))
    assert interrupts.count > 20


def test_nothing_is_lost_between_two_bytecodes() -> None:
    handover: Any = StepHandover()  # what it holds does not matter to it
    with Interrupts(0.0002) as interrupts:
        for number in range(400_000):
            handover.extend([number])
            while True:
                try:
                    interrupts.armed = True
                    item = handover.take()
                    interrupts.armed = False
                except KeyboardInterrupt:
                    continue
                break
            assert item == number
    assert interrupts.count > 100
    assert len(handover) == 0


def test_a_request_whose_handle_was_lost_is_aborted(
    open_scripted: Opener, interrupting: Interrupting, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []
    with open_scripted({"step_delay": 0.001}) as client:
        add_request = client._client.add_request

        async def add_and_block(*arguments: Any, **options: Any) -> int:
            added.append(await add_request(*arguments, **options))
            time.sleep(0.3)  # the interrupt comes now, and no cancellation until the handle is on its way
            return added[0]

        monkeypatch.setattr(client._client, "add_request", add_and_block)
        with pytest.raises(KeyboardInterrupt):
            with interrupting(lambda: added):
                client.add_request([0], FOREVER)
        assert client.statistics().live_requests == 0
        until_sync(lambda: nothing_runs(client))


def test_a_second_interrupt_does_not_wait(open_scripted: Opener, interrupting: Interrupting) -> None:
    with open_scripted(shutdown=ShutdownPolicy(grace=0.1, terminate=0.1)) as client:
        client.call_utility("freeze", 60, True)  # so that the abort is not acknowledged
        until_sync(lambda: not client.health(timeout=0.3))
        with pytest.raises(KeyboardInterrupt):
            with interrupting(lambda: client.statistics().live_requests):
                with interrupting(lambda: client.statistics().aborting_requests):
                    client.generate([0], FOREVER, request_id="named")  # which runs in a task
        assert len(client._portal._calls) == 1  # it still waits for the acknowledgement
        until_sync(lambda: not client._portal._calls)
        assert client.statistics().live_requests == 0


def test_an_interrupt_of_the_body_ends_the_engine(open_scripted: Opener, interrupting: Interrupting) -> None:
    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        with interrupting(lambda: pids):
            with open_scripted() as client:
                pids.append(client.health().pid)
                while True:
                    time.sleep(0.01)
    assert not is_running(pids[0])


def test_an_interrupt_of_the_start_ends_what_had_started(open_scripted: Opener, interrupting: Interrupting) -> None:
    started = time.monotonic()
    loading = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        with interrupting(loading.is_set):
            with open_scripted({"load_seconds": 30}, on_progress=lambda stage, fraction: loading.set()):
                pytest.fail("not reached")
    assert time.monotonic() - started < 15


def test_an_interrupt_before_the_loop_runs_ends_the_start(
    open_scripted: Opener, interrupting: Interrupting, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = open_scripted()
    starting = threading.Event()
    run = threading.Thread.run

    def run_late(thread: threading.Thread) -> None:
        if thread.name.startswith("anyengine-"):
            starting.set()
            time.sleep(0.3)
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_late)
    with pytest.raises(KeyboardInterrupt):
        with interrupting(starting.is_set):
            block.__enter__()


def test_an_interrupt_while_the_block_is_left_comes_out_when_it_has_been(
    open_scripted: Opener, interrupting: Interrupting
) -> None:
    clients: list[SyncEngineClient] = []
    with pytest.raises(KeyboardInterrupt):
        with interrupting(lambda: clients and clients[0].health().state == "closing"):
            with open_scripted(shutdown=ShutdownPolicy(grace=0.5, terminate=0.1)) as client:
                pid = client.health().pid
                client.call_utility("freeze", 60, True)
                until_sync(lambda: not client.health(timeout=0.3))
                clients.append(client)
    assert not is_running(pid)


def test_a_script_that_is_interrupted_exits_as_python_does() -> None:
    """A plain script, without a ``__main__`` guard, whose main thread blocks in a call."""
    script = """
        from anyengine import EngineClosedError, SamplingParams
        from anyengine import open_sync_engine_client
        from anyengine.testing import scripted_spec
        with open_sync_engine_client(scripted_spec(step_delay=0.01)) as client:
            print(client.health().pid, flush=True)
            client.generate([0], SamplingParams(max_tokens=1_000_000))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not is_running(pid)


def test_what_follows_an_interrupt_is_posted_though_others_come() -> None:
    handle = LoopHandle("asyncio")
    posted: list[object] = []
    interrupts: list[BaseException] = [KeyboardInterrupt(), SystemExit(143), TimeoutError()]

    def run_soon(function: object) -> None:
        if interrupts:
            raise interrupts.pop()
        posted.append(function)

    handle._run_soon = run_soon
    handle.post_surely(read_all)
    assert posted == [read_all]
