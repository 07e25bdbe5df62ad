"""What a model's own example says of features, without vLLM; ``tests/vllm/test_images.py`` has a real model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from anyengine import MultiModalFeature, MultiModalField, RequestRefusedError
from anyengine.engines.vllm.features import features_of
from anyengine.engines.vllm.model_features import ModelFeatures


class MultiModalBatchedField(SimpleNamespace):
    """As vLLM has it, by its name."""


class MultiModalFlatField(SimpleNamespace):
    """The same."""


class MultiModalOtherField(SimpleNamespace):
    """Of no version that is known."""


def element(data: Any, kind: type = MultiModalBatchedField, **more: Any) -> Any:
    return SimpleNamespace(data=data, field=kind(**{"keep_on_cpu": False, **more}))


ITEM = {
    "pixels": element(torch.zeros(4, 3, 2, 2), MultiModalFlatField, dim=0),
    "crops": element([torch.zeros(2, 5), torch.zeros(3, 5)]),
    "joined": element(torch.zeros(2, 6), MultiModalFlatField, dim=1),
    "sizes": element(torch.tensor([2, 2]), keep_on_cpu=True),
    "number": element(7),
}
FIELDS: dict[str, MultiModalField] = {
    "pixels": MultiModalField(data=torch.ones(4, 3, 2, 2), batching="flat"),
    "crops": MultiModalField(data=[torch.ones(2, 5), torch.ones(3, 5)]),
    "joined": MultiModalField(data=torch.ones(2, 6), batching="flat", dim=1),
    "sizes": MultiModalField(data=torch.tensor([2, 2]), keep_on_cpu=True),
    "number": MultiModalField(data=7),
}


def rendered(item: Mapping[str, Any]) -> dict[str, Any]:
    position = SimpleNamespace(offset=0, length=6, is_embed=None)
    return {"mm_kwargs": {"image": [item]}, "mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [position]}}


def model_features(item: Mapping[str, Any] | None = None, *, limit: int = 9, embeds: bool = False) -> ModelFeatures:
    """Of a model whose processor makes ``item`` of its example."""
    info = SimpleNamespace(
        allowed_mm_limits={"image": limit},
        validate_num_items=lambda modality, count: None,
        data_parser=SimpleNamespace(expected_hidden_size=8),
    )
    example = rendered(ITEM if item is None else item)
    processor = SimpleNamespace(info=info, get_dummy_mm_inputs=lambda counts, scheduler_config: example)
    model = SimpleNamespace(get_multimodal_config=lambda: SimpleNamespace(enable_mm_embeds=embeds))
    return ModelFeatures(SimpleNamespace(model_config=model, scheduler_config=None), processor)


def feature(length: int = 6, fields: Mapping[str, MultiModalField] = FIELDS, **changes: Any) -> MultiModalFeature:
    """One that fits, but for the data or the fields in ``changes``."""
    changed = {
        name: value if isinstance(value, MultiModalField) else dataclasses.replace(fields[name], data=value)
        for name, value in changes.items()
    }
    return MultiModalFeature(modality="image", identifier="x", offset=0, length=length, fields={**fields, **changed})


def test_what_is_as_the_example_is_left_as_it_is() -> None:
    (fitted,) = model_features().fitted([given := feature()])
    assert fitted is given


def test_a_list_of_tensors_is_one_where_the_example_is_one_and_they_have_one_shape() -> None:
    fits = model_features().fitted
    (fitted,) = fits([feature(pixels=[torch.ones(3, 2, 2)] * 4, crops=torch.ones(2, 4, 5))])
    assert torch.equal(fitted.fields["pixels"].data, torch.ones(4, 3, 2, 2))
    (fitted,) = fits([feature(pixels=[[numpy.ones((2, 2), numpy.float32)] * 3] * 4)])
    assert torch.equal(fitted.fields["pixels"].data, torch.ones(4, 3, 2, 2))
    uneven = [torch.ones(3, 2, 2), torch.ones(3, 2, 1)]
    (fitted,) = fits([feature(pixels=uneven)])
    assert [tuple(tensor.shape) for tensor in fitted.fields["pixels"].data] == [(3, 2, 2), (3, 2, 1)]
    (fitted,) = fits([given := feature(crops=[torch.ones(2, 5), torch.ones(2, 5)])])
    assert isinstance(fitted.fields["crops"].data, list)
    assert len(given.fields["crops"].data) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pixels": []},
            r"\['pixels'\]: expected a tensor, or a list of tensors that are alike; .* makes flat, of 4 dim",
        ),
        ({"pixels": [torch.ones(3, 2, 2), torch.ones(2, 2)]}, "expected a tensor, or a list of tensors that are alike"),
        ({"pixels": [torch.ones(3, 2, 2), torch.ones(3, 2, 2).int()]}, "a list of tensors that are alike"),
        ({"pixels": [1.0, 2.0]}, "a list of tensors that are alike"),
        (
            {"pixels": [torch.ones(2, 2)]},
            r"\['pixels'\] is flat, of 3 dimensions and floats; the model's processor makes",
        ),
        ({"pixels": torch.ones(4, 3, 2, 2).to(torch.complex64)}, "of 4 dimensions and complex numbers"),
        ({"joined": [torch.ones(5), torch.ones(4)]}, "vLLM joins lists along dimension 0 only, not 1"),
        (
            {"number": torch.tensor(7)},
            r"is batched, of 0 dimensions and integers; the model's processor makes batched, a n",
        ),
        (
            {"sizes": 2},
            "is batched, a number, kept on the CPU; .* makes batched, of 1 dimensions and integers, kept on",
        ),
        ({"sizes": MultiModalField(data=torch.tensor([2, 2]))}, "of 1 dimensions and integers; .*, kept on the CPU$"),
    ],
)
def test_what_is_not(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefusedError, match=message):
        model_features().fitted([feature(**changes)])


def test_the_number_of_places_is_known_of_what_has_the_shapes_and_integers_of_the_example() -> None:
    fits = model_features().fitted
    with pytest.raises(RequestRefusedError, match=r"features\[1\] has places for 7 embeddings, .*; the model makes 6"):
        fits([feature(), feature(length=7)])
    with pytest.raises(RequestRefusedError, match="has places for 7 embeddings"):
        fits([feature(length=7, sizes=torch.tensor([2, 2], dtype=torch.int32), pixels=[torch.zeros(3, 2, 2)] * 4)])
    # Of others only the model knows.
    fits([feature(length=7, sizes=torch.tensor([2, 1]))])
    fits([feature(length=7, pixels=torch.ones(5, 3, 2, 2))])
    fits([feature(length=7, crops=[torch.ones(3, 5), torch.ones(3, 5)])])
    fits([feature(length=7, crops=torch.ones(2, 3, 5))])
    fits([feature(length=7, number=8)])


def test_a_model_without_an_example_takes_all_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for item, why in (
        ({"x": element(1, MultiModalOtherField)}, "TypeError: MultiModalOtherField"),
        ({"x": element([])}, "TypeError: x: a list of what is not alike"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "anyengine"):
            fits = model_features(item).fitted
        (record,) = caplog.records
        assert f"no example of modality 'image' for this model ({why}" in record.getMessage()
        fits([feature(fields={"anything": MultiModalField(data=1)})])
    with pytest.raises(TypeError, match="MultiModalOtherField: this kind of vLLM's multimodal fields is not known"):
        features_of(rendered({"x": element(1, MultiModalOtherField)}))


def test_embeddings_alone_are_taken_where_no_items_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    fits = model_features(limit=0, embeds=True).fitted
    assert not caplog.records
    embeds = {"image_embeds": MultiModalField(data=torch.zeros(6, 8))}
    fits([feature(fields=embeds)] * 20)
    fits([feature(fields={"image_embeds": MultiModalField(data=[torch.zeros(4, 8), torch.zeros(2, 8)])})])
    for fields, message in (
        (FIELDS, "lacks image_embeds: with a limit of 0 the engine takes embeddings only"),
        ({"image_embeds": MultiModalField(data=torch.zeros(7, 8))}, "has places for 6 embeddings, .* makes 7 of it"),
        ({"image_embeds": MultiModalField(data=torch.zeros(6, 9))}, "is 9 wide; the model's embeddings are 8"),
        ({"image_embeds": MultiModalField(data=[torch.zeros(6, 9)])}, "is 9 wide"),
        ({"image_embeds": MultiModalField(data=[])}, "expected floats"),
        ({"image_embeds": MultiModalField(data=torch.zeros(6, 8).int())}, "expected floats"),
        ({"image_embeds": MultiModalField(data=torch.zeros(6))}, "expected floats"),
    ):
        with pytest.raises(RequestRefusedError, match=message):
            fits([feature(fields=fields)])
    with pytest.raises(RequestRefusedError, match="one of modality 'image'; the engine takes none"):
        model_features(limit=0).fitted([feature()])
