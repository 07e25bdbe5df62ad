"""The blocking calls: what they return, that they are the async client's, and what they refuse."""

from __future__ import annotations

import inspect
import signal
import sys

import anyio
import pytest
from tests.helpers import is_running, until_sync
from tests.sync_client.conftest import Opener

from anyengine import (
    EngineClient,
    EngineClosedError,
    EngineDeadError,
    EngineStartError,
    RequestRefusedError,
    SamplingParams,
    SyncEngineClient,
    UtilityError,
    UtilityTimeoutError,
    open_engine_client,
    open_sync_engine_client,
)
from anyengine.sync_client.loop_handle import Backend
from anyengine.testing import scripted_spec

pytestmark = pytest.mark.usefixtures("leaves_nothing")

FOREVER = SamplingParams(max_tokens=10_000_000)


def nothing_runs(client: SyncEngineClient) -> bool:
    statistics = client.statistics()
    return not any(
        (
            statistics.live_requests,
            statistics.aborting_requests,
            statistics.pending_calls,
            statistics.unread_outputs,
            statistics.tracked_buffers,
        )
    )


def test_a_request_to_its_end(open_scripted: Opener) -> None:
    with open_scripted() as client:
        assert client.info.engine == "scripted"
        assert client.health()
        completion = client.generate([10], SamplingParams(max_tokens=4), request_id="mine")
        assert (completion.request_id, completion.token_ids) == ("mine", [11, 12, 13, 14])
        assert completion.finish_reason == "length"
        assert nothing_runs(client)


def test_a_stream_yields_every_token_once_and_ends_with_its_reason(open_scripted: Opener) -> None:
    with open_scripted() as client:
        with client.stream([0], SamplingParams(max_tokens=2000), request_id="mine") as request:
            outputs = list(request)
            assert list(request) == []
        assert request.request_id == "mine"
        assert [token for output in outputs for token in output.token_ids] == list(range(1, 2001))
        assert outputs[-1].finish_reason == "length"
        assert {output.finish_reason for output in outputs[:-1]} <= {None}
        assert nothing_runs(client)


def test_a_slow_reader_finds_everything_in_one_output(open_scripted: Opener) -> None:
    with open_scripted() as client, client.stream([0], SamplingParams(max_tokens=500)) as request:
        until_sync(lambda: client.statistics().live_requests == 0)
        assert [output.token_ids for output in request] == [list(range(1, 501))]


def test_the_rest_of_a_stream_as_one_completion(open_scripted: Opener) -> None:
    with open_scripted({"step_delay": 0.005}) as client, client.stream([0], SamplingParams(max_tokens=20)) as request:
        first = next(request)
        rest = request.completion()
        assert first.token_ids + rest.token_ids == list(range(1, 21))
        with pytest.raises(RuntimeError, match="all of it has been read"):
            request.completion()


def test_a_stream_is_entered_once_and_before_it_is_read(open_scripted: Opener) -> None:
    with open_scripted() as client:
        request = client.stream([0], SamplingParams(max_tokens=3))
        with pytest.raises(RuntimeError, match="enter the request first: with client"):
            next(request)
        with request:
            assert request.completion().token_ids == [1, 2, 3]
        with pytest.raises(RuntimeError, match="sent once"):
            request.__enter__()


def test_leaving_a_stream_early_frees_the_slot(open_scripted: Opener) -> None:
    with open_scripted({"step_delay": 0.001, "max_num_seqs": 1}) as client:
        with client.stream([0], FOREVER) as request:
            next(request)
        assert nothing_runs(client)
        assert client.generate([5], SamplingParams(max_tokens=1)).token_ids == [6]


def test_an_error_in_a_streams_block_comes_out_bare(open_scripted: Opener) -> None:
    with open_scripted({"step_delay": 0.001}) as client:
        with pytest.raises(ZeroDivisionError) as caught:
            with client.stream([0], FOREVER) as request:
                for _ in request:
                    1 / 0  # noqa: B018
        assert caught.value.__context__ is None
        assert nothing_runs(client)


def test_whole_steps_come_once_each_and_in_order(open_scripted: Opener) -> None:
    with open_scripted() as client:
        handles = [client.add_request([start], SamplingParams(max_tokens=300)) for start in (1000, 2000)]
        tokens: dict[int, list[int]] = {handle: [] for handle in handles}
        ended = 0
        while ended < 2:
            step = client.get_output()
            for handle, new, details in step.rows():
                tokens[handle] += new
                ended += details is not None and details.finish_reason == "length"
        assert list(tokens.values()) == [list(range(1001, 1301)), list(range(2001, 2301))]
        assert nothing_runs(client)


def test_several_steps_cross_at_once_and_all_of_them_count_as_unread(open_scripted: Opener) -> None:
    with open_scripted() as client:
        client.add_request([0], SamplingParams(max_tokens=50))
        until_sync(lambda: client.statistics().unread_outputs == 50)
        client.get_output()
        assert len(client._steps) == 49
        assert client.statistics().unread_outputs == 49


def test_nothing_of_a_request_comes_after_it_was_aborted(open_scripted: Opener) -> None:
    with open_scripted({"step_delay": 0.001}) as client:
        kept, aborted = (client.add_request([start], FOREVER) for start in (0, 1000))
        until_sync(lambda: client.statistics().unread_outputs > 10)
        while aborted not in client.get_output().handles:
            pass
        assert len(client._steps) > 1  # some of its rows have crossed already
        client.abort_requests([aborted, aborted, 12345])
        assert [list(client.get_output().handles) for _ in range(30)] == [[kept]] * 30
        client.abort_requests([kept])
        client.abort_requests([kept])
        until_sync(lambda: nothing_runs(client))


