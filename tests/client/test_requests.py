"""Requests as streams, completions and whole steps: what arrives, in which order, and when it ends."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import anyio
import pytest
from tests.helpers import until

from anyengine import (
    EngineClient,
    EngineDeadError,
    RequestRefusedError,
    SamplingParams,
    ShutdownPolicy,
    open_engine_client,
)
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


def nothing_runs(client: EngineClient) -> bool:
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


async def test_a_stream_yields_every_token_once_and_ends_with_its_reason() -> None:
    async with open_engine_client(scripted_spec(vocab_size=50)) as client:
        async with client.open_request([3, 47], SamplingParams(max_tokens=6)) as request:
            outputs = [output async for output in request]
        assert [token for output in outputs for token in output.token_ids] == [48, 49, 0, 1, 2, 3]
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == "length"
        assert nothing_runs(client)


async def test_a_slow_reader_finds_everything_in_one_output() -> None:
    async with open_engine_client(scripted_spec()) as client:
        async with client.open_request([0], SamplingParams(max_tokens=500)) as request:
            await until(lambda: client.statistics().live_requests == 0)
            outputs = [output async for output in request]
        assert len(outputs) == 1
        assert outputs[0].token_ids == list(range(1, 501))


async def test_a_fast_reader_gets_tokens_as_they_come() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.02)) as client:
        async with client.open_request([0], SamplingParams(max_tokens=5)) as request:
            outputs = [output async for output in request]
        assert len(outputs) >= 4


async def test_generate_returns_the_whole_completion() -> None:
    async with open_engine_client(scripted_spec()) as client:
        completion = await client.generate([10], SamplingParams(max_tokens=4), request_id="mine")
        assert (completion.request_id, completion.token_ids) == ("mine", [11, 12, 13, 14])
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        stopped = await client.generate([10], SamplingParams(max_tokens=40, stop_token_ids=[15]))
        assert (stopped.token_ids[-1], stopped.finish_reason, stopped.stop_reason) == (15, "stop", 15)


async def test_a_script_is_played_and_stops() -> None:
    async with open_engine_client(scripted_spec(script=[5, 5, 9])) as client:
        completion = await client.generate([1], SamplingParams(max_tokens=10))
        assert (completion.token_ids, completion.finish_reason) == ([5, 5, 9], "stop")


async def test_logprobs_come_one_per_token() -> None:
    async with open_engine_client(scripted_spec()) as client:
        completion = await client.generate([1], SamplingParams(max_tokens=3, logprobs=2))
        assert completion.logprobs is not None
        assert [list(position) for position in completion.logprobs] == [[2, 3, 4], [3, 4, 5], [4, 5, 6]]
        assert completion.logprobs[0][2] == pytest.approx(-0.6931472)


async def test_many_requests_run_together_and_do_not_mix() -> None:
    results: dict[int, list[int]] = {}

    async with open_engine_client(scripted_spec(max_num_seqs=16)) as client:

        async def run(start: int) -> None:
            tokens: list[int] = []
            async with client.open_request([start], SamplingParams(max_tokens=start % 7 + 1)) as request:
                async for output in request:
                    tokens += output.token_ids
            results[start] = tokens

        async with anyio.create_task_group() as group:
            for start in range(200):
                group.start_soon(run, start)
        assert results == {start: [start + 1 + i for i in range(start % 7 + 1)] for start in range(200)}
        assert nothing_runs(client)


async def test_whole_steps_come_in_columns_and_mix_with_streams() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
        handles = [await client.add_request([start], SamplingParams(max_tokens=20)) for start in (100, 200)]
        completion = None

        async def stream() -> None:
            nonlocal completion
            completion = await client.generate([300], SamplingParams(max_tokens=30))

        got: dict[int, list[int]] = {handle: [] for handle in handles}
        finished = 0
        async with anyio.create_task_group() as group:
            group.start_soon(stream)
            while finished < 2:
                step = await client.get_output()
                for handle, tokens, details in step.rows():
                    got[handle] += tokens
                    finished += details is not None and details.finish_reason == "length"
        assert got == {handles[0]: list(range(101, 121)), handles[1]: list(range(201, 221))}
        assert completion is not None and completion.token_ids == list(range(301, 331))
        assert nothing_runs(client)


async def test_nothing_of_an_aborted_request_comes_after_its_abort() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
        kept = await client.add_request([0], SamplingParams(max_tokens=300))
        aborted = await client.add_request([0], SamplingParams(max_tokens=300))
        while aborted not in (await client.get_output()).handles:
            pass
        await client.abort_requests([aborted, aborted, 12345])
        for _ in range(20):
            assert list((await client.get_output()).handles) == [kept]
        await client.abort_requests([kept])
        await client.abort_requests([kept])


async def test_the_rest_of_a_stream_as_one_completion() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.005)) as client:
        async with client.open_request([0], SamplingParams(max_tokens=20)) as request:
            first = await anext(request)
            rest = await request.completion()
            assert first.token_ids + rest.token_ids == list(range(1, 21))
            assert rest.finish_reason == "length"
            with pytest.raises(RuntimeError, match="all of it has been read"):
                await request.completion()


async def test_leaving_a_block_early_frees_the_slot() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001, max_num_seqs=1)) as client:
        async with client.open_request([0], SamplingParams(max_tokens=10_000_000)) as request:
            async for _ in request:
                break
        assert nothing_runs(client)
        with anyio.fail_after(20):  # the only slot is free for the next
            assert (await client.generate([5], SamplingParams(max_tokens=1))).token_ids == [6]


@pytest.mark.parametrize("way", ["exception", "cancel", "timeout"])
async def test_every_way_out_of_a_block_aborts_the_request(way: str) -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001, max_num_seqs=1)) as client:
        with anyio.move_on_after(0.1 if way == "timeout" else None) as scope:
            try:
                async with client.open_request([0], SamplingParams(max_tokens=10_000_000)) as request:
                    async for output in request:
                        if way == "exception":
                            raise KeyError("mine")
                        if way == "cancel":
                            scope.cancel()
            except KeyError as error:
                assert error.args == ("mine",)
                assert way == "exception"
        assert scope.cancelled_caught == (way != "exception")
        assert nothing_runs(client)
        with anyio.fail_after(20):
            await client.generate([5], SamplingParams(max_tokens=1))


async def test_cancelling_generate_aborts_the_request() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
        with anyio.move_on_after(0.05) as scope:
            await client.generate([0], SamplingParams(max_tokens=10_000_000))
        assert scope.cancelled_caught
        assert nothing_runs(client)


async def test_cancelled_at_any_await_nothing_stays_in_any_table() -> None:
    """Cancelled before it is sent, while it waits, and while its tokens come."""
    async with open_engine_client(scripted_spec(step_delay=0.0005, max_num_seqs=8)) as client:

        async def run(number: int) -> None:
            with anyio.CancelScope() as scope:
                if number % 3 == 0:
                    scope.cancel()
                scope.deadline = anyio.current_time() + number * 0.0003
                await client.generate([number], SamplingParams(max_tokens=1000))

        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(run, number)
        assert nothing_runs(client)
        assert (await client.generate([5], SamplingParams(max_tokens=2))).token_ids == [6, 7]
        await until(lambda: client.statistics().engine.get("running") == 0)


async def test_a_request_is_not_kept_alive_by_the_client() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
        for way in ("finished", "aborted"):
            request = client.open_request([0], SamplingParams(max_tokens=4 if way == "finished" else 10**6))
            async with request:
                async for _ in request:
                    if way == "aborted":
                        break
            reference = weakref.ref(request)
            del request
            gc.collect()
            assert reference() is None


async def test_one_id_names_one_live_request() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.01)) as client:
        async with client.open_request([0], SamplingParams(max_tokens=1000), request_id="a"):
            with pytest.raises(RequestRefusedError, match="'a'"):
                client.open_request([0], request_id="a")
            with pytest.raises(RequestRefusedError, match="'a'"):
                await client.generate([0], request_id="a")
            with pytest.raises(RequestRefusedError, match="'a'"):
                await client.add_request([0], request_id="a")
        # free again after the abort, after the end, and for the other way to send
        await client.generate([0], SamplingParams(max_tokens=1), request_id="a")
        handle = await client.add_request([0], SamplingParams(max_tokens=1000), request_id="a")
        await client.abort_requests([handle])
        await client.generate([0], SamplingParams(max_tokens=1), request_id="a")


async def test_two_blocks_opened_with_one_id_at_once_leave_one() -> None:
    async with open_engine_client(scripted_spec(step_delay=0.01)) as client:
        first = client.open_request([0], SamplingParams(max_tokens=1000), request_id="a")
        second = client.open_request([0], SamplingParams(max_tokens=1000), request_id="a")
        async with first:
            with pytest.raises(RequestRefusedError, match="'a'"):
                async with second:
                    pass
        assert nothing_runs(client)


async def test_a_request_is_entered_once_and_iterated_by_one_task() -> None:
    async with open_engine_client(scripted_spec(), shutdown=ShutdownPolicy(grace=0.1)) as client:
        request = client.open_request([0], SamplingParams(max_tokens=3))
        with pytest.raises(RuntimeError, match="enter the request first"):
            await anext(request)
        await client.call_utility("freeze", 60, False)  # so that no token comes while two tasks ask for one
        async with request:
            async with anyio.create_task_group() as group:
                group.start_soon(anext, request)
                await until(lambda: request._arrival is not None)
                with pytest.raises(anyio.BusyResourceError):
                    await anext(request)
                group.cancel_scope.cancel()
        with pytest.raises(RuntimeError, match="sent once"):
            async with request:
                pass


async def test_a_reader_in_another_task_ends_when_the_block_is_left() -> None:
    async with open_engine_client(scripted_spec(step_delay=10)) as client, anyio.create_task_group() as group:
        async with client.open_request([0], SamplingParams(max_tokens=3)) as request:

            async def read() -> None:
                with pytest.raises(anyio.ClosedResourceError, match="its block was left"):
                    await anext(request)

            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()


async def test_get_output_has_one_reader() -> None:
    async with open_engine_client(scripted_spec()) as client, anyio.create_task_group() as group:
        group.start_soon(client.get_output)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError):
            await client.get_output()
        await client.add_request([0], SamplingParams(max_tokens=1))


async def test_a_long_prompt_travels_whole() -> None:
    async with open_engine_client(scripted_spec()) as client:
        prompt = [number % 31_000 for number in range(1_000_000)]
        completion = await client.generate(prompt, SamplingParams(max_tokens=2))
        assert completion.token_ids == [prompt[-1] + 1, prompt[-1] + 2]
        assert nothing_runs(client)
    # pyzmq's collector thread, which large frames start, ended with the client: leaves_nothing looks


async def test_a_completion_that_is_given_up_leaves_the_stream_as_it_was() -> None:
    async with (
        open_engine_client(scripted_spec(step_delay=0.01)) as client,
        client.open_request([0], SamplingParams(max_tokens=10_000)) as request,
    ):
        with anyio.move_on_after(0.05):
            await request.completion()
        tokens = (await anext(request)).token_ids + (await anext(request)).token_ids
        assert tokens == list(range(1, len(tokens) + 1))
        assert len(tokens) < 10_000


async def test_tokens_come_before_the_error_though_a_completion_was_given_up() -> None:
    tokens: list[int] = []
    async with open_engine_client(scripted_spec(step_delay=0.01)) as client:
        async with client.open_request([0], SamplingParams(max_tokens=10_000)) as request:
            with anyio.move_on_after(0.1):
                await request.completion()
            os.kill(client.health().pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await client.wait_dead()
            with pytest.raises(EngineDeadError):
                await request.completion()
            with pytest.raises(EngineDeadError):
                async for output in request:
                    tokens += output.token_ids
    assert tokens
    assert tokens == list(range(1, len(tokens) + 1))


async def test_two_tasks_that_enter_one_request_send_it_once() -> None:
    refused: list[RuntimeError] = []
    async with open_engine_client(scripted_spec(), max_requests=1, when_full="wait") as client:
        handle = await client.add_request([0], SamplingParams(max_tokens=10**6))
        request = client.open_request([1], SamplingParams(max_tokens=10**6))

        async def enter() -> None:
            try:
                await request.__aenter__()
            except RuntimeError as error:
                refused.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(enter)
            group.start_soon(enter)
            await until(lambda: client.statistics().waiting_requests == 1 and refused)
            await client.abort_requests([handle])
        assert len(refused) == 1
        await request.__aexit__(None, None, None)
        await until(lambda: client.statistics().live_requests == 0)


async def test_a_request_whose_entering_was_cancelled_can_be_entered_again() -> None:
    async with open_engine_client(scripted_spec(), max_requests=1, when_full="wait") as client:
        handle = await client.add_request([0], SamplingParams(max_tokens=10**6))
        request = client.open_request([1], SamplingParams(max_tokens=1))
        with anyio.move_on_after(0.05):
            await request.__aenter__()
        await client.abort_requests([handle])
        async with request:
            assert (await request.completion()).token_ids == [2]
