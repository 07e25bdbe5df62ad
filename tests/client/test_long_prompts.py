"""Long prompts are checked in pieces, between which other tasks run, and no call waits for their bytes to be read."""

from __future__ import annotations

import os
import signal
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import anyio
import numpy
import pytest
import torch
from anyio.lowlevel import checkpoint
from tests.helpers import BUSY

from anyengine import EngineClient, RequestRefusedError, SamplingParams, open_engine_client
from anyengine.client import prompts, request_group
from anyengine.client.engine_client import session_of
from anyengine.client.prompts import LONG_PROMPT, PIECE, LongPrompt, accept_prompt, check_prompt
from anyengine.client.request_group import MESSAGE_TOKENS, RequestGroup
from anyengine.protocol.sampling import NO_OPTIONS
from anyengine.testing import ScriptedEngine, scripted_spec
from anyengine.types import Completion

pytestmark = pytest.mark.anyio

LENGTH = 50_000
ONE_TOKEN = SamplingParams(max_tokens=1)
TOKENS = [number * 7 % 100 for number in range(LENGTH)]
ANSWER = [TOKENS[-1] + 1]


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
async def client(anyio_backend: str) -> AsyncIterator[EngineClient]:
    """One for all tests: each takes its requests with it."""
    async with open_engine_client(scripted_spec(vocab_size=101)) as client:
        yield client


KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "array of u32": lambda tokens: array("I", tokens),
    "array of i64": lambda tokens: array("q", tokens),
    "memoryview": lambda tokens: memoryview(array("i", tokens)),
    "memoryview with steps": lambda tokens: memoryview(array("I", [x for x in tokens for _ in range(2)]))[::2],
    "numpy i64": numpy.array,
    "numpy u32": lambda tokens: numpy.array(tokens, "u4"),
    "numpy u8": lambda tokens: numpy.array(tokens, "u1"),
    "numpy big-endian": lambda tokens: numpy.array(tokens, ">i4"),
    "numpy with steps": lambda tokens: numpy.repeat(numpy.array(tokens), 2)[::2],
    "torch i64": torch.tensor,
    "torch i32": lambda tokens: torch.tensor(tokens, dtype=torch.int32),
    "torch with steps": lambda tokens: torch.tensor(tokens).repeat_interleave(2)[::2],
    "list of numpy's": lambda tokens: list(numpy.array(tokens)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_prompt_is_the_same_tokens(kind: str) -> None:
    info = ScriptedEngine().describe()
    for length in (1, LONG_PROMPT, LONG_PROMPT + 1, LENGTH):
        made = KINDS[kind](TOKENS[:length])
        found = check_prompt(made, None, info)
        assert found is not None
        assert list(found) == TOKENS[:length]
        assert memoryview(found).format == "I"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_may_change_after_the_call(kind: str) -> None:
    if kind == "tuple":
        pytest.skip("tuples do not change")
    made = KINDS[kind](TOKENS)
    accepted = accept_prompt(made, None, ScriptedEngine().describe())
    for place in range(0, LENGTH, 1000):
        made[place] = 100
    if isinstance(accepted, LongPrompt):
        for _ in accepted.check():
            pass
        accepted = accepted.token_ids
    assert list(accepted or ()) == TOKENS


@pytest.mark.parametrize("kind", ["list", "array of u32", "numpy i64", "torch i64"])
async def test_each_way_of_making_a_request_takes_long_prompts(client: EngineClient, kind: str) -> None:
    prompt = KINDS[kind](TOKENS)
    assert (await client.generate(prompt, ONE_TOKEN)).token_ids == ANSWER
    async with client.open_request(prompt, ONE_TOKEN) as request:
        assert (await request.completion()).token_ids == ANSWER
    handle = await client.add_request(prompt, ONE_TOKEN)
    step = await client.get_output()
    assert (list(step.handles), list(step.token_ids)) == ([handle], ANSWER)


async def test_other_tasks_run_while_a_long_prompt_is_checked(client: EngineClient) -> None:
    turns = 0
    over = False

    async def neighbour() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(neighbour)
        await checkpoint()
        async with client.open_request(TOKENS, ONE_TOKEN):
            assert turns >= LENGTH // PIECE
        over = True


async def test_of_many_long_prompts_one_at_a_time_is_checked(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    check = prompts.as_token_ids

    def noting(where: str, token_ids: Sequence[Any], first: int = 0) -> array[int]:
        checked.append(first)
        return check(where, token_ids, first)

    monkeypatch.setattr(prompts, "as_token_ids", noting)
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(client.generate, TOKENS, ONE_TOKEN)
    assert checked == 5 * list(range(0, LENGTH, PIECE))


@pytest.mark.parametrize(
    ("token", "error", "words"),
    [
        (-1, RequestRefusedError, "prompt_token_ids[40000]=-1: a token id is 0 to 4294967295"),
        (1.5, TypeError, "prompt_token_ids[40000]=1.5 (float): expected integers from 0 to 4294967295"),
        ([1], TypeError, "prompt_token_ids[40000]=[1] (list): expected integers from 0 to 4294967295 in one flat list"),
        (None, TypeError, "prompt_token_ids[40000]=None (NoneType): expected integers"),
    ],
)
async def test_a_token_that_cannot_be_is_told_when_the_request_is_entered(
    client: EngineClient, token: Any, error: type[Exception], words: str
) -> None:
    prompt: list[Any] = list(TOKENS)
    prompt[40_000] = token
    request = client.open_request(prompt, ONE_TOKEN)
    for call in (request.__aenter__, lambda: client.generate(prompt), lambda: client.add_request(prompt)):
        with pytest.raises(error) as caught:
            await call()
        assert words in str(caught.value)
    assert client.statistics().live_requests == 0
    assert (await client.generate(TOKENS, ONE_TOKEN)).token_ids == ANSWER


@pytest.mark.parametrize("prompt", [torch.tensor([TOKENS]), numpy.array([TOKENS]), numpy.zeros((LENGTH, 1), int)])
async def test_an_array_that_is_not_flat_is_refused_at_the_call(client: EngineClient, prompt: Any) -> None:
    with pytest.raises(TypeError, match=r"prompt_token_ids of shape \[\d+, \d+\]: .* in one flat list"):
        client.open_request(prompt)


async def test_a_request_whose_check_was_cancelled_can_be_entered_again(client: EngineClient) -> None:
    request = client.open_request(TOKENS, ONE_TOKEN)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                await checkpoint()
                scope.cancel()

            group.start_soon(cancel)
            await request.__aenter__()
    assert scope.cancelled_caught
    assert client.statistics().live_requests == 0
    async with request:
        assert (await request.completion()).token_ids == ANSWER


async def test_nobody_waits_until_the_bytes_of_a_prompt_have_been_read() -> None:
    """Nobody can change them."""
    async with open_engine_client(scripted_spec(vocab_size=101)) as client:
        pid = client.health().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(BUSY):
                async with client.open_request(array("I", TOKENS) * 50, ONE_TOKEN):
                    assert client.statistics().tracked_buffers == 0
                    os.kill(pid, signal.SIGCONT)
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_the_messages_of_a_group_are_bounded_and_the_loop_goes_on_between_them(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(client)
    group = RequestGroup(session, ONE_TOKEN, NO_OPTIONS, 100)
    register = session.register
    sent: list[tuple[int, list[int]]] = []
    turns = 0

    def noting(owner: Any, added: Any, *others: Any) -> Any:
        sent.append((turns, list(map(len, added))))
        return register(owner, added, *others)

    monkeypatch.setattr(session, "register", noting)
    lengths = [MESSAGE_TOKENS * 2, 10, 10, *[MESSAGE_TOKENS // 3] * 4, 5]
    group.add([(place, array("I", bytes(4 * length))) for place, length in enumerate(lengths)])
    results: dict[int, Any] = {}
    with anyio.fail_after(BUSY):
        while len(results) < len(lengths):
            turns += 1
            await checkpoint()
            results.update(group.results())
    assert [length for _, message in sent for length in message] == lengths
    assert all(len(message) == 1 or sum(message) <= MESSAGE_TOKENS for _, message in sent)
    assert sent[0][1] == lengths[:1]
    assert sent[1][0] > sent[0][0]
    assert all(isinstance(result, Completion) and result.token_ids == [1] for result in results.values())


async def test_a_group_keeps_a_bounded_number_of_columns(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_group, "_KEPT_TOKENS", 64)
    group = RequestGroup(session_of(client), SamplingParams(max_tokens=1000), NO_OPTIONS, 4)
    push = group.push
    kept: list[int] = []

    def noting(outputs: Any) -> None:
        push(outputs)
        kept.append(len(group._steps))  # pyright: ignore[reportPrivateUsage] - nothing else shows it

    monkeypatch.setattr(group, "push", noting)
    group.add([(place, array("I", [place])) for place in range(4)])
    results: dict[int, Any] = {}
    with anyio.fail_after(BUSY):
        while len(results) < 4:
            await checkpoint()
            results.update(group.results())
    assert max(kept) < 64
    for place, result in results.items():
        assert result.token_ids == [(place + 1 + number) % 101 for number in range(1000)]