def test_nothing_comes_of_an_ended_request_after_it_was_aborted(open_scripted: Opener) -> None:
    with open_scripted() as client:
        ended = client.add_request([0], SamplingParams(max_tokens=20))
        until_sync(lambda: client.statistics().unread_outputs == 20)
        client.get_output()
        client.abort_requests([ended])
        assert client.statistics().unread_outputs == 0


def test_utilities_and_their_errors(open_scripted: Opener) -> None:
    with open_scripted() as client:
        assert client.call_utility("echo", {"a": [1, None]}) == {"a": [1, None]}
        assert client.get_supported_tasks() == ["generate"]
        with pytest.raises(UtilityError, match="as it was told") as caught:
            client.call_utility("raise_error", "as it was told")
        assert caught.value.exception_type == "RuntimeError"
        with pytest.raises(UtilityError, match="no such utility"):
            client.call_utility("nonsense")
        with pytest.raises(UtilityTimeoutError):
            client.call_utility("sleep_for", 0.5, timeout=0.05)
        assert client.generate([1], SamplingParams(max_tokens=1)).token_ids == [2]


def test_bad_input_is_refused_at_the_call(open_scripted: Opener) -> None:
    with open_scripted({"vocab_size": 50}) as client:
        for call in (client.generate, client.stream, client.add_request):
            with pytest.raises(RequestRefusedError, match="at least one token"):
                call([])
            with pytest.raises(TypeError, match="tokenize it first"):
                call("text")
            with pytest.raises(RequestRefusedError, match=r"top_p=0\.5"):
                call([1], SamplingParams(top_p=0.5))
        with pytest.raises(RequestRefusedError, match="vocab_size"):
            client.generate([60])
        with pytest.raises(TypeError, match="handles holds 'a'"):
            client.abort_requests(["a"])
        with pytest.raises(ValueError, match="timeout=0"):
            client.health(timeout=0)
        with pytest.raises(ValueError, match="timeout=-1"):
            client.wait_dead(timeout=-1)
        assert nothing_runs(client)


def test_waiting_for_a_death_has_a_limit(open_scripted: Opener) -> None:
    with open_scripted() as client:
        with pytest.raises(TimeoutError, match=r"not died within 0\.05 s"):
            client.wait_dead(timeout=0.05)
        pid = client.health().pid
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.call_utility("kill", int(signal.SIGKILL))
        with pytest.raises(EngineDeadError):
            client.wait_dead()
        assert client.health().state == "dead"
    assert not is_running(pid)


def test_after_the_block_every_call_says_that_the_client_is_closed(open_scripted: Opener) -> None:
    with open_scripted() as client:
        request = client.stream([1])
        client.add_request([0], SamplingParams(max_tokens=20))
        client.get_output()
    for call in (
        lambda: client.generate([1]),
        lambda: client.stream([1]),
        lambda: client.add_request([1]),
        lambda: client.generate_many([[1]]),
        lambda: client.abort_requests([1]),
        lambda: client.call_utility("echo", 1),
        client.get_output,
        client.is_sleeping,
        client.wait_dead,
        request.__enter__,
    ):
        with pytest.raises(EngineClosedError):
            call()
    assert client.health().state == "closed"
    assert client.statistics().live_requests == 0


def test_a_block_is_entered_once(open_scripted: Opener) -> None:
    block = open_scripted()
    with block:
        pass
    with pytest.raises(RuntimeError, match="entered before"):
        block.__enter__()


def test_a_failed_start_says_why(open_scripted: Opener) -> None:
    with pytest.raises(EngineStartError, match="loading failed, as it was told to") as caught:
        with open_scripted({"load_fault": "raise"}):
            pytest.fail("not reached")
    assert caught.value.report.phase == "load"


def test_progress_is_reported_and_an_error_of_the_callback_comes_out(open_scripted: Opener) -> None:
    stages: list[str] = []
    with open_scripted(on_progress=lambda stage, fraction: stages.append(stage)):
        assert set(stages) == {"loading"}

    def fail(stage: str, fraction: float | None) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with open_scripted(on_progress=fail):
            pytest.fail("not reached")


def test_impossible_arguments_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = scripted_spec()
    with pytest.raises(ValueError, match="backend='curio': expected 'asyncio'"):
        open_sync_engine_client(spec, backend="curio")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"on_death='cancel'.*cannot be cancelled"):
        open_sync_engine_client(spec, on_death="cancel")
    with pytest.raises(TypeError, match="expected an EngineSpec"):
        open_sync_engine_client("scripted")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "trio", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install trio"):
        open_sync_engine_client(spec, backend="trio")


def parameters(function: object, *, without: str = "") -> dict[str, object]:
    found = inspect.signature(function).parameters  # type: ignore[arg-type]
    return {name: (p.kind, p.default, p.annotation) for name, p in found.items() if name != without}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("open_request", "stream"),
        *((name, name) for name in ("generate", "add_request", "abort_requests", "connect_client")),
    ],
)
def test_parameters_are_those_of_the_async_client(theirs: str, ours: str) -> None:
    assert parameters(getattr(SyncEngineClient, ours)) == parameters(getattr(EngineClient, theirs))


def test_the_block_has_the_parameters_of_the_async_block() -> None:
    assert parameters(open_sync_engine_client, without="backend") == parameters(open_engine_client)


def test_every_public_name_of_the_async_client_is_there() -> None:
    names = {name for name in dir(EngineClient) if not name.startswith("_")} - {"open_request", "get_outputs_nowait"}
    assert names <= set(dir(SyncEngineClient))


def test_the_loop_behind_it_is_the_one_that_was_asked_for(open_scripted: Opener, backend: Backend) -> None:
    with open_scripted() as client:
        assert client._portal.call_now(anyio.get_cancelled_exc_class).__module__.startswith(backend)
