"""Requests, over every kind of client: each token once and in order, ids, refusals, leaving early, limits."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest
from tests.contract.clients import Opener, Setting, needs
from tests.contract.steps import FOREVER, ONE, eventually, nothing_is_left, read, tokens_of, work_on

from anyengine import (
    EngineClient,
    RequestRefusedError,
    RequestStalledError,
    SamplingParams,
    TooManyRequestsError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


# ---- tokens ----


async def test_each_token_comes_once_and_in_order(open_client: Opener) -> None:
    async with open_client() as client, anyio.create_task_group() as group:

        async def run(number: int) -> None:
            start, length = number * 1000, 50 + number * 20
            async with client.open_request([start], SamplingParams(max_tokens=length)) as request:
                outputs = await read(request)
                assert await read(request) == []
            assert tokens_of(outputs) == list(range(start + 1, start + 1 + length))
            assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
            assert all(output.token_ids or output.finish_reason for output in outputs)

        for number in range(10):
            group.start_soon(run, number)


async def test_generate_is_the_stream_in_one_piece(open_client: Opener) -> None:
    sampling = SamplingParams(max_tokens=200, stop_token_ids=[57], logprobs=2)
    async with open_client() as client:
        completion = await client.generate([7], sampling)
        async with client.open_request([7], sampling) as request:
            outputs = await read(request)
        assert completion.token_ids == tokens_of(outputs) == list(range(8, 58))
        assert (completion.finish_reason, completion.stop_reason) == ("stop", 57)
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", 57)
        assert completion.logprobs == [position for output in outputs for position in output.logprobs or ()]
        expected = {8 + place: -(place + 1) * math.log(2) for place in range(3)}
        assert completion.logprobs[0] == pytest.approx(expected, rel=1e-6)
        await eventually(lambda: nothing_is_left(client))


# ---- log-probabilities ----


async def test_too_many_log_probabilities_are_refused_at_the_call(open_client: Opener) -> None:
    params = SamplingParams(max_tokens=2, logprobs=1_000_000)
    refused = "logprobs=1000000: expected at most 20, which is the max_logprobs of engine 'scripted'; start it with"
    async with open_client() as client:
        assert client.info.max_logprobs == 20
        with pytest.raises(RequestRefusedError, match=refused):
            async with client.open_request([7], params):
                pass
        for call in (client.generate, client.add_request):
            with pytest.raises(RequestRefusedError, match=refused):
                await call([7], params)
            with pytest.raises(RequestRefusedError, match=r"logprobs=-1: expected at most 20"):
                await call([7], SamplingParams(max_tokens=2, logprobs=-1))
        completion = await client.generate([7], SamplingParams(max_tokens=2, logprobs=20))
        assert completion.logprobs is not None
        assert completion.token_ids == [8, 9] == [next(iter(position)) for position in completion.logprobs]
        await eventually(lambda: nothing_is_left(client))


async def test_an_engine_without_a_limit_gives_all_log_probabilities(open_client: Opener) -> None:
    async with open_client({"max_logprobs": -1, "vocab_size": 300}) as client:
        for wanted in (-1, 300):
            completion = await client.generate([7], SamplingParams(max_tokens=2, logprobs=wanted))
            assert completion.logprobs is not None
            assert [sorted(position) for position in completion.logprobs] == [list(range(300))] * 2
        with pytest.raises(
            RequestRefusedError, match="logprobs=301: expected at most 300, the tokens of the vocabulary"
        ):
            await client.generate([7], SamplingParams(max_tokens=2, logprobs=301))


async def test_the_engine_refuses_too_many_log_probabilities_by_itself(
    open_client: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may have no such check; other requests go on."""
    monkeypatch.setattr("anyengine.client.checks.within_max_logprobs", lambda sampling, info: sampling)
    async with open_client({"step_delay": 0.005}) as client, client.open_request([7], FOREVER) as other:
        first = await anext(other)
        for wanted in (21, 2**32 - 1, -1):
            with pytest.raises(RequestRefusedError, match=rf"SamplingParams\.logprobs={wanted}: expected at most 20"):
                await client.generate([7], SamplingParams(max_tokens=2, logprobs=wanted))
        more = await anext(other)
        assert first.token_ids + more.token_ids == list(range(8, 8 + len(first.token_ids + more.token_ids)))
        assert more.finish_reason is None


async def test_the_rest_of_a_stream_in_one_piece(open_client: Opener) -> None:
    async with open_client({"step_delay": 0.005}) as client:
        async with client.open_request([7], SamplingParams(max_tokens=30)) as request:
            first = await anext(request)
            assert first.token_ids + (await request.completion()).token_ids == list(range(8, 38))


async def test_a_slow_reader_misses_nothing(open_client: Opener) -> None:
    async with open_client() as client:
        async with client.open_request([0], SamplingParams(max_tokens=300)) as slow:
            await work_on(client, 5000)  # the engine runs all that it has meanwhile
            await client.generate([6000], SamplingParams(max_tokens=400))
            assert tokens_of(await read(slow)) == list(range(1, 301))


