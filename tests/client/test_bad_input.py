"""Bad input is refused at the call, by name, before anything is sent; whatever else runs goes on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator
from typing import Any

import numpy
import pytest
import torch

from anyengine import (
    EngineClient,
    EngineError,
    EngineSpec,
    RequestRefusedError,
    SamplingParams,
    ShutdownPolicy,
    StructuredOutputs,
    UnencodableError,
    UtilityError,
    open_engine_client,
)
from anyengine.testing import scripted_spec

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
async def client(anyio_backend: str) -> AsyncIterator[EngineClient]:
    """One for all tests: what is wrong with a call or a request concerns that alone."""
    async with open_engine_client(scripted_spec(vocab_size=100, max_model_len=32)) as client:
        yield client


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], RequestRefusedError, ["prompt_token_ids", "at least one"]),
        ("text", TypeError, ["prompt_token_ids", "'text'", "tokenize"]),
        (b"text", TypeError, ["prompt_token_ids"]),
        (bytearray(b"text"), TypeError, ["prompt_token_ids"]),
        ([1, -1], RequestRefusedError, ["prompt_token_ids[1]=-1", "4294967295"]),
        ([2**32], RequestRefusedError, ["prompt_token_ids[0]=4294967296"]),
        ([1, numpy.int64(-1)], RequestRefusedError, ["prompt_token_ids[1]=-1: a token id is 0 to 4294967295"]),
        ([torch.tensor(-1)], RequestRefusedError, ["prompt_token_ids[0]=-1: a token id is 0 to 4294967295"]),
        ([1, 2.0], TypeError, ["prompt_token_ids[1]=2.0 (float): expected integers from 0 to 4294967295"]),
        ([[1, 2]], TypeError, ["prompt_token_ids[0]=[1, 2] (list): expected integers", "in one flat list"]),
        ([numpy.float32(1)], TypeError, ["prompt_token_ids[0]=", "(float32): expected integers"]),
        ([1, 2.5], TypeError, ["prompt_token_ids[1]=2.5", "float"]),
        ([1, "2"], TypeError, ["prompt_token_ids[1]='2'"]),
        ([None], TypeError, ["prompt_token_ids[0]=None"]),
        (7, TypeError, ["prompt_token_ids=7", "int"]),
        ({1, 2}, TypeError, ["prompt_token_ids", "set"]),
        (None, TypeError, ["prompt_token_ids", "prompt_embeds"]),
    ],
)
async def test_prompts(client: EngineClient, prompt: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as at_call:
        client.open_request(prompt)
    for word in words:
        assert word in str(at_call.value)
    with pytest.raises(error):
        await client.generate(prompt)
    with pytest.raises(error):
        await client.add_request(prompt)
    assert client.statistics().live_requests == 0


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({}, ValueError, "exactly one"),
        ({"regex": "a", "grammar": "b"}, ValueError, "exactly one"),
        ({"regex": 7}, TypeError, "StructuredOutputs.regex=7"),
        ({"grammar": b"root"}, TypeError, "StructuredOutputs.grammar"),
        ({"json": [1]}, TypeError, "JSON schema"),
        ({"choice": "yes"}, TypeError, "list of strings"),
        ({"choice": ["yes", 1]}, TypeError, "list of strings"),
        ({"choice": []}, RequestRefusedError, "at least one choice"),
    ],
)
def test_structured_outputs(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        StructuredOutputs(**fields)


async def test_embeddings_that_the_engine_does_not_take(client: EngineClient) -> None:
    import numpy

    with pytest.raises(TypeError, match="prompt_embeds"):
        client.open_request(prompt_embeds=[[1.0]])
    with pytest.raises(TypeError, match="exactly one"):
        client.open_request([1], prompt_embeds=numpy.zeros((1, 2)))
    with pytest.raises(RequestRefusedError, match=r"shape \[3\]"):
        client.open_request(prompt_embeds=numpy.zeros(3))
    with pytest.raises(RequestRefusedError, match="'scripted' takes prompt_token_ids only"):
        client.open_request(prompt_embeds=numpy.zeros((1, 2)))


async def test_numpy_token_ids_are_taken(client: EngineClient) -> None:
    import numpy

    completion = await client.generate(numpy.array([5, 6]), SamplingParams(max_tokens=1))  # type: ignore[arg-type]
    assert completion.token_ids == [7]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_tokens": 0}, RequestRefusedError, ["max_tokens=0"]),
        ({"max_tokens": "4"}, TypeError, ["max_tokens='4'"]),
        ({"max_tokens": True}, TypeError, ["max_tokens=True"]),
        ({"min_tokens": 20, "max_tokens": 10}, RequestRefusedError, ["min_tokens=20", "max_tokens=10"]),
        ({"temperature": -0.1}, RequestRefusedError, ["temperature=-0.1"]),
        ({"temperature": float("nan")}, RequestRefusedError, ["temperature=nan"]),
        ({"temperature": float("inf")}, RequestRefusedError, ["temperature=inf"]),
        ({"temperature": 10**400}, RequestRefusedError, ["temperature=1000"]),
        ({"temperature": 3.5e38}, RequestRefusedError, ["temperature=3.5e+38", "0 (greedy), or 1e-10 to 1e+10"]),
        ({"temperature": 1e-40}, RequestRefusedError, ["temperature=1e-40", "0 (greedy), or 1e-10 to 1e+10"]),
        ({"temperature": 5e-324}, RequestRefusedError, ["temperature=5e-324"]),
        ({"temperature": True}, TypeError, ["temperature=True"]),
        ({"logit_bias": {5: 10**400}}, RequestRefusedError, ["logit_bias[5]", "-1e+10 to 1e+10"]),
        ({"logit_bias": {5: float("nan")}}, RequestRefusedError, ["logit_bias[5]=nan"]),
        ({"logit_bias": {5: float("-inf")}}, RequestRefusedError, ["logit_bias[5]=-inf", "allowed_token_ids"]),
        ({"logit_bias": {5: -3.5e38}}, RequestRefusedError, ["logit_bias[5]=-3.5e+38"]),
        ({"repetition_penalty": 1e-40}, RequestRefusedError, ["repetition_penalty=1e-40", "at least 1e-10"]),
        ({"repetition_penalty": 3.5e38}, RequestRefusedError, ["repetition_penalty=3.5e+38", "at most 1e+10"]),
        ({"repetition_penalty": float("nan")}, RequestRefusedError, ["repetition_penalty=nan"]),
        ({"presence_penalty": 2.1}, RequestRefusedError, ["presence_penalty=2.1", "at least -2 and at most 2"]),
        ({"frequency_penalty": float("nan")}, RequestRefusedError, ["frequency_penalty=nan"]),
        ({"min_p": -1e-40}, RequestRefusedError, ["min_p=-1e-40"]),
        ({"min_p": float("nan")}, RequestRefusedError, ["min_p=nan"]),
        ({"top_p": float("nan")}, RequestRefusedError, ["top_p=nan"]),
        ({"top_k": 2**32}, RequestRefusedError, ["top_k=4294967296"]),
        ({"max_tokens": 2**32}, RequestRefusedError, ["max_tokens=4294967296"]),
        ({"top_p": 0.0}, RequestRefusedError, ["top_p=0.0"]),
        ({"top_p": 1.5}, RequestRefusedError, ["top_p=1.5"]),
        ({"top_k": -2}, RequestRefusedError, ["top_k=-2"]),
        ({"seed": 1.5}, TypeError, ["seed=1.5"]),
        ({"seed": 2**63}, RequestRefusedError, ["seed="]),
        ({"stop_token_ids": [-1]}, RequestRefusedError, ["stop_token_ids", "-1"]),
        ({"stop_token_ids": ["x"]}, TypeError, ["stop_token_ids", "'x'"]),
        ({"stop_token_ids": 5}, TypeError, ["stop_token_ids=5"]),
        ({"logit_bias": {1: "x"}}, TypeError, ["logit_bias[1]", "'x'"]),
        ({"logit_bias": {2**32: 1.0}}, RequestRefusedError, ["logit_bias", str(2**32)]),
        ({"allowed_token_ids": []}, RequestRefusedError, ["allowed_token_ids"]),
        ({"repetition_penalty": 0}, RequestRefusedError, ["repetition_penalty=0"]),
        ({"structured_outputs": "json"}, TypeError, ["structured_outputs='json'"]),
        ({"extra": {1: 2}}, TypeError, ["extra", "string keys"]),
        ({"max_tokens": "12"}, TypeError, ["max_tokens='12'", "integer"]),
        ({"temprature": 1.0}, TypeError, ["no 'temprature'", "did you mean 'temperature'?"]),
        ({"max_tokens": 3, "zzz": 1}, TypeError, ["no 'zzz'", "it has max_tokens, min_tokens"]),
        ({"stop": ["a"]}, TypeError, ["no 'stop'", "give stop=[...] to anyengine.text"]),
        ({"n": 2}, TypeError, ["no 'n'", "n completions are n requests"]),
        ({"extra_args": {}}, TypeError, ["no 'extra_args'", "'extra'"]),
    ],
)
def test_sampling_parameters(arguments: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        SamplingParams(**arguments)
    for word in words:
        assert word in str(raised.value)


def test_numbers_are_kept_as_floats_so_that_they_travel() -> None:
    params = SamplingParams(temperature=10**10, repetition_penalty=3, logit_bias={5: 10**10}, top_p=True + 0.0)
    assert [type(value) for value in (params.temperature, params.repetition_penalty, params.logit_bias[5])] == [
        float
    ] * 3
    assert str(SamplingParams(temperature=-0.0).temperature) == "0.0"


def test_the_fields_of_sampling_parameters_are_in_their_signature() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == [
        field.name for field in dataclasses.fields(SamplingParams)
    ]


def test_structured_outputs_take_exactly_one_shape() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputs()
    with pytest.raises(ValueError, match="exactly one"):
        StructuredOutputs(regex="a", choice=["b"])


async def test_what_the_engine_does_not_support_is_refused_by_name(client: EngineClient) -> None:
    with pytest.raises(RequestRefusedError, match=r"top_p=0\.5.*'scripted' does not support it; it supports max_"):
        client.open_request([1], SamplingParams(top_p=0.5))
    with pytest.raises(RequestRefusedError, match="structured_outputs"):
        client.open_request([1], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
    with pytest.raises(TypeError, match="sampling_params"):
        client.open_request([1], {"max_tokens": 4})  # type: ignore[arg-type]


async def test_max_tokens_fit_beside_the_prompt_or_are_refused_at_the_call(client: EngineClient) -> None:
    prompt = [1] * 12
    assert len((await client.generate(prompt, SamplingParams(max_tokens=20))).token_ids) == 20
    completion = await client.generate(prompt, SamplingParams(max_tokens=None))
    assert (len(completion.token_ids), completion.finish_reason) == (20, "length")
    refused = r"max_tokens=21: expected at most 20, for the prompt has 12 tokens and max_model_len is 32"
    with pytest.raises(RequestRefusedError, match=refused):
        client.open_request(prompt, SamplingParams(max_tokens=21))
    for call in (client.generate, client.add_request):
        with pytest.raises(RequestRefusedError, match=refused):
            await call(prompt, SamplingParams(max_tokens=21))
    for length in (32, 40):
        with pytest.raises(RequestRefusedError, match=f"prompt has {length} tokens, but max_model_len is 32"):
            client.open_request([1] * length, SamplingParams(max_tokens=None))
    assert client.statistics().live_requests == 0


@pytest.mark.parametrize(("request_id", "error"), [("", RequestRefusedError), (7, TypeError)])
async def test_request_ids(client: EngineClient, request_id: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="request_id"):
        client.open_request([1], request_id=request_id)


async def test_what_the_engine_refuses_fails_that_request_alone(client: EngineClient) -> None:
    async with client.open_request([1], SamplingParams(max_tokens=20)) as other:
        with pytest.raises(RequestRefusedError, match="100 is not below vocab_size 100"):
            async with client.open_request([100]) as request:
                async for _ in request:
                    pass
        handle = await client.add_request([100])
        step = await client.get_output()
        assert list(step.handles) == [handle]
        assert step.details[0].finish_reason == "error"
        assert "vocab_size" in (step.details[0].error or "")
        assert [token async for output in other for token in output.token_ids] == list(range(2, 22))
    assert client.statistics().live_requests == 0


async def test_utility_calls(client: EngineClient) -> None:
    with pytest.raises(UtilityError, match=r"no such utility; it has abort, "):
        await client.call_utility("__init__")
    with pytest.raises(UtilityError, match="'step'"):
        await client.call_utility("step")  # a method of the engine, but not marked
    with pytest.raises(TypeError, match="method=7"):
        await client.call_utility(7)  # type: ignore[arg-type]
    with pytest.raises(UnencodableError, match=r"args\[0\]\['f'\]\[1\]: <built-in function len>"):
        await client.call_utility("echo", {"f": [0, len]})
    with pytest.raises(UnencodableError, match=r"args\[0\].*64 bits"):
        await client.call_utility("echo", 2**70)
    with pytest.raises(ValueError, match="timeout=-1"):
        await client.call_utility("echo", 1, timeout=-1)
    with pytest.raises(ValueError, match=r"timeout=1000.*: expected seconds that a float can hold"):
        await client.call_utility("echo", 1, timeout=10**400)
    with pytest.raises(TypeError, match="timeout="):
        await client.call_utility("echo", 1, timeout="2")  # type: ignore[arg-type]
    with pytest.raises(UtilityError, match="missing 1 required positional argument"):
        await client.call_utility("echo")
    with pytest.raises(ValueError, match="timeout"):
        client.health(timeout=0)
    assert client.statistics().pending_calls == 0
    assert await client.call_utility("echo", "still here") == "still here"


@pytest.mark.parametrize(
    ("path", "error"),
    [("no_colon", ValueError), ("a:b:c", ValueError), ("a b:C", ValueError), (":C", ValueError), (7, TypeError)],
)
def test_engine_paths(path: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"EngineSpec\.path"):
        EngineSpec(path)


def test_arguments_of_open_engine_client() -> None:
    with pytest.raises(TypeError, match="spec='scripted'"):
        open_engine_client("scripted")  # type: ignore[arg-type]
    with pytest.raises(UnencodableError, match=r"EngineSpec\.arguments\['device'\]"):
        open_engine_client(EngineSpec("a:B", {"device": object()}))
    with pytest.raises(TypeError, match=r"EngineSpec\.arguments"):
        EngineSpec("a:B", [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_death='explode'"):
        open_engine_client(scripted_spec(), on_death="explode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="transport='udp'"):
        open_engine_client(scripted_spec(), transport="udp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shutdown=3"):
        open_engine_client(scripted_spec(), shutdown=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grace=-1"):
        ShutdownPolicy(grace=-1)


def test_every_error_of_the_package_is_an_engine_error() -> None:
    import anyengine

    for name in anyengine.__all__:
        value = getattr(anyengine, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, EngineError)
