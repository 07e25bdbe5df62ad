"""An adapter that is gone fails its requests and nobody else's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.helpers import until
from tests.vllm import setups
from tests.vllm.test_requests import PROMPT, write_adapter

from anyengine import LoRARequest, RequestRefusedError, SamplingParams, UtilityError, open_engine_client

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
            with pytest.raises(RequestRefusedError, match="the adapter 'third' cannot be loaded"):
                await failing.completion()
        with pytest.raises(RequestRefusedError, match="the adapter 'first' cannot be loaded"):
            await client.generate(PROMPT, short, lora=first)

        # Whoever is using an adapter goes on with it.
        whole = (await client.generate(PROMPT, greedy, lora=second)).token_ids
        async with client.open_request(PROMPT, greedy) as other:
            async with client.open_request(PROMPT, greedy, lora=second) as request:
                begun = (await anext(request)).token_ids
                same = LoRARequest(lora_name="second", lora_int_id=5, lora_path=second.lora_path)
                with pytest.raises(RequestRefusedError, match=r"has the name of 'second' \(number 2, .*, which is in"):
                    await client.generate(PROMPT, short, lora=same)
                with pytest.raises(UtilityError, match=r"adapters \[2\] are in use or pinned, and max_loras=1"):
                    await client.pin_lora(3)
                with pytest.raises(UtilityError, match="requests are using the adapter 'second'"):
                    await client.remove_lora(2)
                shutil.rmtree(second.lora_path)
                assert begun + (await request.completion()).token_ids == whole
            # What an application does in the workers is noticed: read again, or else the end of its requests alone.
            write_adapter(tmp_path / "second")
            async with client.open_request(PROMPT, greedy, lora=second) as request:
                begun = (await anext(request)).token_ids
                assert await client.collective_rpc("remove_lora", args=[2]) == [True]
                assert begun + (await request.completion()).token_ids == whole
            async with client.open_request(PROMPT, greedy, lora=second) as request:
                await anext(request)
                shutil.rmtree(second.lora_path)
                assert await client.collective_rpc("remove_lora", args=[2]) == [True]
                with pytest.raises(RequestRefusedError, match="the adapter 'second' cannot be loaded"):
                    await request.completion()
            assert (await other.completion()).token_ids == plain

        write_adapter(tmp_path / "third")
        assert await client.add_lora(third) is True
        assert await client.pin_lora(3) is True
        write_adapter(tmp_path / "second")
        with pytest.raises(RequestRefusedError, match=r"no place on the device: max_loras=1, and adapters \[3\] are"):
            await client.generate(PROMPT, short, lora=second)
        assert (await client.generate(PROMPT, greedy)).token_ids == plain
        assert client.statistics().live_requests == 0


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_weights_are_those_of_the_request(small_model: Path, tmp_path: Path, traces: setups.Traces) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    prompt = PROMPT * 20  # some blocks of the prefix cache
    paths = [str(write_adapter(tmp_path / f"adapter-{seed}", seed=seed)) for seed in range(3)]
    arguments = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 2, "block_size": 32}
    async with open_engine_client(
        setups.spec(**arguments, model=str(small_model)), launcher=traces.launcher()
    ) as client:

        async def score(name: str, number: int, path: str) -> tuple[int, float]:
            lora = LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
            completion = await client.generate(prompt, params, lora=lora)
            assert completion.logprobs is not None
            (token,) = completion.token_ids
            return token, round(completion.logprobs[0][token], 3)

        expected = [await score(f"alone-{seed}", 10 + seed, path) for seed, path in enumerate(paths)]
        assert len(set(expected)) == 3
        for number in (10, 11, 12):
            await client.remove_lora(number)

        assert await score("a", 1, paths[0]) == expected[0]
        with pytest.raises(RequestRefusedError, match=r"'b' \(number 1, .* has the number of 'a' \(number 1, "):
            await score("b", 1, paths[1])
        with pytest.raises(RequestRefusedError, match=r"'a' .number 1, '/nowhere'. has the number of 'a' .number 1, "):
            await score("a", 1, "/nowhere")
        with pytest.raises(UtilityError, match="has the name of 'a'"):
            await client.add_lora(LoRARequest(lora_name="a", lora_int_id=2, lora_path=paths[1]))
        await client.remove_lora(1)
        assert await score("b", 1, paths[1]) == expected[1]
        # The same name, with other weights from the same directory, while the cache still has what the first made.
        assert await score("a", 2, paths[0]) == expected[0]
        write_adapter(Path(paths[0]), seed=2)
        await client.remove_lora(2)
        assert await score("a", 2, paths[0]) == expected[2]
        # The place of one that cannot be loaded is nobody else's.
        with pytest.raises(RequestRefusedError, match="'absent' cannot be loaded"):
            await score("absent", 7, "/nowhere")
        assert await client.list_loras() == [1, 2]