async def test_whole_steps_come_once_and_in_order(open_client: Opener) -> None:
    async with open_client() as client:
        handles = [await client.add_request([start], SamplingParams(max_tokens=100)) for start in (1000, 2000, 3000)]
        assert len(set(handles)) == 3
        tokens: dict[int, list[int]] = {handle: [] for handle in handles}
        reasons: dict[int, str] = {}
        while len(reasons) < 3:
            for handle, more, details in (await client.get_output()).rows():
                assert handle not in reasons
                tokens[handle] += more
                if details is not None and details.finish_reason is not None:
                    reasons[handle] = details.finish_reason
        assert reasons == dict.fromkeys(handles, "length")
        assert list(tokens.values()) == [list(range(start + 1, start + 101)) for start in (1000, 2000, 3000)]
        await eventually(lambda: nothing_is_left(client))


async def test_streams_and_whole_steps_do_not_mix(open_client: Opener) -> None:
    async with open_client() as client:
        async with client.open_request([0], SamplingParams(max_tokens=150)) as request:
            handle = await client.add_request([5000], SamplingParams(max_tokens=100))
            tokens: list[int] = []
            while len(tokens) < 100:
                step = await client.get_output()
                assert set(step.handles) == {handle}
                tokens += step.token_ids
            assert tokens == list(range(5001, 5101))
            assert tokens_of(await read(request)) == list(range(1, 151))


# ---- ending early ----


async def test_no_token_comes_of_a_request_that_was_aborted(open_client: Opener) -> None:
    async with open_client({"step_delay": 0.0005}) as client:
        kept, aborted = [await client.add_request([start], FOREVER) for start in (0, 1000)]
        while aborted not in (await client.get_output()).handles:
            pass
        await client.abort_requests([aborted])
        for _ in range(20):
            rows = (await client.get_output()).rows()
            assert all(handle == kept or not tokens for handle, tokens, _ in rows)
        await client.abort_requests([kept])


async def test_nothing_comes_of_an_ended_request_after_it_was_aborted(open_client: Opener) -> None:
    async with open_client() as client:
        ended = await client.add_request([0], SamplingParams(max_tokens=20))
        assert list((await client.get_output()).handles) == [ended]
        await client.generate([5000], SamplingParams(max_tokens=40))  # its rows have come by now, and are not read
        await client.abort_requests([ended])
        other = await client.add_request([7], ONE)
        assert [(handle, list(tokens)) for handle, tokens, _ in (await client.get_output()).rows()] == [(other, [8])]


async def test_aborts_of_what_is_not_there_are_harmless(open_client: Opener) -> None:
    async with open_client({"step_delay": 0.0005}) as client:
        finished = await client.add_request([0], ONE)
        assert list((await client.get_output()).handles) == [finished]
        live = await client.add_request([0], FOREVER)
        for handles in ([finished], [finished, finished], [10**9, 2**63], [], [live, finished, live], [live]):
            await client.abort_requests(handles)
        with pytest.raises(TypeError, match="handles holds 'a'"):
            await client.abort_requests(["a"])  # type: ignore[list-item]
        await work_on(client)


@pytest.mark.parametrize("way", ["break", "exception", "unread"])
async def test_leaving_a_stream_early_frees_its_slot(way: str, open_client: Opener) -> None:
    async with open_client({"step_delay": 0.0005, "max_num_seqs": 1}) as client:
        for start in range(3):
            try:
                async with client.open_request([start], FOREVER) as request:
                    if way != "unread":
                        async for _ in request:
                            if way == "exception":
                                1 / 0  # noqa: B018
                            break
            except ZeroDivisionError as error:
                assert error.__context__ is None
            await work_on(client, start)
        await eventually(lambda: nothing_is_left(client))


# ---- refusals ----


async def test_one_id_names_one_live_request(open_client: Opener) -> None:
    async with open_client({"step_delay": 0.0005}) as client:
        await client.add_request([0], FOREVER, request_id="mine")
        for attempt in (client.generate, client.add_request):
            with pytest.raises(RequestRefusedError, match="'mine'"):
                await attempt([1], request_id="mine")
        with pytest.raises(RequestRefusedError, match="'mine'"):
            async with client.open_request([1], request_id="mine"):
                pass
        await client.generate([1], ONE, request_id="other")


@pytest.mark.parametrize("ending", ["finished", "aborted"])
async def test_an_id_is_free_again_when_its_request_has_ended(ending: str, open_client: Opener) -> None:
    async with open_client({"step_delay": 0.0005}) as client:
        for _ in range(3):
            if ending == "finished":
                await client.generate([0], ONE, request_id="mine")
            handle = await client.add_request([0], FOREVER, request_id="mine")
            await client.abort_requests([handle])


