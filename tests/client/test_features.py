"""Multimodal features reach the engine as they are, by every client and call, or are refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy
import pytest
import torch
from tests.client.features_engine import FeaturesEngine, image, told
from tests.lane import SIZE, is_free, large, passed

import anyengine.client.staging
from anyengine import (
    EngineClient,
    EngineSpec,
    InprocEngineClient,
    MultiModalFeature,
    MultiModalField,
    RequestRefusedError,
    UnencodableError,
    open_engine_client,
    open_sync_engine_client,
)

SPEC = EngineSpec("tests.client.features_engine:FeaturesEngine", {"libraries": "torch numpy"})
PROMPT = list(range(12))
MASK = torch.tensor([True, False, True, True])
FEATURES = [
    image(
        6,
        length=4,
        is_embed=MASK,
        fields={
            "pixels": MultiModalField(data=torch.randn(2, 3).bfloat16(), batching="flat", dim=-1),
            "sizes": MultiModalField(data=[numpy.arange(3), [7, 0.5]], keep_on_cpu=True),
            "scale": MultiModalField(data=2, batching="shared"),
        },
    ),
    image(1, length=5, modality="audio", data=numpy.ones((2, 2))),
]
TOLD = told(FEATURES)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with open_engine_client(SPEC) as client:
        yield client


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_the_async_client_passes_them_on(client: EngineClient) -> None:
    assert not (await client.generate(PROMPT)).events
    assert (await client.generate(PROMPT, features=FEATURES)).events == TOLD
    assert (await client.encode(PROMPT, features=tuple(FEATURES))).events == TOLD
    async with client.open_request(PROMPT, features=FEATURES) as request:
        assert (await anext(request)).events == TOLD
    await client.add_request(PROMPT, features=FEATURES)
    (details,) = (await client.get_output()).details.values()
    assert details.events == TOLD
    assert passed(client) == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.usefixtures("leaves_nothing")
def test_the_sync_client_passes_them_on(backend: Any) -> None:
    with open_sync_engine_client(SPEC, backend=backend) as client:
        assert client.generate(PROMPT, features=FEATURES).events == TOLD
        assert client.generate(PROMPT, features=FEATURES, request_id="named").events == TOLD
        assert client.encode(PROMPT, features=FEATURES).events == TOLD
        with client.stream(PROMPT, features=FEATURES) as request:
            assert next(request).events == TOLD
        client.add_request(PROMPT, features=FEATURES)
        (details,) = client.get_output().details.values()
        assert details.events == TOLD
        with pytest.raises(RequestRefusedError, match="features have their places in one prompt"):
            client.generate_many([PROMPT, PROMPT], features=FEATURES)


def test_the_in_process_client_passes_them_on() -> None:
    with InprocEngineClient(FeaturesEngine()) as client:
        client.add_request(PROMPT, features=FEATURES)
        (details,) = client.get_output().details.values()
        assert details.events == TOLD
        with pytest.raises(RequestRefusedError, match="the prompt has 2"):
            client.add_request([1, 2], features=FEATURES)


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("libraries", ["", "torch numpy"])
async def test_large_ones_go_through_shared_memory(libraries: str) -> None:
    fields = {
        "pixels": MultiModalField(data=large(0)),
        "tiles": MultiModalField(data=[torch.randn(SIZE // 4), large(1, 4 * SIZE)], batching="flat"),
        "size": MultiModalField(data=3),
    }
    features = [image(0, fields=fields), image(4, data=large(2))]
    spec = EngineSpec(SPEC.path, {"libraries": libraries})
    async with open_engine_client(spec) as client:
        for number in range(1, 3):
            assert (await client.generate(PROMPT, features=features)).events == told(features)
            assert passed(client) == 4 * number
        async with client.open_request(PROMPT, features=features) as request:
            features[1].fields["pixels"].data[:] = 0  # the request has its own by now
            assert (await anext(request)).events != told(features)
            await is_free(client)  # the stream does not hold on to them either
        assert client.statistics().tracked_buffers == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_large_ones_go_in_frames_where_there_is_no_shared_memory(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anyengine.client.staging, "LANE_LIMIT", 2**40)
    features = [image(0, data=large(0)), image(4, data=torch.randn(SIZE))]
    assert (await client.generate(PROMPT, features=features)).events == told(features)
    assert passed(client) == client.statistics().tracked_buffers == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_what_has_no_place_in_the_prompt_is_refused_at_the_call(client: EngineClient) -> None:
    both = torch.tensor([True, True, False, False])
    for features, message in (
        ([image(1), image(11)], r"features\[1\] takes up the tokens 11 to 12: the prompt has 12"),
        ([image(3, 4), image(5), image(0)], "two of them take the place of token 5 of the prompt"),
        ([image(0, 12), image(2), image(6)], "two of them take the place of token 2 of the prompt"),
        ([image(0, 4, is_embed=both), image(1, 4, is_embed=both)], "two of them take the place of token 1"),
    ):
        with pytest.raises(RequestRefusedError, match=message):
            await client.generate(PROMPT, features=features)
        with pytest.raises(RequestRefusedError, match=message):
            client.open_request(PROMPT, features=features)
        with pytest.raises(RequestRefusedError, match=message):
            await client.add_request(PROMPT, features=features)
    turns = [image(0, 4, is_embed=both), image(0, 4, is_embed=numpy.array([False, False, True, True]))]
    assert (await client.generate(PROMPT, features=turns)).events == told(turns)
    with pytest.raises(RequestRefusedError, match="two of them take the place"):
        await client.encode(PROMPT, features=[image(1), image(1)])
    with pytest.raises(TypeError, match=r"features=5 \(int\): expected a sequence of MultiModalFeature"):
        await client.generate(PROMPT, features=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"features\[1\]={} \(dict\): expected a MultiModalFeature"):
        await client.generate(PROMPT, features=[image(1), {}])  # type: ignore[list-item]
    assert client.statistics().live_requests == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_what_fails_later_fails_alone(client: EngineClient) -> None:
    with pytest.raises(UnencodableError, match=r"features\[0\]\['fields'\]\['pixels'\]\['data'\]: .* object"):
        await client.generate(PROMPT, features=[image(1, data=numpy.array([object()]))])
    with pytest.raises(RequestRefusedError, match="no nose"):
        await client.generate(PROMPT, features=[image(1, modality="smell")])
    assert (await client.generate(PROMPT, features=FEATURES)).events == TOLD


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_an_engine_without_them_gets_none() -> None:
    spec = EngineSpec(SPEC.path, {"options": ["priority"]})
    message = "features=.*: engine 'options' does not support it; it supports priority"
    async with open_engine_client(spec) as client:
        with pytest.raises(RequestRefusedError, match=message):
            await client.generate(PROMPT, features=FEATURES)
        with pytest.raises(RequestRefusedError, match=message):
            client.open_request(PROMPT, features=FEATURES)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"modality": 5}, TypeError, r"modality=5 \(int\): expected a string"),
        ({"identifier": ""}, RequestRefusedError, "identifier='': expected at least one character"),
        ({"offset": -1}, RequestRefusedError, "offset=-1: expected 0 to"),
        ({"offset": 1.0}, TypeError, r"offset=1.0 \(float\): expected an integer"),
        ({"length": 0}, RequestRefusedError, "length=0: expected 1 to"),
        ({"length": True}, TypeError, "length=True"),
        ({"fields": {}}, RequestRefusedError, "fields={}: expected at least one"),
        ({"fields": []}, TypeError, r"fields=\[\] \(list\): expected a mapping"),
        ({"fields": {1: MultiModalField(data=1)}}, TypeError, "fields=1 .*: expected string keys"),
        ({"fields": {"x": torch.ones(1)}}, TypeError, r"fields\['x'\]=Tensor.*: expected a MultiModalField"),
        ({"is_embed": [True, False]}, TypeError, r"is_embed=\[True, False\] \(list\): expected an array of booleans"),
        ({"is_embed": torch.ones(2)}, TypeError, "is_embed=.*: expected an array of booleans"),
        ({"is_embed": MASK}, RequestRefusedError, r"is_embed of shape \[4\]: expected \[2\], as length says"),
    ],
)
def test_what_a_feature_cannot_be(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        image(**{"offset": 0, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": None}, TypeError, r"data=None .*: expected a tensor, an array, a number, or a list of these"),
        ({"data": [1, "two"]}, TypeError, r"data='two' .*: expected a tensor"),
        ({"data": True}, TypeError, "data=True"),
        ({"data": [[[[[1]]]]]}, RequestRefusedError, "data: nested deeper than 4 lists"),
        ({"batching": "stacked"}, RequestRefusedError, "batching='stacked': expected one of batched, flat, shared"),
        ({"batching": 1}, TypeError, r"batching=1 \(int\): expected a string"),
        ({"dim": 64}, RequestRefusedError, "dim=64: expected -64 to 63"),
        ({"keep_on_cpu": 1}, TypeError, r"keep_on_cpu=1 \(int\): expected a bool"),
    ],
)
def test_what_a_field_cannot_be(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiModalField(**{"data": 1, **change})


def test_a_feature_keeps_what_it_was_made_of() -> None:
    sizes, fields = [1, [2]], {"a": MultiModalField(data=1)}
    field = MultiModalField(data=sizes)
    feature = MultiModalFeature(modality="image", identifier="a", offset=0, length=3, fields=fields)
    sizes[1] = 5
    fields.clear()
    assert field.data == [1, [2]]
    assert list(feature.fields) == ["a"]
    assert feature.end == 3
