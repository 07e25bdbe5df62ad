"""The engine's death as blocked threads see it: at once, in all of them, each with an error of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from tests.helpers import until_sync
from tests.sync_client.conftest import Opener
from tests.sync_client.test_calls import FOREVER

from anyengine import EngineDeadError, RequestRefusedError, SamplingParams, SyncEngineClient

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def iterate(client: SyncEngineClient) -> None:
    with client.stream([0], FOREVER) as request:
        for _ in request:
            pass


CALLS: dict[str, Callable[[SyncEngineClient], object]] = {
    "generate": lambda client: client.generate([0], FOREVER),
    "stream": iterate,
    "generate_many": lambda client: list(client.generate_many([[0], [1]], FOREVER)),
    "get_output": lambda client: client.get_output(),
    "call_utility": lambda client: client.call_utility("sleep_for", 60),
    "wait_dead": lambda client: client.wait_dead(),
}


def test_a_death_interrupts_every_blocked_call_with_an_error_of_its_own(open_scripted: Opener) -> None:
    told: dict[str, tuple[EngineDeadError, float]] = {}

    with open_scripted() as client:

        def block(name: str) -> None:
            try:
                CALLS[name](client)
            except EngineDeadError as error:
                told[name] = error, time.monotonic()

        threads = [threading.Thread(target=block, args=(name,)) for name in CALLS]
        for thread in threads:
            thread.start()
        # get_output waits for steps, and the engine makes none while the utility runs
        until_sync(lambda: client.statistics().live_requests == 4 and client.statistics().pending_calls == 1)
        killed = time.monotonic()
        os.kill(client.health().pid, signal.SIGKILL)
        for thread in threads:
            thread.join(30)
        assert set(told) == set(CALLS)
        assert max(when for _, when in told.values()) - killed < 2  # a second is promised, and milliseconds are usual
        errors = [error for error, _ in told.values()]
        assert len({id(error) for error in errors}) == len(CALLS)
        assert all(error.report is errors[0].report for error in errors)
        assert errors[0].report.signal == signal.SIGKILL
        assert all(error.__context__ is None and error.__cause__ is None for error in errors)
        with pytest.raises(EngineDeadError):
            client.generate([1])


def test_what_came_before_the_death_comes_before_the_error(open_scripted: Opener) -> None:
    with open_scripted() as client:
        client.add_request([0], SamplingParams(max_tokens=100))
        with client.stream([500], SamplingParams(max_tokens=100)) as request:
            until_sync(lambda: client.statistics().live_requests == 0)
            os.kill(client.health().pid, signal.SIGKILL)
            until_sync(lambda: client.health().state == "dead")
            assert [token for output in request for token in output.token_ids] == list(range(501, 601))
        rows = [client.get_output().token_ids[0] for _ in range(100)]
        assert rows == list(range(1, 101))
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                client.get_output()


def test_results_from_before_the_death_come_before_the_error(open_scripted: Opener) -> None:
    got: list[int] = []
    with open_scripted({"step_delay": 0.001}) as client:
        with pytest.raises(EngineDeadError):
            for index, _ in client.generate_many([[0]] * 100, SamplingParams(max_tokens=5), max_concurrency=10):
                got.append(index)
                if len(got) == 25:
                    os.kill(client.health().pid, signal.SIGKILL)
    assert len(got) >= 25
    assert len(set(got)) == len(got)


def test_a_death_that_nobody_was_told_of_comes_out_of_the_block(open_scripted: Opener) -> None:
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        with open_scripted() as client:
            os.kill(client.health().pid, signal.SIGKILL)
            until_sync(lambda: client.health().state == "dead")


def test_a_death_that_somebody_was_told_of_does_not(open_scripted: Opener) -> None:
    with open_scripted() as client:
        os.kill(client.health().pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            client.wait_dead()


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_the_bodys_own_error_comes_out_bare_and_before_a_death(
    error: type[BaseException], open_scripted: Opener
) -> None:
    for dies in (False, True):
        with pytest.raises(error) as caught:
            with open_scripted() as client:
                if dies:
                    os.kill(client.health().pid, signal.SIGKILL)
                    until_sync(lambda: client.health().state == "dead")
                raise error
        assert caught.value.__context__ is None
        assert caught.value.__cause__ is None


def test_a_refused_request_is_its_callers_own_affair(open_scripted: Opener) -> None:
    with open_scripted({"vocab_size": 50}) as client:
        with pytest.raises(RequestRefusedError, match="vocab_size") as caught:
            client.generate([60])
        assert caught.value.__context__ is None
        assert client.generate([1], SamplingParams(max_tokens=1)).token_ids == [2]
