"""An engine in a thread has its own copy of what it is sent: it may keep that, and write to it, and nobody waits."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy
import pytest
import torch
from tests.client.features_engine import image, told
from tests.client.lane_engine import digest, lane_spec

from anyengine import EngineClient, EngineSpec, SamplingParams, open_engine_client

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

SIZES = [1_000, 100_000, 1_200_000, 5_000_000]
"""Bytes: within the message, in a frame, by the lane at once, and by the lane from a worker thread."""

LONG = SamplingParams(max_tokens=100_000)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    spec = lane_spec("numpy torch", prompts="keep", step_delay=0.001)
    with anyio.fail_after(20):
        async with open_engine_client(spec, placement="thread") as client:
            yield client


def values(size: int) -> list[Any]:
    read_only = numpy.random.default_rng(1).integers(0, 200, (10, size // 10), numpy.uint8)
    read_only.flags.writeable = False
    return [numpy.full((10, size // 10), 7, numpy.uint8), read_only, torch.ones(size // 40, 10)]


@pytest.mark.parametrize("size", SIZES)
async def test_a_request_is_entered_though_the_engine_keeps_its_prompt(client: EngineClient, size: int) -> None:
    sent: list[str] = []
    for value in values(size):
        sent.append(digest(value))
        async with client.open_request(prompt_embeds=value, sampling_params=LONG) as request:
            if not isinstance(value, numpy.ndarray) or value.flags.writeable:
                value[...] = 0
            assert (await anext(request)).token_ids[0] % 10_000 == int(sent[-1][:8], 16) % 10_000 + 1
        sent.append(digest(value))
        handle = await client.add_request(prompt_embeds=value, sampling_params=LONG)
        await client.abort_requests([handle])
    assert await client.call_utility("kept") == sent
    assert client.statistics().tracked_buffers == 0


async def test_a_request_is_entered_though_the_engine_keeps_its_prompt_of_tokens(client: EngineClient) -> None:
    prompt = array("I", range(30_000))
    async with client.open_request(prompt, LONG):
        prompt[0] = 1
    assert await client.call_utility("kept") == [digest(array("I", range(30_000)))]
    assert client.statistics().tracked_buffers == 0


@pytest.mark.parametrize("size", SIZES)
async def test_what_an_engine_keeps_of_a_call_is_its_own(client: EngineClient, size: int) -> None:
    for value in values(size):
        expected = digest(value)
        await client.call_utility("keep", value)
        if not isinstance(value, numpy.ndarray) or value.flags.writeable:
            assert await client.call_utility("fill", value, 3) != expected
            assert digest(value) == expected
            value[...] = 5
        assert await client.call_utility("kept") == [expected]
        await client.call_utility("drop")


async def test_the_arguments_of_an_engine_are_its_own() -> None:
    for size in SIZES:
        weights = numpy.full(size // 8, 1.5)
        expected = digest(weights)
        async with open_engine_client(lane_spec("numpy", weights=weights), placement="thread") as client:
            assert client.statistics().tracked_buffers == 0
            weights[:] = 0
            assert await client.call_utility("weights") == expected


@pytest.mark.parametrize("size", SIZES)
async def test_a_request_is_entered_though_the_engine_keeps_its_features(size: int) -> None:
    spec = EngineSpec("tests.client.features_engine:FeaturesEngine", {"libraries": "numpy", "keeps": True})
    with anyio.fail_after(20):
        async with open_engine_client(spec, placement="thread") as client:
            for _ in range(2):
                data = numpy.random.default_rng(2).integers(0, 200, size, numpy.uint8)
                features = [image(0, data=data)]
                expected = told(features)
                async with client.open_request([1, 2], features=features) as request:
                    data[:] = 0
                    assert (await request.completion()).events == expected
                assert client.statistics().tracked_buffers == 0
