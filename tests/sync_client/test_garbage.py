"""The same for blocking calls: whatever ends one, an interrupt included, nothing of it is in a cycle."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import pytest
from tests.garbage import REPEATS, nothing_in_cycles

from anyengine import EngineError, SamplingParams, SyncEngineClient, open_sync_engine_client
from anyengine.testing import scripted_spec

LONG = SamplingParams(max_tokens=10**6)
SHORT = SamplingParams(max_tokens=3)
UNKNOWN_TOKEN = [40_000]


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def client(request: pytest.FixtureRequest) -> Iterator[SyncEngineClient]:
    with open_sync_engine_client(scripted_spec(step_delay=0.0002), placement="thread", backend=request.param) as client:
        yield client


class _AlarmError(Exception):
    """What the handler of an alarm raises: an interrupt."""


def _raise_alarm(number: int, frame: object) -> None:
    raise _AlarmError


def _interrupt(call: Callable[[], object]) -> None:
    previous = signal.signal(signal.SIGALRM, _raise_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003)
        with contextlib.suppress(_AlarmError):
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _read(client: SyncEngineClient, prompt: list[int], params: SamplingParams, stops: bool = False) -> None:
    with client.stream(prompt, params) as request:
        for _ in request:
            if stops:
                break


def _add_and_abort(client: SyncEngineClient) -> None:
    client.abort_requests([client.add_request([1], LONG)])


def _leave_many(client: SyncEngineClient) -> None:
    results = client.generate_many([[1]] * 4, SHORT, max_concurrency=2)
    next(results)
    results.close()


ENDINGS: dict[str, Callable[[SyncEngineClient], object]] = {
    "a stream read to its end": lambda client: _read(client, [1], SHORT),
    "a stream left early": lambda client: _read(client, [1], LONG, stops=True),
    "a stream that the engine refuses": lambda client: _read(client, UNKNOWN_TOKEN, SHORT),
    "a stream that is interrupted": lambda client: _interrupt(lambda: _read(client, [1], LONG)),
    "a completion": lambda client: client.generate([1], SHORT),
    "a completion with a name": lambda client: client.generate([1], SHORT, request_id="mine"),
    "a completion that the engine refuses": lambda client: client.generate(UNKNOWN_TOKEN, SHORT),
    "a completion with a name that is refused": lambda client: client.generate(UNKNOWN_TOKEN, request_id="mine"),
    "a completion that is interrupted": lambda client: _interrupt(lambda: client.generate([1], LONG)),
    "many": lambda client: list(client.generate_many([[1], UNKNOWN_TOKEN, [-1]], SHORT)),
    "many left early": _leave_many,
    "a dispatched request that is aborted": _add_and_abort,
    "a call": lambda client: client.call_utility("echo", 1),
    "a call that raises": lambda client: client.call_utility("wake_up", 5),
    "a look": lambda client: client.statistics(),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending_leaves_nothing_in_cycles(client: SyncEngineClient, ending: str) -> None:
    def end() -> None:
        with contextlib.suppress(EngineError):
            ENDINGS[ending](client)

    end()
    with nothing_in_cycles():
        for _ in range(REPEATS):
            end()


def test_an_interrupted_call_waits_until_the_engine_has_let_go(client: SyncEngineClient) -> None:
    _interrupt(lambda: client.generate([1], LONG))
    statistics = client.statistics()
    assert (statistics.live_requests, statistics.aborting_requests) == (0, 0)
