"""Prompts with images: the tokens are those of vLLM's own clients, and what is wrong with one ends no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from tests.vllm import setups
from tests.vllm.image_model import ARGUMENTS, ONE, TWO, make_model, prompt_of
from tests.vllm.reference import run_reference

from anyengine import (
    EngineClient,
    MultiModalFeature,
    MultiModalField,
    RequestRefusedError,
    SamplingParams,
    open_engine_client,
)
from anyengine.engines.vllm.inputs import VllmInputs

# vLLM is in this process, too, and what it warns of is not ours.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
REQUESTS: list[tuple[str, list[int]]] = [
    (ONE, [1]),
    (ONE, [2]),
    (ONE, [1]),
    (TWO, [1, 2]),
    (TWO, [2, 1]),
    (TWO, [3, 3]),
    ("User: What is this? Answer:", []),
]

Features = list[MultiModalFeature]


@pytest.fixture(scope="module")
def model(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("image-model")
    make_model(made, directory)
    return made


@pytest.fixture(scope="module")
def inputs(model: Path) -> Iterator[VllmInputs]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in setups.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield VllmInputs(**{**setups.ARGUMENTS, **ARGUMENTS, "model": str(model)})


@pytest.fixture(scope="module")
def image_requests(inputs: VllmInputs) -> list[tuple[list[int], Features]]:
    return [inputs.process_sync(prompt_of(*request)) for request in REQUESTS]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    arguments = {**setups.ARGUMENTS, **ARGUMENTS, "model": str(model), "distributed_executor_backend": "uni"}
    return run_reference("LLM", arguments, [(list(request), GREEDY) for request in REQUESTS])


def spec(model: Path, topology: setups.Topology = "uni", **more: Any) -> Any:
    return setups.spec(topology, **ARGUMENTS, model=str(model), **more)


async def generate(client: EngineClient, prompt: list[int], features: Features) -> list[int]:
    return (await client.generate(prompt, SamplingParams(**GREEDY), features=features)).token_ids


async def generate_all(client: EngineClient, requests: list[tuple[list[int], Features]]) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in requests]

    async def answer(number: int, prompt: list[int], features: Features) -> None:
        answers[number] = await generate(client, prompt, features)

    async with anyio.create_task_group() as group:
        for number, request in enumerate(requests):
            group.start_soon(answer, number, *request)
    return answers


@pytest.mark.slow
async def test_as_llm_and_again_and_while_others_are_aborted(
    model: Path, image_requests: list[tuple[list[int], Features]], expected: list[list[int]], traces: setups.Traces
) -> None:
    assert expected[0] == expected[2] != expected[1], "the model looks at the images"
    assert expected[3] != expected[4]
    async with open_engine_client(spec(model), launcher=traces.launcher()) as client:
        assert client.info.request_options == ["cache_salt", "features"]
        for request, answer in zip(image_requests, expected, strict=True):
            assert await generate(client, *request) == answer

        async def abort(prompt: list[int], features: Features) -> None:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            async with client.open_request(prompt, params, features=features) as request:
                await anext(request)

        for clear in (client.reset_encoder_cache, client.reset_prefix_cache, client.reset_mm_cache):
            async with anyio.create_task_group() as group:
                for request in image_requests * 2:
                    group.start_soon(abort, *request)
                assert await generate_all(client, image_requests) == expected
            await clear()
        assert await generate_all(client, image_requests) == expected
    traces.expect_none()


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"enable_prefix_caching": False, "mm_processor_cache_gb": 1}, id="without a prefix cache"),
        pytest.param({"enable_chunked_prefill": True, "max_num_batched_tokens": 48}, id="in pieces"),
    ],
)
async def test_with_other_arguments(
    model: Path,
    image_requests: list[tuple[list[int], Features]],
    expected: list[list[int]],
    arguments: dict[str, Any],
    traces: setups.Traces,
) -> None:
    async with open_engine_client(spec(model, **arguments), launcher=traces.launcher()) as client:
        for _ in range(2):
            assert await generate_all(client, image_requests) == expected


@pytest.mark.slow
@pytest.mark.timeout(400)  # two engines, one after the other, each with a process for its worker
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_as_async_llm_with_a_worker_process(
    model: Path, image_requests: list[tuple[list[int], Features]], traces: setups.Traces
) -> None:
    arguments = {**setups.ARGUMENTS, **ARGUMENTS, "model": str(model)}
    expected = run_reference("AsyncLLM", arguments, [(list(request), GREEDY) for request in REQUESTS])
    async with open_engine_client(spec(model, "mp"), launcher=traces.launcher("mp")) as client:
        assert await generate_all(client, image_requests) == expected


def change(**changes: Any) -> Callable[[Features], Features]:
    return lambda features: [dataclasses.replace(features[0], identifier="wrong", **changes)]


def with_field(name: str, make: Callable[[Any], Any]) -> Callable[[Features], Features]:
    def changed(features: Features) -> Features:
        fields = dict(features[0].fields)
        if (field := make(fields.pop(name))) is not None:
            fields[name] = field
        return change(fields=fields)(features)

    return changed


EMBEDS = MultiModalField(data=torch.zeros(20, 128))

WRONG: dict[str, tuple[Callable[[Features], Features], str]] = {
    "modality": (change(modality="video"), "one of modality 'video'; the engine takes image"),
    "passed through": (change(modality="prompt_embeds"), "one of modality 'prompt_embeds'; the engine takes image"),
    "not finite": (
        with_field("pixel_values", lambda field: dataclasses.replace(field, data=field.data * torch.nan)),
        "the values of 'pixel_values' hold NaN or infinity as float32",
    ),
    "missing": (
        with_field("pixel_values", lambda field: None),
        r"features\[0\].fields lacks pixel_values; the model's processor makes num_patches, pixel_attention_mask",
    ),
    "dimensions": (
        with_field("pixel_values", lambda field: dataclasses.replace(field, data=field.data[0])),
        r"fields\['pixel_values'\] is flat, of 3 dimensions and floats; the model's processor makes flat, of 4",
    ),
    "integers": (
        with_field("pixel_values", lambda field: dataclasses.replace(field, data=field.data.int())),
        r"fields\['pixel_values'\] is flat, of 4 dimensions and integers",
    ),
    "batching": (
        with_field("num_patches", lambda field: dataclasses.replace(field, batching="shared")),
        r"fields\['num_patches'\] is shared, of 0 dimensions",
    ),
    "a mask of the wrong rank": (
        with_field("pixel_attention_mask", lambda field: dataclasses.replace(field, data=field.data[0])),
        r"fields\['pixel_attention_mask'\] is flat, of 2 dimensions and integers; the model's processor makes",
    ),
    "no mask": (with_field("pixel_attention_mask", lambda field: None), r"fields lacks pixel_attention_mask"),
    "no number of tiles": (with_field("num_patches", lambda field: None), r"fields lacks num_patches"),
    "joined elsewhere": (
        with_field("pixel_values", lambda field: dataclasses.replace(field, dim=3)),
        r"fields\['pixel_values'\] is flat along dimension 3, of 4 .*; the model's .* makes flat, of 4 dimensions",
    ),
    "joined nowhere": (
        with_field("pixel_values", lambda field: dataclasses.replace(field, dim=63)),
        r"is flat along dimension 63",
    ),
    "on another device": (
        with_field("pixel_values", lambda field: dataclasses.replace(field, keep_on_cpu=True)),
        r"of 4 dimensions and floats, kept on the CPU; the model's processor makes flat, of 4 dimensions and floats$",
    ),
    "a number": (
        with_field("pixel_values", lambda field: dataclasses.replace(field, data=3)),
        r"fields\['pixel_values'\] is flat, a number; the model's",
    ),
    "numbers": (
        with_field("pixel_values", lambda field: dataclasses.replace(field, data=[1, 2])),
        r"fields\['pixel_values'\]: expected a tensor, or a list of tensors that are alike; the model's",
    ),
    "nothing": (with_field("pixel_values", lambda field: dataclasses.replace(field, data=[])), "expected a tensor"),
    "embeddings": (
        lambda features: change(fields={**features[0].fields, "image_embeds": EMBEDS})(features),
        r"fields has image_embeds; the model's processor makes num_patches, pixel_attention_mask, pixel_values",
    ),
    "a field of no model's": (
        lambda features: change(
            fields={**features[0].fields, "foo": MultiModalField(data=torch.zeros(3), batching="flat", dim=5)}
        )(features),
        r"fields has foo; the model's processor makes",
    ),
    "more places than embeddings": (
        change(offset=0, length=42, is_embed=None),
        r"features\[0\] has places for 42 embeddings, by its length and is_embed; the model makes 20 of it",
    ),
    "places for none": (change(is_embed=torch.zeros(33, dtype=torch.bool)), r"has places for 0 embeddings"),
    "too many": (
        lambda features: [
            dataclasses.replace(features[0], offset=number, length=1, is_embed=None) for number in range(3)
        ],
        r"At most 2 image\(s\) may be provided in one prompt",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_what_is_wrong_with_a_feature_is_its_requests_alone(
    model: Path, image_requests: list[tuple[list[int], Features]], expected: list[list[int]], traces: setups.Traces
) -> None:
    prompt, features = image_requests[0]
    async with open_engine_client(spec(model), launcher=traces.launcher()) as client:
        async with client.open_request(
            prompt, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True), features=features
        ) as beside:
            for make, message in WRONG.values():
                with pytest.raises(RequestRefusedError, match=message):
                    await generate(client, prompt, make(features))
            tiles = with_field("pixel_values", lambda field: dataclasses.replace(field, data=list(field.data)))
            assert await generate(client, prompt, tiles(features)) == expected[0]
            # Whether its places are as many as the model makes is not known beforehand.
            mask = features[0].fields["pixel_attention_mask"]
            mask = dataclasses.replace(mask, data=1 - mask.data.int())
            places = torch.zeros(features[0].length, dtype=torch.bool)
            places[:7] = True
            other = dataclasses.replace(
                features[0], is_embed=places, fields={**features[0].fields, "pixel_attention_mask": mask}
            )
            expected_error = rf"features\[0\] has 7 embeddings, .* keeps 20 under .* '{features[0].identifier}'"
            with pytest.raises(RequestRefusedError, match=expected_error):
                await generate(client, prompt, [other])
            assert (await anext(beside)).token_ids[0] == expected[0][0]
        assert await generate_all(client, image_requests) == expected


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_embeddings_in_place_of_an_image(
    model: Path, image_requests: list[tuple[list[int], Features]], expected: list[list[int]], traces: setups.Traces
) -> None:
    prompt, features = image_requests[0]
    wrong = {
        "lacks num_patches, pixel_attention_mask, pixel_values": {"foo": MultiModalField(data=1)},
        "lacks pixel_values": {name: features[0].fields[name] for name in ("num_patches", "pixel_attention_mask")},
        "has foo": {**features[0].fields, "foo": MultiModalField(data=1)},
        "expected floats, of dimensions tokens x width": {"image_embeds": MultiModalField(data=3)},
        r"\['image_embeds'\] is 64 wide; the model's embeddings are 128": {
            "image_embeds": MultiModalField(data=torch.zeros(20, 64))
        },
        "has places for 20 embeddings, by its length and is_embed; the model makes 5 of it": {
            "image_embeds": MultiModalField(data=torch.zeros(5, 128))
        },
    }
    async with open_engine_client(spec(model, enable_mm_embeds=True), launcher=traces.launcher()) as client:
        assert await generate(client, prompt, features) == expected[0]
        answer = await generate(client, prompt, change(fields={"image_embeds": EMBEDS})(features))
        assert len(answer) == 8 and answer != expected[0]
        for message, fields in wrong.items():
            with pytest.raises(RequestRefusedError, match=message):
                await generate(client, prompt, change(fields=fields)(features))
        assert await generate(client, prompt, features) == expected[0]


@pytest.mark.slow
async def test_a_text_model_takes_none(address: str, image_requests: list[tuple[list[int], Features]]) -> None:
    async with open_engine_client(address=address) as client:
        assert "features" not in client.info.request_options
        with pytest.raises(RequestRefusedError, match="engine 'vllm' does not support it; it supports cache_salt"):
            await generate(client, *image_requests[0])


# ---- in the application ----


@pytest.mark.slow
async def test_inputs_are_made_off_the_event_loop(
    inputs: VllmInputs, image_requests: list[tuple[list[int], Features]], monkeypatch: pytest.MonkeyPatch
) -> None:
    render, running, most = inputs._renderer.render_cmpl, 0, 0
    started, released = anyio.Event(), False
    loop = anyio.lowlevel.current_token()

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        anyio.from_thread.run_sync(started.set, token=loop)
        while not released:
            anyio.from_thread.run(anyio.sleep, 0, token=loop)
        running -= 1
        return render(*args, **kwargs)

    monkeypatch.setattr(inputs._renderer, "render_cmpl", watched)
    made: list[tuple[list[int], Features]] = [([], []) for _ in REQUESTS]

    async def make(number: int) -> None:
        made[number] = await inputs.process(prompt_of(*REQUESTS[number]))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for number in range(len(REQUESTS)):
                group.start_soon(make, number)
            await started.wait()
            with anyio.move_on_after(0.05):  # one that waits for its turn is cancelled at once
                await inputs.process(prompt_of(*REQUESTS[0]))
            released = True
    assert most == 1
    for (prompt, features), (known_prompt, known_features) in zip(made, image_requests, strict=True):
        assert prompt == known_prompt
        places = [(feature.identifier, feature.offset, feature.length) for feature in features]
        assert places == [(feature.identifier, feature.offset, feature.length) for feature in known_features]
    assert image_requests[6][1] == []
    (first,), (other,) = image_requests[0][1], image_requests[1][1]
    assert first.identifier != other.identifier
    assert first.identifier == image_requests[3][1][0].identifier


@pytest.mark.slow
async def test_a_prompt_that_vllm_refuses(inputs: VllmInputs) -> None:
    for prompt, message in (
        (prompt_of(ONE, [1, 2, 3]), r"At most 2 image\(s\) may be provided in one prompt"),
        (prompt_of("No place for it", [1]), "AssertionError: Failed to apply prompt replacement"),
        ({"prompt": ONE, "multi_modal_data": {"image": "a path"}}, "vLLM refuses the prompt"),
        ({}, "Prompt dictionary must contain text, tokens, or embeddings"),
        ({**prompt_of(ONE, [1]), "cache_salt": "mine"}, "pass it to the request, as cache_salt="),
    ):
        with pytest.raises(RequestRefusedError, match=message):
            await inputs.process(prompt)
    with pytest.raises(TypeError, match=r"prompt='text' \(str\): expected a mapping, as vLLM takes it"):
        await inputs.process("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="vLLM's EngineArgs have no 'modle'; did you mean 'model'"):
        await VllmInputs.load(modle="x")


@pytest.mark.slow
async def test_inputs_for_a_rank_and_for_the_default_model(
    image_requests: list[tuple[list[int], Features]], inputs: VllmInputs, model: Path
) -> None:
    arguments = {**setups.ARGUMENTS, **ARGUMENTS, "model": str(model), "data_parallel_size": 2, "data_parallel_rank": 1}
    of_rank = await VllmInputs.load(**arguments, data_parallel_size_local=1)
    prompt, features = await of_rank.process(prompt_of(*REQUESTS[0]))
    assert prompt == image_requests[0][0]
    assert [feature.identifier for feature in features] == [image_requests[0][1][0].identifier]
    of_text = await VllmInputs.load(**setups.ARGUMENTS, enable_prompt_embeds=True)
    prompt, features = await of_text.process({"prompt": "Hello"})
    assert len(prompt) == 1 and features == []
    with pytest.raises(RequestRefusedError, match=r"vLLM makes 'embeds' of the prompt, .* go to the request, as"):
        await of_text.process({"prompt_embeds": torch.zeros(4, 576)})
