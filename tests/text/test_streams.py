"""Text streams on real clients: pieces, stop strings, aborts, deaths, cancellation, and blocking calls."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from tests.helpers import until, until_sync
from tests.text import kinds

from anyengine import (
    EngineClient,
    EngineClosedError,
    EngineDeadError,
    EngineSpec,
    ModelError,
    ProcessLauncher,
    RequestRefusedError,
    RequestStalledError,
    SamplingParams,
    SyncEngineClient,
    open_engine_client,
    open_sync_engine_client,
)
from anyengine.testing import scripted_spec
from anyengine.text import ModelText, TextOutput, TextStream
from anyengine.text.text_request import ENCODED_IN_PLACE

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TEMPLATE += "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
TEXT = ModelText(kinds.byte_level(), chat_templates={"default": TEMPLATE})
EOS = TEXT.encode(kinds.SPECIAL)
NO_TEXT = [30_000] * 20_000
"""Tokens that the tokenizer does not have."""

ENDLESS = SamplingParams(max_tokens=100_000)


def script_of(text: str) -> list[int]:
    """One token for each byte."""
    tokens = {TEXT.token_bytes(token)[0]: token for token in range(256)}
    return [tokens[byte] for byte in text.encode()]


@asynccontextmanager
async def reciting(text: str, **options: Any) -> AsyncIterator[EngineClient]:
    """An engine that answers everything with ``text``, and does not end with it if that ends with three dots."""
    async with open_engine_client(recital(text, **options)) as client:
        yield client


def recital(text: str, step_delay: float = 0.0) -> EngineSpec:
    script = script_of(text.removesuffix("..."))
    if text.endswith("..."):
        # Not as fast as it can: its end must not come before what a test does meanwhile, on however busy a machine.
        return scripted_spec(script=script + script_of(".") * 20_000, step_delay=step_delay or 0.001)
    return scripted_spec(script=script + EOS, step_delay=step_delay)


async def read(stream: TextStream) -> list[TextOutput]:
    return [output async for output in stream]


async def read_tokens(stream: TextStream, number: int) -> None:
    """Read until so many tokens have come, or more."""
    while number > 0:
        number -= len((await anext(stream)).token_ids)


async def until_engine_is_idle(client: EngineClient) -> None:
    """The engine itself says, once a second or when it is idle, that it runs nothing; in time, for all recitals end."""
    await until(lambda: client.statistics().engine.get("running") == 0, 10)


# ---- text ----


async def test_text_comes_in_pieces_that_are_the_whole() -> None:
    said = "One, zwei, 三, 🎉 four."
    async with reciting(said, step_delay=0.01) as client:
        async with TEXT.open_stream(client, "Count", SamplingParams(max_tokens=100), request_id="mine") as stream:
            assert stream.prompt_token_ids == TEXT.encode("Count")
            assert stream.request_id == "mine"
            outputs = await read(stream)
        assert "".join(output.text for output in outputs) == said
        assert [token for output in outputs for token in output.token_ids] == script_of(said) + EOS
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["stop"]
        assert len(outputs) > 3
        assert {output.request_id for output in outputs} == {"mine"}
        assert not any("\N{REPLACEMENT CHARACTER}" in output.text for output in outputs)


@pytest.mark.parametrize("stop", [(), ("zzz",)], ids=["plain", "stop"])
async def test_a_whole_answer(stop: tuple[str, ...]) -> None:
    async with reciting("Yes, 三.") as client:
        sampling = SamplingParams(max_tokens=7, logprobs=1)
        completion = await TEXT.generate(client, "Say", sampling, stop=stop)
        assert completion.text == "Yes, \N{REPLACEMENT CHARACTER}"  # max_tokens came in the middle of a character
        assert completion.token_ids == script_of("Yes, 三.")[:7]
        assert completion.prompt_token_ids == TEXT.encode("Say")
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids


async def test_prompts_of_every_kind() -> None:
    messages = [{"role": "user", "content": "Hello?"}]
    async with reciting("Yes.") as client:
        for prompt, token_ids in (
            ("Hello?", TEXT.encode("Hello?")),
            (messages, TEXT.encode("user: Hello?\n")),
            (TEXT.encode("Hello?"), TEXT.encode("Hello?")),
        ):
            completion = await TEXT.generate(client, prompt)
            assert (completion.text, completion.prompt_token_ids) == ("Yes.", token_ids)
        option = {"add_generation_prompt": False, "tools": [{"name": "f"}]}
        assert (await TEXT.generate(client, messages, chat_options=option)).prompt_token_ids == TEXT.encode(
            "user: Hello?\n[f]"
        )


async def test_the_token_that_ends_an_answer_is_no_text_of_it() -> None:
    async with reciting("Yes.") as client:
        for options, expected in (
            ({"skip_special_tokens": False}, "Yes."),
            ({"skip_special_tokens": False, "stop": "zzz"}, "Yes."),
            ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "Yes." + kinds.SPECIAL),
            ({"include_stop_str_in_output": True}, "Yes."),
        ):
            completion = await TEXT.generate(client, "Say", **options)  # pyright: ignore[reportArgumentType]
            assert (completion.text, completion.token_ids) == (expected, script_of("Yes.") + EOS)
            assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


async def test_an_answer_in_a_chat_begins_a_text_and_a_completion_continues_one() -> None:
    tokenizer = kinds.byte_fallback()
    text = ModelText(tokenizer, chat_templates={"default": "{{ messages[0].content }}"})
    script = [tokenizer.token_to_id(token) for token in ("▁hello", "▁world", kinds.SPECIAL)]
    async with open_engine_client(scripted_spec(script=script)) as client:
        assert (await text.generate(client, "b")).text == " hello world"
        assert (await text.generate(client, [{"role": "user", "content": "b"}])).text == "hello world"


# ---- stop strings ----


async def test_a_stop_string_ends_the_request_in_the_engine_at_once() -> None:
    async with reciting("Yes.\nUser: and so on...") as client:
        async with TEXT.open_stream(client, "Say", ENDLESS, stop=["\nUser:", "zzz"]) as stream:
            outputs = await read(stream)
            # Still in the block: the caller may be slow to leave it.
            statistics = client.statistics()
            assert statistics.live_requests == statistics.aborting_requests == 0
            await until_engine_is_idle(client)
        assert "".join(output.text for output in outputs) == "Yes."
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "\nUser:")
        assert [token for output in outputs for token in output.token_ids] == script_of("Yes.\nUser:")
        completion = await TEXT.generate(client, "Say", ENDLESS, stop="User", include_stop_str_in_output=True)
        assert completion.text == "Yes.\nUser"
        assert completion.token_ids == script_of("Yes.\nUser")
        assert completion.stop_reason == "User"
        # The engine is as good as new.
        assert (await TEXT.generate(client, "Say", SamplingParams(max_tokens=3))).text == "Yes"


async def test_many_streams_and_a_slow_reader() -> None:
    said = "a" * 300 + "END..."
    async with reciting(said) as client:

        async def ask(delay: float) -> None:
            async with TEXT.open_stream(client, "Say", ENDLESS, stop=["END"]) as stream:
                text = ""
                async for output in stream:
                    text += output.text
                    await anyio.sleep(delay)
                texts.append((text, output.stop_reason))

        texts: list[tuple[str, Any]] = []
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(ask, 0.02 * (number % 3))
        assert texts == [("a" * 300, "END")] * 20
        await until_engine_is_idle(client)


# ---- errors ----


async def test_what_is_wrong_with_a_request() -> None:
    no_chat = ModelText(kinds.byte_level())
    async with reciting("Yes.") as client:
        for options, error, message in (
            ({"prompt": 5}, TypeError, r"prompt=5 \(int\): expected text, messages or token ids"),
            ({"prompt": b"Hi"}, TypeError, "expected text, messages or token ids"),
            ({"prompt": ["Hi"]}, TypeError, "expected text, messages or token ids"),
            ({"prompt": {"role": "user"}}, TypeError, "expected text, messages or token ids"),
            ({"stop": ""}, RequestRefusedError, r"stop\[0\]=''"),
            ({"chat_options": {"tools": []}}, TypeError, "chat_options are for a prompt of messages"),
            ({"stops": ["a"]}, TypeError, "unexpected keyword argument 'stops': .* priority, .* stop, "),
            ({"client": TEXT}, TypeError, "expected an EngineClient; open_sync_stream"),
        ):
            with pytest.raises(error, match=message):
                TEXT.open_stream(**{"client": client, "prompt": "Say", **options})  # pyright: ignore
        for text, options, error, message in (
            (TEXT, {"prompt": ""}, RequestRefusedError, "expected text that has at least one token"),
            (TEXT, {"prompt": []}, RequestRefusedError, "expected at least one token"),
            (TEXT, {"prompt": [1, "Hi"]}, TypeError, r"prompt_token_ids\[1\]='Hi'"),
            (TEXT, {"prompt": "\ud83c"}, RequestRefusedError, "surrogate"),
            (TEXT, {"prompt": [{"role": "usr"}]}, RequestRefusedError, "the role 'usr'"),
            (TEXT, {"sampling_params": SamplingParams(top_k=3)}, RequestRefusedError, "top_k"),
            (TEXT, {"priority": "high"}, TypeError, "priority='high'"),
            (TEXT, {"cache_salt": "s"}, RequestRefusedError, "cache_salt"),
            (no_chat, {"prompt": [{"role": "user", "content": "Hi"}]}, ModelError, "no chat template"),
        ):
            with pytest.raises(error, match=message):
                async with text.open_stream(**{"client": client, "prompt": "Say", **options}):  # pyright: ignore
                    pytest.fail("it was sent")
        assert client.statistics().live_requests == 0
        stream = TEXT.open_stream(client, "Say")
        with pytest.raises(RuntimeError, match="enter the request first"):
            await anext(stream)
        async with stream:
            assert (await stream.completion()).text == "Yes."
            with pytest.raises(RuntimeError, match="all of it has been read"):
                await stream.completion()
        with pytest.raises(RuntimeError, match="can be sent once"):
            await stream.__aenter__()
        async with TEXT.open_stream(client, "Say", stop="e") as stream:
            assert (await stream.completion()).text == "Y"
            assert await read(stream) == []
            with pytest.raises(RuntimeError, match="all of it has been read"):
                await stream.completion()
    with pytest.raises(EngineClosedError):
        await TEXT.generate(client, "Say")


async def test_a_death_comes_after_the_text_that_was_held_back() -> None:
    said = "So far: EN"  # of which "EN" may become a stop string
    async with open_engine_client(scripted_spec(script=script_of(said) + NO_TEXT, step_delay=0.001)) as client:
        text, tokens = "", 0
        with pytest.raises(EngineDeadError) as raised:
            async with TEXT.open_stream(client, "Say", ENDLESS, stop=["END"]) as stream:
                async for output in stream:
                    text += output.text
                    if tokens < len(said) <= (tokens := tokens + len(output.token_ids)):
                        assert text == "So far: "
                        os.kill(client.health().pid, signal.SIGKILL)
        assert text == said
        assert raised.value.report.signal == signal.SIGKILL


async def test_a_death_is_news_even_if_the_reader_leaves_with_the_last_text() -> None:
    with pytest.raises(EngineDeadError):
        async with open_engine_client(scripted_spec(script=script_of("EN") + NO_TEXT, step_delay=0.001)) as client:
            async with TEXT.open_stream(client, "Say", ENDLESS, stop=["END"]) as stream:
                await read_tokens(stream, 2)
                os.kill(client.health().pid, signal.SIGKILL)
                async for output in stream:
                    if output.text == "EN":
                        break


@pytest.mark.parametrize("stop", ["", "zzz"])
async def test_a_death_during_a_whole_answer(stop: str) -> None:
    async with reciting("So far...") as client:

        async def kill() -> None:
            await until(lambda: client.statistics().live_requests, 30)
            os.kill(client.health().pid, signal.SIGKILL)

        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            with pytest.raises(EngineDeadError):
                await TEXT.generate(client, "Say", ENDLESS, stop=stop or ())


async def test_a_request_that_stalls() -> None:
    async with reciting("So far...") as client:
        await client.pause_scheduler("keep")
        with pytest.raises(RequestStalledError):
            await TEXT.generate(client, "Say", ENDLESS, stop=["zzz"], stall_limit=0.1)
        await client.resume_scheduler()
        assert (await TEXT.generate(client, "Say", ENDLESS, stop=["far"])).text == "So "


async def test_a_stall_comes_after_the_text_that_was_held_back() -> None:
    async with open_engine_client(scripted_spec(script=script_of("So fa") + NO_TEXT, step_delay=0.001)) as client:
        text = ""
        async with TEXT.open_stream(client, "Say", ENDLESS, stop=["far"], stall_limit=1) as stream:
            await read_tokens(stream, 5)
            await client.pause_scheduler("keep")
            with pytest.raises(RequestStalledError):
                async for output in stream:
                    text += output.text
            assert await read(stream) == []
        assert text == "fa"


# ---- cancellation ----


@pytest.mark.parametrize("stop", [(), ("zzz",)], ids=["plain", "stop"])
async def test_cancelling_aborts_the_request(stop: tuple[str, ...]) -> None:
    async with reciting("So far...") as client:
        with anyio.move_on_after(0.1) as scope:
            await TEXT.generate(client, "Say", ENDLESS, stop=stop)
        assert scope.cancelled_caught
        assert client.statistics().live_requests == client.statistics().aborting_requests == 0
        async with TEXT.open_stream(client, "Say", ENDLESS, stop=stop) as stream:
            assert (await anext(stream)).text.startswith("S")
        assert client.statistics().live_requests == 0
        await until_engine_is_idle(client)


class SlowText(ModelText):
    """Encodes only when it is let, and says in which thread."""

    def __init__(self) -> None:
        super().__init__(kinds.byte_level(), chat_templates={"default": TEMPLATE})
        self.may_go_on = threading.Event()
        self.threads: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        if threading.get_ident() != threading.main_thread().ident:
            assert self.may_go_on.wait(30)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_long_prompt_is_encoded_off_the_loop(chat: bool) -> None:
    text = SlowText()
    words = "hello " * ENCODED_IN_PLACE
    prompt: Any = [{"role": "user", "content": [{"text": words}]}] if chat else words
    async with reciting("Yes.") as client:
        ticks = 0

        async def generate() -> None:
            assert (await text.generate(client, prompt)).text == "Yes."

        async with anyio.create_task_group() as group:
            group.start_soon(generate)
            await until(lambda: text.threads, 30)
            for ticks in range(5):
                assert (await TEXT.generate(client, "Say")).text == "Yes."  # the loop is free for others
            assert client.statistics().live_requests == 0
            text.may_go_on.set()
        assert ticks == 4
        assert text.threads != [threading.get_ident()]
        await text.generate(client, [{"role": "user", "content": "short"}] if chat else "short")
        assert text.threads[1:] == [threading.get_ident()]


async def test_cancelling_while_a_long_prompt_is_encoded() -> None:
    text = SlowText()
    async with reciting("Yes.") as client:
        async with anyio.create_task_group() as group:
            group.start_soon(text.generate, client, "hello " * ENCODED_IN_PLACE)
            await until(lambda: text.threads, 30)
            group.cancel_scope.cancel()
        assert client.statistics().live_requests == 0
        text.may_go_on.set()


async def test_encoding_gives_up_the_interpreter() -> None:
    words = "hello wörld, " * 60_000
    longest = 0.0

    async def tick(scope: anyio.CancelScope) -> None:
        nonlocal longest
        with scope:
            while True:
                before = time.process_time()
                await anyio.sleep(0.001)
                longest = max(longest, time.process_time() - before)

    async with reciting("Yes.") as client, anyio.create_task_group() as group:
        scope = anyio.CancelScope()
        group.start_soon(tick, scope)
        started = time.process_time()
        stream = TEXT.open_stream(client, words)
        token_ids = await anyio.to_thread.run_sync(stream._request.encode)
        took = time.process_time() - started
        scope.cancel()
    assert len(token_ids) > 500_000
    # With the interpreter's lock held it would be all of the time. This process's own time: others may have the rest.
    assert longest < took / 2, (longest, took)


# ---- without a loop ----


@contextlib.contextmanager
def reciting_sync(text: str) -> Iterator[SyncEngineClient]:
    with open_sync_engine_client(recital(text)) as client:
        yield client


def test_blocking_calls() -> None:
    with reciting_sync("Yes, 三.\nUser: no...") as client:
        with TEXT.open_sync_stream(client, "Say", ENDLESS, stop=["\nUser:"], request_id="mine") as stream:
            assert stream.request_id == "mine"
            outputs = list(stream)
            assert client.statistics().live_requests == client.statistics().aborting_requests == 0
            until_sync(lambda: client.statistics().engine.get("running") == 0, 10)
            assert list(stream) == []
        assert "".join(output.text for output in outputs) == "Yes, 三."
        assert outputs[-1].stop_reason == "\nUser:"
        for stop in ((), ("zzz",)):
            completion = TEXT.generate_sync(client, "Say", SamplingParams(max_tokens=4), stop=stop)
            assert (completion.text, completion.prompt_token_ids) == ("Yes,", TEXT.encode("Say"))
        with pytest.raises(RequestRefusedError, match="at least one token"):
            TEXT.generate_sync(client, "")
        with pytest.raises(TypeError, match="expected a SyncEngineClient; open_stream"):
            TEXT.open_sync_stream("client", "Say")  # pyright: ignore
        stream = TEXT.open_sync_stream(client, "Say", ENDLESS, stop="\nUser:")
        with pytest.raises(RuntimeError, match="enter the request first"):
            next(stream)
        with stream:
            assert stream.completion().text == "Yes, 三."
            with pytest.raises(RuntimeError, match="all of it has been read"):
                stream.completion()
        with pytest.raises(RuntimeError, match="can be sent once"):
            stream.__enter__()


def test_blocking_calls_and_a_death() -> None:
    with open_sync_engine_client(scripted_spec(script=script_of("EN") + NO_TEXT, step_delay=0.001)) as client:
        text, tokens = "", 0
        with pytest.raises(EngineDeadError):
            with TEXT.open_sync_stream(client, "Say", ENDLESS, stop=["END"]) as stream:
                for output in stream:
                    text += output.text
                    if tokens < 2 <= (tokens := tokens + len(output.token_ids)):
                        assert text == ""
                        os.kill(client.health().pid, signal.SIGKILL)
        assert text == "EN"


def test_blocking_calls_whose_reader_leaves_with_the_last_text() -> None:
    with pytest.raises(EngineDeadError):
        with open_sync_engine_client(scripted_spec(script=script_of("EN") + NO_TEXT, step_delay=0.001)) as client:
            with TEXT.open_sync_stream(client, "Say", ENDLESS, stop=["END"]) as stream:
                tokens = 0
                while tokens < 2:
                    tokens += len(next(stream).token_ids)
                os.kill(client.health().pid, signal.SIGKILL)
                for output in stream:
                    if output.text == "EN":
                        break


# ---- with the real model ----


@pytest.mark.engines
@pytest.mark.timeout(180)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_real_model(smol: ModelText) -> None:
    spec = EngineSpec("anyengine.engines.transformers:TransformersEngine", {"model": "default", "max_num_seqs": 1})
    # Threads of torch that wait for each other by spinning are ten times slower beside a busy process.
    launcher = ProcessLauncher(environment={"OMP_WAIT_POLICY": "passive"})
    async with open_engine_client(spec, launcher=launcher) as client:
        france, greedy = "The capital of France is", SamplingParams(max_tokens=8, temperature=0)
        plain = await smol.generate(client, france, greedy)
        assert plain.text.startswith(" Paris.")
        assert plain.text == smol.decode(plain.token_ids)
        stopped = await smol.generate(client, france, greedy, stop=["Paris", "ris."])
        assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (" ", "stop", "Paris")
        later = SamplingParams(max_tokens=8, min_tokens=2, temperature=0)
        kept = await smol.generate(client, france, later, stop="Paris")
        assert kept.text == plain.text
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = await smol.generate(client, question, SamplingParams(max_tokens=40, temperature=0))
        assert "Paris" in answer.text
        assert "<|im_end|>" not in answer.text
        assert answer.finish_reason == "stop"
