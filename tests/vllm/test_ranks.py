"""Data-parallel ranks, each with a client of its own, are the engines that vLLM makes of them itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.vllm import setups
from tests.vllm.prompts import sampling
from tests.vllm.reference import run_reference

from anyengine import EngineClient, EngineDeadError, EngineStartError, open_engine_client

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

Requests = list[tuple[list[int], dict[str, Any]]]

UNSEEDED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_two_ranks(directory: Path, requests: Requests, traces: setups.Traces) -> None:
    first = [(requests[40][0], UNSEEDED)] * 2  # the same for both, whose random numbers differ
    requests = first + requests
    arguments = {**setups.ARGUMENTS, "model": str(directory), "data_parallel_size": 2}
    expected = await anyio.to_thread.run_sync(run_reference, "AsyncLLM", arguments, requests)
    assert expected[0] != expected[1]

    answers: list[list[int]] = [[] for _ in requests]

    async def generate(client: EngineClient, numbers: Sequence[int]) -> None:
        async def one(number: int) -> None:
            prompt, params = requests[number]
            answers[number] = (await client.generate(prompt, sampling(params))).token_ids

        await one(numbers[0])
        async with anyio.create_task_group() as group:
            for number in numbers[1:]:
                group.start_soon(one, number)

    clients: list[EngineClient] = []
    async with AsyncExitStack() as stack:
        for rank in range(2):
            spec = setups.spec(data_parallel_size=2, data_parallel_rank=rank)
            clients.append(await stack.enter_async_context(open_engine_client(spec, launcher=traces.launcher())))
            traces.look(clients[rank].health().pid)
            info = clients[rank].info
            assert (info.data_parallel_rank, info.data_parallel_size, info.world_size) == (rank, 2, 1)
        async with anyio.create_task_group() as group:
            for rank, client in enumerate(clients):
                group.start_soon(generate, client, range(rank, len(requests), 2))
        assert answers == expected

        os.kill(clients[0].health().pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await clients[0].wait_dead()
        prompt, params = requests[3]
        assert (await clients[1].generate(prompt, sampling(params))).token_ids == expected[3]
        assert clients[1].health()
    traces.expect_none()


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"data_parallel_size": 2, "data_parallel_rank": 0},
            "the ranks of a mixture of experts have to step together.* set tensor_parallel_size, or run",
        ),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "enable_expert_parallel=True: vLLM's workers crash with it on the CPU; leave it out",
        ),
    ],
    ids=["ranks", "expert parallelism"],
)
async def test_a_mixture_of_experts_is_refused_what_it_cannot_do(
    directory: Path, tmp_path: Path, traces: setups.Traces, arguments: dict[str, object], problem: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory / name, tmp_path)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 4}
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 49152, **small}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = setups.spec(model=str(tmp_path), **arguments)
    with pytest.raises(EngineStartError, match=problem):
        async with open_engine_client(spec, launcher=traces.launcher()):
            pass
    traces.expect_none()


@pytest.mark.slow
def test_devices_of_a_rank(directory: Path) -> None:
    """Without GPUs: what vLLM's workers choose their devices and seeds by."""
    program = f"""if True:
        from unittest import mock
        from vllm.platforms import current_platform
        from anyengine.engines.vllm.parameters import engine_args
        from anyengine.engines.vllm.ranks import take_rank

        def configuration(cuda, **more):
            given = {{"model": {str(directory)!r}, "max_model_len": 256, "data_parallel_size": 4, **more}}
            rank, arguments = take_rank(given)
            config = engine_args(arguments).create_engine_config()
            config.parallel_config.world_size = 2  # as with two GPUs to a rank
            with mock.patch.object(type(current_platform), "is_cuda_alike", lambda self: cuda):
                rank.apply_to(config)
            parallel = config.parallel_config
            assert (parallel.data_parallel_size, parallel.data_parallel_rank) == (1, 0)
            return config

        # On CUDA a worker adds to its own number that of its rank on the host, times the devices of a rank.
        for number, more, local in ((3, {{}}, 3), (3, {{"data_parallel_size_local": 2}}, 1)):
            parallel = configuration(True, data_parallel_rank=number, **more).parallel_config
            assert parallel.data_parallel_index == number
            assert parallel.data_parallel_rank_local == local
            assert parallel.assigned_physical_gpu_ids is None
        # Elsewhere it is told.
        parallel = configuration(False, data_parallel_rank=3).parallel_config
        assert parallel.assigned_physical_gpu_ids == [6, 7], parallel.assigned_physical_gpu_ids
        transfer = {{"kv_role": "kv_both", "kv_connector": "ExampleConnector", "engine_id": "mine"}}
        config = configuration(True, data_parallel_rank=1, kv_transfer_config=transfer)
        assert config.kv_transfer_config.engine_id == "mine_dp1"
    """
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | setups.ENVIRONMENT)
