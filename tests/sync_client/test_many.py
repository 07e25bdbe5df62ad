"""Many requests at once: each result once, as it comes, with a bound, and an early end that aborts the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.helpers import until_sync
from tests.sync_client.conftest import Opener
from tests.sync_client.test_calls import nothing_runs

from anyengine import (
    Completion,
    EngineClosedError,
    EngineSpec,
    RequestRefusedError,
    SamplingParams,
    ShutdownPolicy,
    SyncEngineClient,
    open_sync_engine_client,
)
from anyengine.sync_client import portal
from anyengine.sync_client.loop_handle import Backend

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_every_prompt_gets_its_completion(open_scripted: Opener) -> None:
    with open_scripted() as client:
        results = dict(client.generate_many(([index] for index in range(1000)), SamplingParams(max_tokens=3)))
        assert set(results) == set(range(1000))
        assert all(results[index].token_ids == [index + 1, index + 2, index + 3] for index in results)
        assert nothing_runs(client)


def test_no_prompts_give_nothing(open_scripted: Opener) -> None:
    with open_scripted() as client:
        assert list(client.generate_many([])) == []


def test_results_come_in_the_order_of_completion(open_scripted: Opener) -> None:
    with open_scripted({"step_delay": 0.005}) as client:
        sampling = SamplingParams(max_tokens=60, stop_token_ids=[100])
        # Each counts up to 100: the nearer, the sooner.
        prompts = [[50], [70], [90], [98]]
        assert [index for index, _ in client.generate_many(prompts, sampling)] == [3, 2, 1, 0]


def test_a_failed_request_gives_its_error_and_the_others_go_on(open_scripted: Opener) -> None:
    with open_scripted({"vocab_size": 50}) as client:
        results = dict(client.generate_many([[1], [60], [], [2]], SamplingParams(max_tokens=1)))
        assert isinstance(results[0], Completion)
        assert isinstance(results[3], Completion)
        with pytest.raises(RequestRefusedError, match="vocab_size"):
            raise results[1]
        with pytest.raises(RequestRefusedError, match="at least one token"):
            raise results[2]


def test_a_bound_on_what_is_under_way_and_on_what_is_read_ahead(open_scripted: Opener) -> None:
    taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal taken
        for index in range(60):
            taken += 1
            yield [index]

    with open_scripted({"step_delay": 0.001}) as client:
        batch = client.generate_many(prompts(), SamplingParams(max_tokens=4), max_concurrency=7)
        assert taken == 0
        for number, _ in enumerate(batch, start=1):
            assert client.statistics().live_requests <= 7
            assert taken <= number + 4 * 7  # twice as many are given out, and as many results may be in hand
        assert taken == 60


def test_an_early_end_aborts_the_rest(open_scripted: Opener) -> None:
    with open_scripted({"step_delay": 0.001}) as client:
        sampling = SamplingParams(max_tokens=10_000_000, stop_token_ids=[10])
        for index, _ in client.generate_many([[5]] + [[20]] * 30, sampling):
            assert index == 0
            break
        assert client.statistics().live_requests == 0
        until_sync(lambda: nothing_runs(client))


def test_an_error_of_the_prompts_iterator_aborts_the_rest_and_comes_out(open_scripted: Opener) -> None:
    def prompts() -> Iterator[list[int]]:
        yield [5]  # counts up to 10
        yield [20]  # goes on
        raise ZeroDivisionError

    with open_scripted({"step_delay": 0.001}) as client:
        sampling = SamplingParams(max_tokens=10_000_000, stop_token_ids=[10])
        with pytest.raises(ZeroDivisionError):
            list(client.generate_many(prompts(), sampling, max_concurrency=2))
        until_sync(lambda: nothing_runs(client))


def test_two_batches_and_other_calls_do_not_mix(open_scripted: Opener) -> None:
    with open_scripted() as client:
        sampling = SamplingParams(max_tokens=2)
        first = client.generate_many([[index] for index in range(50)], sampling, max_concurrency=5)
        second = client.generate_many([[index + 1000] for index in range(50)], sampling, max_concurrency=5)
        for (index, one), (other, two) in zip(first, second, strict=True):
            assert one.token_ids == [index + 1, index + 2]
            assert two.token_ids == [other + 1001, other + 1002]
            assert client.generate([5000], sampling).token_ids == [5001, 5002]


def test_bad_input_is_refused_at_the_call(open_scripted: Opener) -> None:
    with open_scripted() as client:
        with pytest.raises(ValueError, match="max_concurrency=0"):
            client.generate_many([[1]], max_concurrency=0)
        with pytest.raises(TypeError, match="max_concurrency='8'"):
            client.generate_many([[1]], max_concurrency="8")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="prompts='text'"):
            client.generate_many("text")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected a SamplingParams"):
            client.generate_many([[1]], {"max_tokens": 3})  # type: ignore[arg-type]
        with pytest.raises(RequestRefusedError, match="top_p"):
            client.generate_many([[1]], SamplingParams(top_p=0.5))
        with pytest.raises(RequestRefusedError, match="logprobs=21: expected at most 20"):
            client.generate_many([[1]], SamplingParams(logprobs=21))
        with pytest.raises(TypeError, match="tokenize it first"):
            list(client.generate_many(["text"]))  # type: ignore[list-item]
        assert nothing_runs(client)


def test_an_early_end_at_once_leaves_no_request_live(open_scripted: Opener) -> None:
    """The first result is a refusal, which comes before the loop has had a turn for the others."""
    with open_scripted({"step_delay": 0.01}) as client:
        for _ in range(30):
            for _, result in client.generate_many([[], [1], [2]], SamplingParams(max_tokens=10**6)):
                assert isinstance(result, RequestRefusedError)
                break
            assert client.statistics().live_requests == 0
        until_sync(lambda: nothing_runs(client))


def test_two_threads_share_the_places_that_there_are(open_scripted: Opener) -> None:
    with open_scripted({"step_delay": 0.001}, max_requests=2, when_full="wait") as client:
        results: list[dict[int, object]] = []

        def run() -> None:
            results.append(dict(client.generate_many([[1]] * 12, SamplingParams(max_tokens=3), max_concurrency=4)))

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [set(each) for each in results] == [set(range(12))] * 3
        assert all(isinstance(result, Completion) for each in results for result in each.values())
        assert nothing_runs(client)


def test_a_client_that_drains_gives_the_results_of_what_ran_and_then_the_error(open_scripted: Opener) -> None:
    ended: list[tuple[int, object]] = []
    errors: list[Exception] = []

    def run(client: SyncEngineClient) -> None:
        # Each counts up to its stop token, in another step than the others; four run, and four wait for their turn.
        sampling = SamplingParams(max_tokens=10**6, stop_token_ids=[500])
        prompts = [[400 + 10 * index] for index in range(4)] + [[1]] * 4
        try:
            for index, result in client.generate_many(prompts, sampling, max_concurrency=4):
                assert isinstance(result, Completion)
                ended.append((index, result.finish_reason))
        except EngineClosedError as error:
            errors.append(error)

    shutdown = ShutdownPolicy(mode="drain", drain_limit=30)
    with open_scripted({"step_delay": 0.005}, shutdown=shutdown) as client:
        thread = threading.Thread(target=run, args=(client,))
        thread.start()
        until_sync(lambda: client.statistics().live_requests == 4)
    thread.join()
    assert ended == [(3, "stop"), (2, "stop"), (1, "stop"), (0, "stop")]
    assert len(errors) == 1


def test_leaving_the_block_does_not_wait_for_a_suspended_iteration(
    open_scripted: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portal, "INTERRUPT_LIMIT", 1000)
    with open_scripted() as client:
        results = client.generate_many([[1]], SamplingParams(max_tokens=2))
        next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_several_rows_of_a_request_in_each_step_keep_their_order(backend: Backend) -> None:
    spec = EngineSpec("tests.sync_client.twofold_engine:TwofoldEngine")
    with open_sync_engine_client(spec, backend=backend) as client:
        results = dict(client.generate_many([[10], [20]], SamplingParams(max_tokens=8)))
        assert [results[index].token_ids for index in (0, 1)] == [list(range(11, 19)), list(range(21, 29))]


def test_an_unforeseen_error_while_requests_wait_comes_out_and_the_client_goes_on(
    open_scripted: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    with open_scripted({"step_delay": 0.001}, max_requests=1, when_full="wait") as client:
        running = client.add_request([0], SamplingParams(max_tokens=10**6))
        with monkeypatch.context() as patch:
            patch.setattr(client._session, "admit", fail)
            with pytest.raises(ZeroDivisionError):
                list(client.generate_many([[1]]))
        client.abort_requests([running])
        assert client.generate([1], SamplingParams(max_tokens=1)).token_ids == [2]
