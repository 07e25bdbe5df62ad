"""Long prompts and long answers become tokens and text in pieces, between which other tasks run."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import anyio
import numpy
import pytest
import torch
from anyio.lowlevel import checkpoint
from tests.text import kinds

from anyengine import RequestRefusedError, SamplingParams, open_engine_client, open_sync_engine_client
from anyengine.client.engine_client import EngineClient
from anyengine.client.prompts import LONG_PROMPT
from anyengine.testing import scripted_spec
from anyengine.text import ModelText
from anyengine.text.outputs import PIECE, pieces
from anyengine.text.text_request import TextRequest
from anyengine.types import Completion, RequestOutput

pytestmark = pytest.mark.anyio

TEXT = ModelText(kinds.byte_level())
A, B = TEXT.encode("ab")
ONE_TOKEN = SamplingParams(max_tokens=1)
LENGTH = LONG_PROMPT + 10
TOKENS = [A] * (LENGTH - 1) + [B]
TEXT_OF_ANSWER = "ab" * (2 * PIECE) + "\N{EURO SIGN}" * PIECE
"""Characters of three tokens, some of which are in two pieces."""


def answer() -> list[int]:
    tokens = {TEXT.token_bytes(token)[0]: token for token in range(256)}
    return [tokens[byte] for byte in TEXT_OF_ANSWER.encode()]


PROMPTS: dict[str, Callable[[], Any]] = {
    "text": lambda: "a" * (LENGTH - 1) + "b",
    "list": lambda: TOKENS,
    "array": lambda: array("I", TOKENS),
    "numpy": lambda: numpy.array(TOKENS),
    "torch": lambda: torch.tensor(TOKENS),
    "iterator": lambda: iter(TOKENS),
}


@pytest.mark.parametrize("kind", PROMPTS)
async def test_every_kind_of_long_prompt(kind: str, anyio_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    open_request = EngineClient.open_request

    def noting(self: EngineClient, prompt: Any, *others: Any, **options: Any) -> Any:
        taken.append(prompt)
        return open_request(self, prompt, *others, **options)

    monkeypatch.setattr(EngineClient, "open_request", noting)
    async with open_engine_client(scripted_spec()) as client:
        completion = await TEXT.generate(client, PROMPTS[kind](), ONE_TOKEN)
    assert completion.prompt_token_ids == TOKENS
    assert completion.token_ids == [B + 1]
    if kind != "iterator":  # the event loop has no token of it to look at
        assert taken[0].format == "I"


def test_a_blocking_call_with_a_long_prompt() -> None:
    with open_sync_engine_client(scripted_spec()) as client:
        completion = TEXT.generate_sync(client, numpy.array(TOKENS), ONE_TOKEN)
    assert (completion.prompt_token_ids, completion.token_ids) == (TOKENS, [B + 1])


async def test_a_token_of_a_long_prompt_that_cannot_be_is_told_with_its_place() -> None:
    async with open_engine_client(scripted_spec()) as client:
        with pytest.raises(RequestRefusedError, match=r"prompt_token_ids\[7\]=-1: a token id is 0 to"):
            await TEXT.generate(client, [*TOKENS[:7], -1, *TOKENS], ONE_TOKEN)
        with pytest.raises(TypeError, match="in one flat list"):
            await TEXT.generate(client, numpy.zeros((LENGTH, 1), int))
        assert client.statistics().live_requests == 0


async def test_other_tasks_run_while_a_long_answer_becomes_text() -> None:
    turns: list[int] = []
    script = answer()
    feed = TEXT.detokenizer().feed

    class Noting:
        """A detokenizer that notes in which turn of the loop it is asked."""

        finish = staticmethod(lambda: "")

        def feed(self, token_ids: Any) -> str:
            turns.append(number)
            return feed(token_ids)

    number = 0
    over = anyio.Event()

    async def neighbour() -> None:
        nonlocal number
        while not over.is_set():
            number += 1
            await checkpoint()

    async with (
        open_engine_client(scripted_spec(script=script, vocab_size=300)) as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(neighbour)
        async with TEXT.open_stream(client, "a", SamplingParams(max_tokens=len(script))) as stream:
            _, assembler = stream._running or pytest.fail()  # pyright: ignore[reportPrivateUsage]
            assembler._detokenizer = Noting()  # pyright: ignore[reportPrivateUsage]
            completion = await stream.completion()
        over.set()
    assert completion.text == TEXT_OF_ANSWER
    assert completion.token_ids == script
    assert len(turns) == -(-len(script) // PIECE)
    assert len(set(turns)) > len(turns) // 2


@pytest.mark.parametrize("stop", ["\N{EURO SIGN}", "b" + "\N{EURO SIGN}" * (PIECE // 2), "nowhere"])
def test_an_answer_in_pieces_ends_where_it_does_in_one(stop: str) -> None:
    script = answer()
    logprobs = [{token: -1.0} for token in script]
    whole = Completion(
        request_id="1",
        token_ids=script,
        finish_reason="length",
        logprobs=logprobs,
        prompt_logprobs=[{}],
        events=["event"],
    )
    request = TextRequest(TEXT, "a", SamplingParams(), stop=stop)
    expected = request.assembler(()).feed(whole)
    found = list(request.assembler(()).feed_in_pieces(whole))
    assert "".join(output.text for output in found) == expected.text
    for name in ("token_ids", "logprobs", "events", "prompt_logprobs"):
        assert [item for output in found for item in getattr(output, name) or ()] == getattr(expected, name)
    assert [output.finish_reason for output in found] == [*[None] * (len(found) - 1), expected.finish_reason]
    assert found[-1].stop_reason == expected.stop_reason


def test_the_pieces_of_an_output() -> None:
    output = RequestOutput(request_id="1", token_ids=list(range(2 * PIECE)), finish_reason="stop", stop_reason=7)
    first, second = pieces(output)
    assert first == dataclasses.replace(
        output, token_ids=output.token_ids[:PIECE], finish_reason=None, stop_reason=None
    )
    assert second == dataclasses.replace(output, token_ids=output.token_ids[PIECE:])
    assert list(pieces(first)) == [first]
