"""Large tensors by shared memory: what arrives, whose memory it is, and when it is free again."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import numpy
import pytest
import torch
from tests.client.lane_engine import digest, figures, first_token, kind, lane_spec
from tests.client.test_tensors import DTYPES
from tests.helpers import until
from tests.lane import ONE_TOKEN, SIZE, is_free, lane_of, large, lent, passed

import anyengine.client.staging
from anyengine import EngineClient, RequestFailedError, UnencodableError, open_engine_client
from anyengine.process.shared_storage import open_shared_storage
from anyengine.protocol.arrays import WireArray

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

# torch starts a process of its own with the first storage of this kind, and keeps it; that is not a leak of a test.
_default = torch.multiprocessing.get_sharing_strategy()
torch.multiprocessing.set_sharing_strategy("file_system")
torch.zeros(1).share_memory_()
torch.multiprocessing.set_sharing_strategy(_default)


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with open_engine_client(lane_spec("numpy", prompts="keep")) as client:
        yield client


# ---- what arrives ----


async def test_every_dtype_of_torch_and_any_strides(client: EngineClient) -> None:
    for dtype in DTYPES:
        base = torch.arange(4 * SIZE // dtype.itemsize).reshape(4, 2, -1).to(dtype)
        strided = [base[:, 1:, ::2], base.transpose(0, 2), base[:1, :1].expand(3, -1, -1)]
        tensors = [base, *strided, base[:0], base[0, 0, 0]]
        before = passed(client)
        assert await client.call_utility("digests", tensors) == [digest(tensor) for tensor in tensors], dtype
        assert passed(client) == before + 4, dtype  # the last two are small


async def test_conjugated_negated_and_differentiated_tensors(client: EngineClient) -> None:
    base = torch.randn(SIZE // 4, dtype=torch.complex64)
    tensors = [base.conj(), base.imag, base.conj().imag, torch.randn(SIZE // 4, requires_grad=True) * 2]
    assert await client.call_utility("digests", tensors) == [digest(t.resolve_conj().resolve_neg()) for t in tensors]
    assert passed(client) == len(tensors)


async def test_numpy_arrays(client: EngineClient) -> None:
    base = large(0)
    read_only = large(1)
    read_only.flags.writeable = False
    for _ in range(2):  # in a fresh block, and in one that was used
        arrays = [base, base[::-1, ::-1], base.T, base.astype(">i8"), numpy.float16(base % 7), read_only, base[:0]]
        assert await client.call_utility("digests", arrays) == [digest(array) for array in arrays]
        assert await client.call_utility("kinds", arrays) == [kind(array) for array in arrays]
    assert passed(client) == 4 * 5  # two of the seven are small


@pytest.mark.parametrize("libraries", ["", "numpy", "torch"])
async def test_an_engine_without_one_of_the_libraries(libraries: str) -> None:
    async with open_engine_client(lane_spec(libraries)) as client:
        values = [torch.randn(SIZE // 4), large(0)]
        assert await client.call_utility("digests", values) == [digest(value) for value in values]
        kinds = [name.partition(" ")[0] for name in await client.call_utility("kinds", values)]
        expected = ["Tensor" if "torch" in libraries else "WireArray", "ndarray" if libraries else "WireArray"]
        assert kinds == expected
        assert passed(client) == 4


async def test_values_of_all_kinds_around_large_ones(client: EngineClient) -> None:
    wire = WireArray("numpy", "|u1", (SIZE,), memoryview(os.urandom(SIZE)))
    value = {"a": [large(0), {"b": (large(1), "text", None)}], 7: large(2), "small": numpy.arange(3), "wire": wire}
    answer = await client.call_utility("echo", value)
    assert passed(client) == 4
    assert answer["a"][1]["b"][1:] == ["text", None]
    assert digest(answer["a"][1]["b"][0]) == digest(large(1))
    assert digest(answer[7]) == digest(large(2))
    assert digest(answer["small"]) == digest(numpy.arange(3))
    assert digest(answer["wire"]) == digest(wire)


async def test_prompts_of_requests_in_every_way_of_making_one(client: EngineClient) -> None:
    embeds = large(3)
    completion = await client.generate(prompt_embeds=embeds, sampling_params=ONE_TOKEN)
    assert completion.token_ids == [first_token(embeds)]
    async with client.open_request(prompt_embeds=embeds, sampling_params=ONE_TOKEN) as request:
        assert [output.token_ids async for output in request] == [[first_token(embeds)]]
    handle = await client.add_request(prompt_embeds=embeds, sampling_params=ONE_TOKEN)
    step = await client.get_output()
    assert (list(step.handles), list(step.token_ids)) == ([handle], [first_token(embeds)])
    assert passed(client) == 3
    assert client.statistics().tracked_buffers == 0


async def test_arguments_of_the_engine() -> None:
    weights = torch.randn(SIZE // 4)
    async with open_engine_client(lane_spec("torch", weights=weights)) as client:
        assert passed(client) == 1
        assert await client.call_utility("weights") == digest(weights)


async def test_what_cannot_travel_is_refused_as_ever(client: EngineClient) -> None:
    class Odd(dict[str, Any]):
        def values(self) -> Any:
            raise RuntimeError("odd")

    for value in (torch.eye(2000).to_sparse(), torch.empty(SIZE, device="meta"), numpy.ma.MaskedArray(large(0))):
        with pytest.raises(TypeError, match=r"cannot travel|has no data"):
            await client.call_utility("digests", [large(0), value])
    assert await client.call_utility("echo", Odd(a=1)) == {"a": 1}
    await is_free(client)


async def test_cycles_and_what_raises_beside_a_large_array_are_refused_as_ever(client: EngineClient) -> None:
    class Odd(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("odd")

    twice: list[Any] = []
    twice += [twice, twice]
    for size in (SIZE, 4 * SIZE):  # without and with a thread
        beside: list[Any] = [large(0, size)]
        beside.append(beside)
        deep: Any = large(0, size)
        for _ in range(60):
            deep = [deep]
        for value in (twice, beside, {"a": beside}, deep):
            with pytest.raises(UnencodableError, match="nested deeper than 56 levels, or a cycle"):
                await client.call_utility("echo", value)
        with pytest.raises(UnencodableError, match=r"looking into this .*Odd raised RuntimeError"):
            await client.call_utility("echo", [large(0, size), Odd(a=large(1, size))])
    pool = lane_of(client).pool
    assert len(pool._idle) + len(pool._returned) <= 2  # of what was staged beside the mapping
    assert passed(client) == 0


async def test_lists_that_are_shared_are_looked_into_once(client: EngineClient) -> None:
    for content in ([], [[1], 2], large(0, 2048)):
        value: Any = content
        for _ in range(50):
            value = [value, value]
        assert await client._session.stage(value, []) is value


async def test_a_large_array_on_countless_paths_is_refused_before_it_is_copied(client: EngineClient) -> None:
    value: Any = [large(0), [0.5] * 10**5]
    for _ in range(50):
        value = [value, value]
    with pytest.raises(UnencodableError, match="on several paths"):
        await client.call_utility("echo", value)
    pool = lane_of(client).pool
    assert not (pool._idle or pool._returned or pool._leased)
    assert passed(client) == 0


async def test_a_list_at_a_depth_that_is_allowed_is_staged(client: EngineClient) -> None:
    value: Any = [large(0)]
    for _ in range(54):
        value = [value]
    answer = await client.call_utility("echo", value)
    for _ in range(55):
        answer = answer[0]
    assert digest(answer) == digest(large(0))
    assert passed(client) == 1


# ---- whose memory it is ----


async def test_the_caller_may_change_its_array_as_soon_as_the_call_returns(client: EngineClient) -> None:
    expected: list[str] = []
    tensor = torch.zeros(4, SIZE // 8)
    for number in range(8):
        tensor.fill_(number)
        expected.append(digest(tensor))
        if number % 2:
            await client.call_utility("keep", tensor)
        else:
            async with client.open_request(prompt_embeds=tensor, sampling_params=ONE_TOKEN):
                tensor.fill_(-1)
    tensor.fill_(-1)
    assert await client.call_utility("kept") == expected
    assert passed(client) == 8
    await client.call_utility("drop")
    await is_free(client)


async def test_the_engine_may_write_to_what_it_got(client: EngineClient) -> None:
    array = large(0)
    assert await client.call_utility("fill", array, 5) == digest(numpy.full_like(array, 5))
    assert digest(array) == digest(large(0))
    assert passed(client) == 1


async def test_a_tensor_arrives_as_a_tensor_and_the_engine_may_write_to_it() -> None:
    async with open_engine_client(lane_spec("torch")) as client:
        for tensor in (torch.zeros(SIZE, dtype=torch.bfloat16), torch.zeros(SIZE, dtype=torch.uint8).share_memory_()):
            assert await client.call_utility("kinds", [tensor]) == [kind(tensor)]
            assert await client.call_utility("fill", tensor, 5) == digest(torch.full_like(tensor, 5))
            assert not tensor.any()
        assert passed(client) == 4


async def test_the_file_of_a_shared_tensor_is_not_looked_for_in_the_loops_thread(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def watched(tensor: Any) -> Any:
        threads.append(threading.get_ident())
        return open_shared_storage(tensor)

    monkeypatch.setattr(anyengine.client.staging, "open_shared_storage", watched)
    tensor = torch.ones(SIZE, dtype=torch.uint8)
    assert await client.call_utility("digests", [tensor]) == [digest(tensor)]
    assert threads == [threading.get_ident()]
    assert await client.call_utility("digests", [tensor.share_memory_()]) == [digest(tensor)]
    assert threads[1] != threads[0]


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
async def test_shared_storage_of_torch_is_not_copied(client: EngineClient, strategy: str) -> None:
    previous = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        tensor = torch.randn(3, SIZE // 4).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(previous)
    address = tensor.data_ptr()
    await client.call_utility("keep", tensor)
    await client.call_utility("keep", tensor[1:])
    assert await client.call_utility("kept") == [digest(tensor), digest(tensor[1:])]
    assert tensor.data_ptr() == address
    assert passed(client) == 2
    assert figures(os.getpid())["tensor_descriptors"] == figures(client.health().pid)["tensor_mappings"] == 0
    # The price of it: what its owner writes, the engine reads.
    tensor[1] = 7
    assert await client.call_utility("kept") == [digest(tensor), digest(tensor[1:])]
    # The memory lives as long as the engine needs it, whatever becomes of its owner.
    expected = digest(tensor)
    del tensor
    assert (await client.call_utility("kept"))[0] == expected


async def test_shared_storage_that_is_not_side_by_side_or_not_torchs_own_is_copied(
    client: EngineClient, tmp_path: Any
) -> None:
    path = tmp_path / "tensor"
    tensors = [torch.randn(3, SIZE // 4).share_memory_().T, torch.from_file(str(path), shared=True, size=SIZE).fill_(3)]
    for tensor in tensors:
        await client.call_utility("keep", tensor)
    expected = [digest(tensor) for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    assert await client.call_utility("kept") == expected


# ---- when it is free ----


async def test_a_thousand_tensors_leave_descriptors_and_memory_as_they_were(client: EngineClient) -> None:
    array = large(0)

    async def send(times: int) -> None:
        for number in range(times):
            array[0, 0] = number
            if number % 2:
                assert (await client.call_utility("digests", [array])) == [digest(array)]
            else:
                await client.call_utility("keep", array)
                await client.call_utility("drop")

    await send(100)
    ours, theirs = figures(os.getpid()), await client.call_utility("figures")
    await send(1000)
    ours_after, theirs_after = figures(os.getpid()), await client.call_utility("figures")
    assert passed(client) == 1100
    assert ours_after["descriptors"] <= ours["descriptors"] + 4  # a few blocks take turns
    assert theirs_after["descriptors"] <= theirs["descriptors"]
    assert ours_after["resident"] < ours["resident"] + 20 * SIZE
    assert theirs_after["resident"] < theirs["resident"] + 20 * SIZE
    assert theirs_after["tensor_mappings"] == 0


async def test_an_engine_may_hold_more_tensors_than_a_process_has_descriptors(client: EngineClient) -> None:
    before = figures(os.getpid())["descriptors"]
    arrays = [large(number) for number in range(80)]
    for array in arrays:
        await client.call_utility("keep", array)
    theirs = await client.call_utility("figures")
    assert theirs["tensor_mappings"] == 80
    assert theirs["tensor_descriptors"] == 0
    assert figures(os.getpid())["descriptors"] <= before + 40
    assert await client.call_utility("kept") == [digest(array) for array in arrays]
    await client.call_utility("drop")
    await is_free(client)


async def test_memory_that_is_not_used_any_more_is_given_back(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.call_utility("digests", [large(0), large(1)])
    assert figures(os.getpid())["tensor_descriptors"] == 2
    monkeypatch.setattr("anyengine.process.blocks.IDLE_LIMIT", 0.0)
    await until(lambda: figures(os.getpid())["tensor_descriptors"] == 0)


async def test_a_process_that_the_engine_forked_keeps_what_it_has(client: EngineClient) -> None:
    await client.call_utility("keep", large(0))
    pool = lane_of(client).pool
    (block,) = pool._lent
    await client.call_utility("fork_and_drop")
    await until(lambda: lent(client) == 0)
    for number in range(5):
        await client.call_utility("digests", [large(number)])
    # The one that somebody may still read is neither used again nor kept here; the others are.
    await until(lambda: lent(client) == 0)
    assert pool._idle
    assert block not in pool._idle
    await until(lambda: not pool._given_up)


# ---- when it does not go by the lane ----


async def test_a_full_lane_sends_frames_and_everything_arrives_in_order(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anyengine.client.staging, "LANE_LIMIT", 65_537)
    lane_of(client)._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    arrays = [large(number, 81_920) for number in range(100)]
    async with anyio.create_task_group() as group:
        group.start_soon(client.call_utility, "sleep_for", 0.3)
        await until(lambda: client.statistics().pending_calls == 1)
        for array in arrays:
            await client.add_request(prompt_embeds=array, sampling_params=ONE_TOKEN)
    assert 0 < passed(client) < 100
    assert (await client.call_utility("kept")) == [digest(array) for array in arrays]
    before = passed(client)
    await client.call_utility("digests", arrays[:3])
    assert passed(client) > before
    await client.call_utility("drop")
    await is_free(client)


async def test_without_descriptors_for_new_blocks_tensors_are_frames(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    values = [large(0), torch.randn(SIZE // 4).share_memory_()]
    assert await client.call_utility("digests", values) == [digest(value) for value in values]
    assert passed(client) == 1


async def test_an_engine_without_descriptors_refuses_that_request_alone(client: EngineClient) -> None:
    await client.call_utility("allow_no_more_descriptors", False)
    with pytest.raises(RequestFailedError, match="but 0 came"):
        await client.generate(prompt_embeds=large(0), sampling_params=ONE_TOKEN)
    assert (await client.generate([5], ONE_TOKEN)).token_ids == [6]
    await client.call_utility("allow_no_more_descriptors", True)
    completion = await client.generate(prompt_embeds=large(0), sampling_params=ONE_TOKEN)
    assert completion.token_ids == [first_token(large(0))]


async def test_a_block_that_the_engine_could_not_take_is_not_kept_for_long(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.call_utility("allow_no_more_descriptors", False)
    with pytest.raises(RequestFailedError, match="but 0 came"):
        await client.generate(prompt_embeds=large(0), sampling_params=ONE_TOKEN)
    await client.call_utility("allow_no_more_descriptors", True)
    assert lent(client) == 1
    monkeypatch.setattr("anyengine.process.blocks.IDLE_LIMIT", 0.0)
    await until(lambda: figures(os.getpid())["tensor_descriptors"] == figures(os.getpid())["tensor_mappings"] == 0)


async def test_an_engine_without_a_lane() -> None:
    value = large(0)
    async with open_engine_client(lane_spec("numpy"), transport="tcp") as client:
        assert client._session.link.lane is None
        assert await client.call_utility("digests", [value]) == [digest(value)]
        completion = await client.generate(prompt_embeds=value, sampling_params=ONE_TOKEN)
        assert completion.token_ids == [first_token(value)]


async def test_an_engine_in_a_thread_has_a_lane() -> None:
    async with open_engine_client(lane_spec("numpy", prompts="keep"), placement="thread") as client:
        for number in range(3):
            value = large(number)
            assert await client.call_utility("digests", [value]) == [digest(value)]
            completion = await client.generate(prompt_embeds=value, sampling_params=ONE_TOKEN)
            assert completion.token_ids == [first_token(value)]
        assert passed(client) == 6
        await client.call_utility("drop")
        await is_free(client)


async def test_only_the_client_that_launched_the_engine_has_a_lane(client: EngineClient, tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/guest"
    values = [large(0), large(1)]
    await client.connect_client(address)
    async with open_engine_client(address=address) as guest:
        assert guest._session.link.lane is None
        async with anyio.create_task_group() as group:
            for number in range(10):

                async def check(who: EngineClient) -> None:
                    assert await who.call_utility("digests", values) == [digest(value) for value in values]

                group.start_soon(check, (client, guest)[number % 2])
    assert passed(client) == 10
    await is_free(client)


async def test_the_loop_runs_on_while_a_tensor_is_copied(client: EngineClient) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.001)
            turns += 1

    tensor = torch.ones(256, 2**18)
    async with anyio.create_task_group() as group:
        group.start_soon(count)
        await anyio.lowlevel.checkpoint()
        staged = await client._session.stage(tensor, [])
        assert turns > 10  # it takes a tenth of a second
        del staged
        group.cancel_scope.cancel()
