"""Whoever moves from vLLM's own clients gets the same tokens, whatever happens beside his requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.vllm import setups
from tests.vllm.prompts import sampling, tokens_of
from tests.vllm.reference import run_reference

from anyengine import EngineClient, SamplingParams, open_engine_client

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

Requests = list[tuple[list[int], dict[str, Any]]]


async def generate_all(client: EngineClient, requests: Requests) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in requests]

    async def generate(number: int, prompt: list[int], params: dict[str, Any]) -> None:
        answers[number] = (await client.generate(prompt, sampling(params))).token_ids

    async with anyio.create_task_group() as group:
        for number, request in enumerate(requests):
            group.start_soon(generate, number, *request)
    return answers


async def test_as_llm_and_again_from_the_prefix_cache(
    address: str, requests: Requests, expected: list[list[int]]
) -> None:
    async with open_engine_client(address=address) as client:
        hits = client.statistics().engine.get("prefix_cache_hits", 0)
        assert await generate_all(client, requests) == expected
        again = [number for number, (prompt, _) in enumerate(requests) if len(prompt) > 128][:8]  # a block and more
        answers = await generate_all(client, [requests[number] for number in again])
        assert answers == [expected[number] for number in again]
        await client.reset_prefix_cache()
        with anyio.fail_after(5):
            while client.statistics().engine["prefix_cache_hits"] <= hits:
                await anyio.sleep(0.05)


async def test_while_others_are_aborted(
    address: str, directory: Path, requests: Requests, expected: list[list[int]]
) -> None:
    requests, expected = requests[:32], expected[:32]
    async with open_engine_client(address=address) as client:
        aborted = 0

        async def abort_after(prompt: list[int], outputs: int) -> None:
            nonlocal aborted
            async with client.open_request(prompt, SamplingParams(max_tokens=100, ignore_eos=True)) as request:
                async for _ in request:
                    outputs -= 1
                    if outputs <= 0:
                        break
            aborted += 1

        text = tokens_of(directory)
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(abort_after, text[: 5 + 9 * number], number)
            answers = await generate_all(client, requests)
        assert answers == expected
        assert aborted == 8
        await client.reset_prefix_cache()


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"enable_prefix_caching": False}, id="without a prefix cache"),
        # Requests of up to 168 tokens in five blocks of 128: two or three of them fill the cache, and 16 may run.
        pytest.param({"num_gpu_blocks_override": 6}, id="preempted"),
        pytest.param({"enable_chunked_prefill": True, "max_num_batched_tokens": 64}, id="in pieces"),
    ],
)
async def test_with_other_arguments(
    arguments: dict[str, Any], requests: Requests, expected: list[list[int]], traces: setups.Traces
) -> None:
    requests, expected = requests[:40], expected[:40]
    if arguments.get("enable_chunked_prefill"):
        greedy = [number for number, (_, params) in enumerate(requests) if "seed" not in params]
        requests, expected = [requests[number] for number in greedy], [expected[number] for number in greedy]
    async with open_engine_client(setups.spec(**arguments), launcher=traces.launcher()) as client:
        assert await generate_all(client, requests) == expected
        figures = client.statistics().engine
    assert figures["prefix_cache_hits"] == 0 or arguments.get("enable_prefix_caching", True)


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_as_async_llm_with_a_worker_process(directory: Path, requests: Requests, traces: setups.Traces) -> None:
    arguments = {**setups.ARGUMENTS, "model": str(directory)}
    requests = requests[:24]
    expected = run_reference("AsyncLLM", arguments, requests)
    async with open_engine_client(setups.spec("mp"), launcher=traces.launcher("mp")) as client:
        assert await generate_all(client, requests) == expected
