"""What was staged for a call that is not sent after all is free at once: nobody has to wait for the collector."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import anyio
import numpy
import pytest
from anyio import from_thread
from anyio.lowlevel import current_token
from tests.client.lane_engine import digest, figures, first_token, lane_spec
from tests.helpers import until
from tests.lane import ONE_TOKEN, SIZE, lane_of, large, passed

from anyengine import (
    EngineClient,
    EngineSpec,
    MultiModalFeature,
    MultiModalField,
    RequestRefusedError,
    SamplingParams,
    UnencodableError,
    UtilityTimeoutError,
    open_engine_client,
)
from anyengine.client.staging import ARRAYS_AT_ONCE
from anyengine.process.blocks import Block

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

Call = Callable[[EngineClient, list[numpy.ndarray]], Awaitable[object]]


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with open_engine_client(lane_spec("numpy")) as client:
        yield client


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def leased(client: EngineClient) -> int:
    return len(lane_of(client).pool._leased)


def features(arrays: list[numpy.ndarray]) -> list[MultiModalFeature]:
    fields = {str(number): MultiModalField(data=array) for number, array in enumerate(arrays)}
    return [MultiModalFeature(modality="image", identifier="x", offset=0, length=2, fields=fields)]


CALLS: dict[str, Call] = {
    "a request": lambda client, arrays: client.generate([1, 2, 3], ONE_TOKEN, features=features(arrays)),
    "add_request": lambda client, arrays: client.add_request([1, 2, 3], ONE_TOKEN, features=features(arrays)),
    "a utility call": lambda client, arrays: client.call_utility("is_scheduler_paused", arrays),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
async def test_a_call_that_is_cancelled_while_its_arrays_are_copied(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Block.write
    loop = current_token()
    written = 0

    def copy_one_and_wait(self: Block, data: memoryview, check: Callable[[], None]) -> None:
        nonlocal written
        written += 1
        if written % 2:
            return write(self, data, check)
        from_thread.run_sync(scope.cancel, token=loop)
        while True:
            check()
            time.sleep(0.001)

    async with open_engine_client(EngineSpec("tests.client.features_engine:FeaturesEngine")) as client:
        monkeypatch.setattr(Block, "write", copy_one_and_wait)
        for _ in range(3):
            with anyio.CancelScope() as scope:
                await call(client, [large(0, 2 * SIZE), large(1, 2 * SIZE)])
            assert scope.cancelled_caught
            assert leased(client) == 0
        assert written == 6
        assert passed(client) == 0
        assert client.statistics().live_requests == client.statistics().pending_calls == 0
        monkeypatch.setattr("anyengine.process.blocks.IDLE_LIMIT", 0.0)
        await until(lambda: figures(os.getpid())["tensor_descriptors"] == figures(os.getpid())["tensor_mappings"] == 0)


@pytest.mark.usefixtures("no_collector")
async def test_a_request_that_is_refused_when_it_was_staged(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = large(0)
    request = client.open_request(prompt_embeds=array, sampling_params=ONE_TOKEN, request_id="taken")
    errors: list[RequestRefusedError] = []
    async with client.open_request([5], SamplingParams(max_tokens=10**6), request_id="taken"):
        for attempt in (request.__aenter__, lambda: add(client, array)):
            with pytest.raises(RequestRefusedError, match="taken") as caught:
                await attempt()
            errors.append(caught.value)
            assert leased(client) == 0
    monkeypatch.setattr("anyengine.process.blocks.IDLE_LIMIT", 0.0)
    await until(lambda: figures(os.getpid())["tensor_descriptors"] == 0)
    assert len(errors) == 2  # their frames have what was staged
    async with request:  # with its own array
        assert (await request.completion()).token_ids == [first_token(array)]


async def add(client: EngineClient, array: numpy.ndarray) -> int:
    return await client.add_request(prompt_embeds=array, sampling_params=ONE_TOKEN, request_id="taken")


@pytest.mark.usefixtures("no_collector")
async def test_a_call_that_cannot_travel_and_one_that_ends_by_its_timeout(client: EngineClient) -> None:
    errors: list[Exception] = []
    async with anyio.create_task_group() as group:
        group.start_soon(client.call_utility, "sleep_for", 0.3)
        await until(lambda: client.statistics().pending_calls == 1)
        for kind, value in ((UnencodableError, [large(0), object()]), (UtilityTimeoutError, large(1))):
            with pytest.raises(kind) as caught:
                await client.call_utility("echo", value, timeout=0.05)
            errors.append(caught.value)
            assert leased(client) == 0
    assert passed(client) == 1
    assert await client.call_utility("digests", [large(2)]) == [digest(large(2))]


async def test_a_call_with_many_arrays_leaves_descriptors_for_others(client: EngineClient) -> None:
    array = large(1)
    assert await client.call_utility("digests", [array] * 300) == [digest(array)] * 300
    assert passed(client) == ARRAYS_AT_ONCE
