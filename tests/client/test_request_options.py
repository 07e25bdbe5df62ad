"""What a request asks for besides its prompt reaches the engine, by every client and call, or is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.client.options_engine import OptionsEngine

from anyengine import (
    EngineSpec,
    InprocEngineClient,
    LoRARequest,
    PoolingParams,
    RequestKeywords,
    RequestRefusedError,
    SamplingParams,
    open_engine_client,
    open_sync_engine_client,
)
from anyengine.engine.core import EngineRequest
from anyengine.params import RequestOptions
from anyengine.protocol.outputs import StepOutputs

SPEC = EngineSpec("tests.client.options_engine:OptionsEngine")
PLAIN = EngineSpec("tests.client.options_engine:OptionsEngine", {"options": []})
LORA = LoRARequest(lora_name="pirate", lora_int_id=7, lora_path="/nowhere")
OPTIONS: dict[str, Any] = {"priority": -3, "cache_salt": "tenant", "lora": LORA}
ASKED = [[-3, "tenant", "pirate"]]
NOTHING = [[0, None, None]]
POOLING = PoolingParams(task="embed", dimensions=8)
POOLED = [[1, 2], "embed", 8]


def details_of(step: StepOutputs) -> Any:
    (details,) = step.details.values()
    return details


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_the_async_client_passes_them_on() -> None:
    async with open_engine_client(SPEC) as client:
        assert client.info.request_options == ["priority", "cache_salt", "lora"]
        assert (await client.generate([1, 2])).events == NOTHING
        assert (await client.generate([1, 2], **OPTIONS)).events == ASKED
        async with client.open_request([1, 2], **OPTIONS) as request:
            assert (await anext(request)).events == ASKED
        completion = await client.encode([1, 2], POOLING, **OPTIONS)
        assert (completion.events, completion.pooling_output) == (ASKED, POOLED)
        assert (await client.encode([1, 2])).pooling_output == [[1, 2], "embed", None]
        await client.add_request([1, 2], pooling_params=POOLING, **OPTIONS)
        details = details_of(await client.get_output())
        assert (details.events, details.pooling_output) == (ASKED, POOLED)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.usefixtures("leaves_nothing")
def test_the_sync_client_passes_them_on(backend: Any) -> None:
    with open_sync_engine_client(SPEC, backend=backend) as client:
        assert client.generate([1, 2], **OPTIONS).events == ASKED
        assert client.generate([1, 2], request_id="named", **OPTIONS).events == ASKED
        with client.stream([1, 2], **OPTIONS) as request:
            assert next(request).events == ASKED
        assert client.encode([1, 2], POOLING, **OPTIONS).pooling_output == POOLED
        for _, completion in client.generate_many([[1, 2]] * 3, **OPTIONS):
            assert not isinstance(completion, RequestRefusedError)
            assert completion.events == ASKED
        client.add_request([1, 2], pooling_params=POOLING, **OPTIONS)
        details = details_of(client.get_output())
        assert (details.events, details.pooling_output) == (ASKED, POOLED)


def test_the_in_process_client_passes_them_on() -> None:
    with InprocEngineClient(OptionsEngine()) as client:
        client.add_request([1, 2], pooling_params=POOLING, **OPTIONS)
        details = details_of(client.get_output())
        assert (details.events, details.pooling_output) == (ASKED, POOLED)


UNKNOWN: dict[str, Any] = {"prioritty": 1}
REFUSAL = (
    "unexpected keyword argument 'prioritty': the options of a request are priority, cache_salt, lora, features, and "
    "where the call has them request_id, stall_limit and prompt_embeds"
)


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_an_option_that_there_is_not_is_refused_by_name() -> None:
    async with open_engine_client(SPEC) as client:
        for call in (client.generate, client.encode, client.add_request):
            with pytest.raises(TypeError, match=REFUSAL):
                await call([1], **UNKNOWN)
        with pytest.raises(TypeError, match=REFUSAL):
            client.open_request([1], **UNKNOWN)
        with pytest.raises(TypeError, match="'max_tokens': it belongs into the request's SamplingParams"):
            await client.generate([1], max_tokens=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unexpected keyword argument 'pooling'"):
            await client.generate([1], pooling=POOLING)  # type: ignore[arg-type]
        assert client.statistics().live_requests == 0


@pytest.mark.usefixtures("leaves_nothing")
def test_the_blocking_clients_refuse_it_too() -> None:
    with open_sync_engine_client(SPEC) as client:
        for call in (client.generate, client.stream, client.encode, client.add_request):
            with pytest.raises(TypeError, match=REFUSAL):
                call([1], **UNKNOWN)
        with pytest.raises(TypeError, match=REFUSAL):
            client.generate_many([[1]], **UNKNOWN)
        assert client.statistics().live_requests == 0
    with InprocEngineClient(OptionsEngine()) as inproc, pytest.raises(TypeError, match=REFUSAL):
        inproc.add_request([1], **UNKNOWN)


def test_what_is_left_at_its_default_asks_for_nothing() -> None:
    with InprocEngineClient(OptionsEngine(options=[])) as client:
        client.add_request([1, 2], priority=0, cache_salt=None, lora=None)
        assert details_of(client.get_output()).events == NOTHING


def test_every_option_has_its_place_on_both_sides() -> None:
    fields = {field.name for field in dataclasses.fields(RequestOptions)}
    assert fields == {*RequestKeywords.__annotations__, "pooling"}
    assert fields <= {field.name for field in dataclasses.fields(EngineRequest)}


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_what_an_engine_does_not_support_is_refused_by_name() -> None:
    async with open_engine_client(PLAIN) as client:
        for name, value in OPTIONS.items():
            message = f"{name}=.*: engine 'options' does not support it; it supports no such option"
            with pytest.raises(RequestRefusedError, match=message):
                await client.generate([1], **{name: value})
            with pytest.raises(RequestRefusedError, match=message):
                client.open_request([1], **{name: value})
            with pytest.raises(RequestRefusedError, match=message):
                await client.add_request([1], **{name: value})
        for task in ("classify", "generate"):
            with pytest.raises(RequestRefusedError, match=f"task='{task}': engine 'options' has no such pooling task"):
                await client.encode([1], PoolingParams(task=task))
        with pytest.raises(TypeError, match=r"pooling_params=SamplingParams.*: expected a PoolingParams"):
            await client.encode([1], SamplingParams())  # type: ignore[arg-type]
        assert client.statistics().live_requests == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_an_engine_that_only_pools_is_not_asked_for_tokens() -> None:
    spec = EngineSpec("tests.client.options_engine:OptionsEngine", {"tasks": ["embed"]})
    async with open_engine_client(spec) as client:
        for sampling in (SamplingParams(max_tokens=3), SamplingParams(top_p=0.5)):
            with pytest.raises(RequestRefusedError, match=r"generates no tokens; call encode\(\) for its tasks: embed"):
                await client.generate([1], sampling)
        with pytest.raises(RequestRefusedError, match=r"generates no tokens; call encode\(\) for its tasks: embed"):
            await client.generate([1])
        assert (await client.encode([1, 2])).pooling_output == [[1, 2], "embed", None]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"priority": 1.5}, TypeError, r"priority=1.5 \(float\): expected an integer"),
        ({"priority": True}, TypeError, r"priority=True \(bool\): expected an integer"),
        ({"priority": 2**31}, RequestRefusedError, "priority=2147483648: expected -2147483648 to 2147483647"),
        ({"cache_salt": 5}, TypeError, r"cache_salt=5 \(int\): expected a string"),
        ({"cache_salt": ""}, RequestRefusedError, "cache_salt='': expected at least one character, or None"),
        ({"lora": {"lora_name": "x"}}, TypeError, r"lora={.*} \(dict\): expected a LoRARequest"),
        ({"pooling": "embed"}, TypeError, r"pooling='embed' \(str\): expected a PoolingParams"),
    ],
)
def test_what_an_option_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RequestOptions(**options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PoolingParams(task=5), TypeError, "PoolingParams.task=5"),  # type: ignore[arg-type]
        (lambda: PoolingParams(dimensions=0), RequestRefusedError, "PoolingParams.dimensions=0: expected 1 to"),
        (lambda: PoolingParams(use_activation=1), TypeError, "PoolingParams.use_activation=1"),  # type: ignore[arg-type]
        (
            lambda: LoRARequest(lora_name="", lora_int_id=1, lora_path="/a"),
            RequestRefusedError,
            "LoRARequest.lora_name='': expected at least one character",
        ),
        (
            lambda: LoRARequest(lora_name="a", lora_int_id=0, lora_path="/a"),
            RequestRefusedError,
            "LoRARequest.lora_int_id=0: expected 1 to",
        ),
        (
            lambda: LoRARequest(lora_name="a", lora_int_id=1, lora_path=5),  # type: ignore[arg-type]
            TypeError,
            r"LoRARequest.lora_path=5 \(int\): expected a string",
        ),
    ],
)
def test_what_parameters_cannot_be(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
