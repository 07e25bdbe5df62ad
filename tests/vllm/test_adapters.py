"""An adapter that is gone fails its requests and nobody else's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.helpers import until
from tests.vllm import setups
from tests.vllm.test_requests import PROMPT, write_adapter

from anyengine import LoRARequest, RequestError, SamplingParams, UtilityError, open_engine_client

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_directories_that_vanish(tmp_path: Path, traces: setups.Traces) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=3)
    first, second, third = (
        LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(write_adapter(tmp_path / name)))
        for number, name in enumerate(("first", "second", "third"), start=1)
    )
    arguments = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    async with open_engine_client(setups.spec(**arguments), launcher=traces.launcher()) as client:
        plain = (await client.generate(PROMPT, greedy)).token_ids
        whole = (await client.generate(PROMPT, greedy, lora=first)).token_ids

        # In one place: the second waits, and the third, which is gone when its turn comes.
        async with (
            client.open_request(PROMPT, greedy, lora=first) as running,
            client.open_request(PROMPT, short, lora=second) as waiting,
            client.open_request(PROMPT, short, lora=third) as failing,
        ):
            begun = (await anext(running)).token_ids
            async with client.open_request(PROMPT, short, lora=second):
                pass  # aborted while it waits
            shutil.rmtree(first.lora_path)
            shutil.rmtree(third.lora_path)
            await until(lambda: client.statistics().engine.get("waiting") == 2)
            assert begun + (await running.completion()).token_ids == whole
            assert len((await waiting.completion()).token_ids) == 3
            with pytest.raises(RequestError, match="the adapter 'third' cannot be loaded"):
                await failing.completion()
        with pytest.raises(RequestError, match="the adapter 'first' cannot be loaded"):
            await client.generate(PROMPT, short, lora=first)

        # Unloaded by hand while it is in use: read again, or else the end of its requests alone.
        whole = (await client.generate(PROMPT, greedy, lora=second)).token_ids
        async with client.open_request(PROMPT, greedy) as other:
            async with client.open_request(PROMPT, greedy, lora=second) as request:
                begun = (await anext(request)).token_ids
                with pytest.raises(RequestError, match="requests are using 2 of the same name"):
                    same = LoRARequest(lora_name="second", lora_int_id=5, lora_path=second.lora_path)
                    await client.generate(PROMPT, short, lora=same)
                with pytest.raises(UtilityError, match=r"adapters \[2\] are in use or pinned, and max_loras=1"):
                    await client.pin_lora(3)
                assert await client.remove_lora(2) is True
                assert begun + (await request.completion()).token_ids == whole
            async with client.open_request(PROMPT, greedy, lora=second) as request:
                await anext(request)
                shutil.rmtree(second.lora_path)
                await client.remove_lora(2)
                with pytest.raises(RequestError, match="the adapter 'second' cannot be loaded"):
                    await request.completion()
            assert (await other.completion()).token_ids == plain

        write_adapter(tmp_path / "third")
        assert await client.add_lora(third) is True
        assert await client.pin_lora(3) is True
        write_adapter(tmp_path / "second")
        with pytest.raises(RequestError, match=r"no place on the device: max_loras=1, and adapters \[3\] are pinned"):
            await client.generate(PROMPT, short, lora=second)
        assert (await client.generate(PROMPT, greedy)).token_ids == plain
        assert client.statistics().live_requests == 0
