"""With two workers: what fails in one of them spoils no answer of the other, to this call or to any that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.vllm import setups
from tests.vllm.test_requests import PROMPT, write_adapter

from anyengine import (
    EngineClient,
    LoRARequest,
    RequestRefusedError,
    SamplingParams,
    UnencodableResultError,
    UtilityError,
    open_engine_client,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TWO = {"tensor_parallel_size": 2, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


async def describe(client: EngineClient, greeting: str) -> list[dict[str, Any]]:
    return await client.collective_rpc("tests.vllm.in_workers:describe", kwargs={"greeting": greeting})


async def loaded(client: EngineClient) -> list[list[int]]:
    return await client.collective_rpc("tests.vllm.in_workers:loaded_adapters")


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_failures(small_model: Path, tmp_path: Path, traces: setups.Traces) -> None:
    first, second, absent = (
        LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(tmp_path / name))
        for number, name in enumerate(("first", "second", "absent"), start=1)
    )
    for seed, lora in enumerate((first, second)):
        write_adapter(Path(lora.lora_path), seed=seed)
    spec = setups.spec("mp", **TWO, model=str(small_model))
    launcher = traces.launcher("mp", VLLM_CPU_OMP_THREADS_BIND="0|1")
    async with open_engine_client(spec, launcher=launcher) as client:
        with anyio.fail_after(100):
            assert [each["rank"] for each in await describe(client, "hello")] == [0, 1]
            expected = await client.generate(PROMPT, GREEDY)

            for rank, who in ((0, "worker 0"), (1, "worker 1"), (None, "workers 0, 1")):
                with pytest.raises(UtilityError, match=f"{who}: ValueError: a worker's own error"):
                    await client.collective_rpc("tests.vllm.in_workers:fail", args=[rank])
                assert [each["greeting"] for each in await describe(client, who)] == [who, who]
            with pytest.raises(UnencodableResultError, match=r"worker 0: result: .* cannot travel"):
                await client.collective_rpc("tests.vllm.in_workers:unencodable")
            with pytest.raises(UtilityError, match="workers 0, 1: ModuleNotFoundError"):
                await client.collective_rpc("no.such.module:name")
            assert [each["greeting"] for each in await describe(client, "again")] == ["again", "again"]

            with pytest.raises(RequestRefusedError, match=r"'absent' cannot be loaded .*workers 0, 1"):
                await client.generate(PROMPT, GREEDY, lora=absent)
            assert await client.list_loras() == []
            tuned = await client.generate(PROMPT, GREEDY, lora=first)
            assert tuned.token_ids != expected.token_ids

            # One worker has it and the other has not: then none has it.
            await client.collective_rpc("tests.vllm.in_workers:lose_adapter", args=[1, 2])
            with pytest.raises(RequestRefusedError, match=r"'second' cannot be loaded .*worker 1: FileNotFoundError"):
                await client.generate(PROMPT, GREEDY, lora=second)
            assert await loaded(client) == [[1], [1]]
            assert await client.list_loras() == [1]

            await client.pause_scheduler()
            await client.resume_scheduler()
            assert (await client.generate(PROMPT, GREEDY, lora=first)).token_ids == tuned.token_ids
            assert (await client.generate(PROMPT, GREEDY)).token_ids == expected.token_ids
            assert [each["greeting"] for each in await describe(client, "end")] == ["end", "end"]
    traces.expect_none()
