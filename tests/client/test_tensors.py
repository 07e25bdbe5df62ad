"""Tensors and arrays through a real engine: equal after the trip, whatever happens to their memory meanwhile."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy
import pytest
import torch
from tests.client.lane_engine import first_token, lane_spec
from tests.helpers import until

from anyengine import EngineClient, SamplingParams, open_engine_client
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

DTYPES = [
    getattr(torch, name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16",
        "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    )
]  # fmt: skip


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with open_engine_client(scripted_spec()) as client:
        yield client


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().reshape(-1).view(torch.uint8).equal(other.contiguous().reshape(-1).view(torch.uint8))


async def test_every_dtype_shape_and_stride(client: EngineClient) -> None:
    for dtype in DTYPES:
        base = torch.arange(24).reshape(2, 3, 4).to(dtype)
        for tensor in (
            base,
            base[:, 1:, ::2],
            base.transpose(0, 2),
            base[0, 0, 0],
            base[:0],
            base[:, :0, :],
            base[:1].expand(5, 3, 4),
        ):
            assert same(await client.call_utility("echo", tensor), tensor), (dtype, tensor.shape, tensor.stride())


async def test_numpy_arrays_with_negative_strides_and_foreign_byte_order(client: EngineClient) -> None:
    base = numpy.arange(24, dtype="<i4").reshape(2, 3, 4)
    for array in (base[::-1, :, ::-2], base.T, base.astype(">i4"), base[0, 0, 0:0], numpy.float16(base), base > 3):
        answer = await client.call_utility("echo", array)
        assert answer.dtype == array.dtype
        assert numpy.array_equal(answer, array)


async def test_large_and_small_ones_in_one_call_next_to_each_other(client: EngineClient) -> None:
    values = [torch.arange(size, dtype=torch.int32) for size in (0, 1, 100_000, 3, 50_000, 0)]
    answer = await client.call_utility("echo", {"nested": [values, "text", 7]})
    assert all(map(torch.equal, answer["nested"][0], values))
    assert answer["nested"][1:] == ["text", 7]


async def test_a_received_tensor_can_be_written_to(client: EngineClient) -> None:
    for size in (4, 100_000):
        tensor = await client.call_utility("echo", torch.zeros(size))
        tensor += 1
        assert tensor.sum() == size
        array = await client.call_utility("echo", numpy.zeros(size))
        array += 1
        assert array.sum() == size


async def test_a_message_does_not_change_after_it_was_handed_over(client: EngineClient) -> None:
    """References are dropped and the memory is used again while messages are on their way."""
    sums: list[tuple[int, float]] = []

    async def send(number: int) -> None:
        tensor = torch.full((256, 1024), float(number))
        task = client.call_utility("echo", tensor)
        del tensor
        answer = await task
        sums.append((number, answer.mean().item()))
        assert answer.min() == answer.max() == number

    async with anyio.create_task_group() as group:
        for number in range(60):
            group.start_soon(send, number)
            await anyio.lowlevel.checkpoint()
            gc.collect(0)
            torch.full((256, 1024), -1.0)
    assert sorted(sums) == [(number, float(number)) for number in range(60)]


async def test_a_request_is_entered_when_its_frames_have_been_read() -> None:
    """Its owner may write to the tensor from then on: without shared memory, ZeroMQ reads it in place."""
    embeds = numpy.ones((256, 2**14), "float32")  # more than all buffers on the way hold
    expected = first_token(embeds)
    entered = False
    tokens: list[int] = []
    async with open_engine_client(lane_spec("numpy"), transport="tcp") as client:

        async def ask() -> None:
            nonlocal entered
            async with client.open_request(None, SamplingParams(max_tokens=1), prompt_embeds=embeds) as request:
                entered = True
                embeds[...] = 0
                tokens.extend((await request.completion()).token_ids)

        os.kill(client.health().pid, signal.SIGSTOP)
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await until(lambda: client.statistics().tracked_buffers == 1)
            for _ in range(50):
                await anyio.sleep(0)
            assert not entered
            os.kill(client.health().pid, signal.SIGCONT)
    assert tokens == [expected]


async def test_a_thousand_messages_with_a_large_and_a_small_buffer(client: EngineClient) -> None:
    async def send(number: int) -> None:
        large = numpy.full(20_000, number, dtype=numpy.int64)
        answer: Any = await client.call_utility("echo", [large, numpy.array([number])])
        assert numpy.array_equal(answer[0], large)
        assert answer[1][0] == number

    async with anyio.create_task_group() as group:
        limiter = anyio.CapacityLimiter(20)
        for number in range(1000):

            async def one(number: int = number) -> None:
                async with limiter:
                    await send(number)

            group.start_soon(one)
    assert client.statistics().tracked_buffers == 0


async def test_arguments_of_the_engine_may_be_arrays() -> None:
    async with open_engine_client(scripted_spec(script=[1, 2, 3])) as client:
        assert client.info.engine == "scripted"
    with pytest.raises(TypeError, match=r"EngineSpec\.arguments\['script'\].*sparse"):
        open_engine_client(scripted_spec(script=torch.eye(2).to_sparse()))