BAD_REQUESTS: list[tuple[Any, Any, type[Exception], str]] = [
    ([], ONE, RequestRefusedError, "at least one token"),
    ([-1], ONE, RequestRefusedError, r"prompt_token_ids\[0\]=-1"),
    ([0, 2**32], ONE, RequestRefusedError, r"prompt_token_ids\[1\]=4294967296"),
    ([1.5], ONE, TypeError, r"prompt_token_ids\[0\]=1\.5"),
    ("text", ONE, TypeError, "tokenize it first"),
    (None, ONE, TypeError, "exactly one of"),
    ([1], {"max_tokens": 3}, TypeError, "expected a SamplingParams"),
    ([1], SamplingParams(top_p=0.5), RequestRefusedError, r"top_p=0\.5.*does not support"),
    ([1], SamplingParams(extra={"mood": "good"}), RequestRefusedError, "extra"),
]


async def test_what_cannot_be_is_refused_before_anything_is_sent(open_client: Opener) -> None:
    async with open_client() as client:
        before = await client.add_request([0], ONE)
        for prompt, sampling, kind, words in BAD_REQUESTS:
            for attempt in (client.generate, client.add_request):
                with pytest.raises(kind, match=words):
                    await attempt(prompt, sampling)
            with pytest.raises(kind, match=words):
                async with client.open_request(prompt, sampling):
                    pass
        for request_id in ("", 3):
            with pytest.raises((RequestRefusedError, TypeError), match="request_id="):
                await client.generate([1], ONE, request_id=request_id)  # type: ignore[arg-type]
        # No handle was drawn for any of them.
        assert await client.add_request([0], ONE) == before + 1


async def test_what_the_engine_refuses_fails_alone(open_client: Opener) -> None:
    async with open_client({"vocab_size": 20_000, "step_delay": 0.0005}) as client:
        async with client.open_request([0], SamplingParams(max_tokens=100)) as other:
            for _ in range(3):
                with pytest.raises(RequestRefusedError, match="prompt token id 30000 is not below vocab_size 20000"):
                    await client.generate([30_000])
            assert tokens_of(await read(other)) == list(range(1, 101))
        await eventually(lambda: nothing_is_left(client))


# ---- limits ----


@needs("options")
async def test_a_request_of_which_nothing_comes_fails_alone(open_client: Opener) -> None:
    async with open_client({"max_num_seqs": 1, "step_delay": 0.0005}) as client:
        running = await client.add_request([0], FOREVER)
        with pytest.raises(RequestStalledError, match=r"0\.2 s, its stall_limit") as caught:
            await client.generate([1], ONE, stall_limit=0.2)
        assert isinstance(caught.value, TimeoutError)
        async with client.open_request([1], ONE, stall_limit=0.2) as request:
            with pytest.raises(RequestStalledError):
                await anext(request)
        await client.abort_requests([running])
        assert (await client.generate([1], ONE, stall_limit=30)).token_ids == [2]


@needs("options")
async def test_one_request_too_many_is_refused(open_client: Opener) -> None:
    async with open_client({"step_delay": 0.0005}, max_requests=3) as client:
        handles = [await client.add_request([0], FOREVER) for _ in range(3)]
        for attempt in (client.generate, client.add_request):
            with pytest.raises(TooManyRequestsError) as caught:
                await attempt([1])
            assert caught.value.limit == 3
        with pytest.raises(TooManyRequestsError):
            async with client.open_request([1]):
                pass
        assert await client.call_utility("echo", 1) == 1
        await client.abort_requests(handles[:1])
        await work_on(client)
        await client.abort_requests(handles)


@needs("options")
async def test_one_request_too_many_waits_for_its_turn(open_client: Opener, setting: Setting) -> None:
    async with open_client({"step_delay": 0.0005}, max_requests=2, when_full="wait") as client:
        handles = [await client.add_request([0], FOREVER) for _ in range(2)]
        done: list[int] = []

        async def generate(start: int) -> None:
            assert (await client.generate([start], ONE)).token_ids == [start + 1]
            done.append(start)

        async with anyio.create_task_group() as group:
            for start in range(5):
                group.start_soon(generate, start)
                await eventually(lambda expected=start + 1: client.statistics().waiting_requests == expected)  # type: ignore[misc]
            assert not done
            await client.abort_requests(handles[:1])
        assert sorted(done) == list(range(5))
        if setting.kind != "sync":  # there each answer goes to a thread of its own, in any order
            assert done == list(range(5))
        await client.abort_requests(handles)
        await eventually(lambda: nothing_is_left(client))


# ---- several clients ----


async def test_two_clients_in_one_program(open_client: Opener) -> None:
    async with open_client({"vocab_size": 100}) as small, open_client({"vocab_size": 1000}) as large:

        async def run(client: EngineClient, vocab_size: int) -> None:
            for _ in range(3):
                completion = await client.generate([90], SamplingParams(max_tokens=50))
                assert completion.token_ids == [(91 + n) % vocab_size for n in range(50)]

        async with anyio.create_task_group() as group:
            group.start_soon(run, small, 100)
            group.start_soon(run, large, 1000)
