"""Multimodal features in vLLM's words, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from anyengine.engine.failures import message_of
from anyengine.engines.vllm.installed import find
from anyengine.engines.vllm.parameters import check_finite
from anyengine.errors import RequestRefusedError
from anyengine.multimodal import Batching, MultiModalFeature, MultiModalField

_BATCHINGS: Mapping[str, Batching] = {
    "MultiModalBatchedField": "batched",
    "MultiModalFlatField": "flat",
    "MultiModalSharedField": "shared",
}


def engine_input(token_ids: Sequence[int], features: Sequence[MultiModalFeature], dtype: Any) -> dict[str, Any]:
    """A prompt and its features as what vLLM's renderer makes of a prompt with images.

    :param dtype: that in which the model computes
    :raises RequestRefusedError: if a feature's values are not finite in it
    """
    items: dict[str, list[Any]] = {}
    identifiers: dict[str, list[str]] = {}
    positions: dict[str, list[Any]] = {}
    for feature in features:
        items.setdefault(feature.modality, []).append(_item(feature, dtype))
        identifiers.setdefault(feature.modality, []).append(feature.identifier)
        positions.setdefault(feature.modality, []).append(_position(feature))
    return {
        "type": "multimodal",
        "prompt_token_ids": token_ids,
        "mm_kwargs": find("vllm.multimodal.inputs:MultiModalKwargsItems")(items),
        "mm_hashes": identifiers,
        "mm_placeholders": positions,
    }


def tokens_beside(token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> list[int]:
    """The tokens of a prompt of which no encoder's output takes the place."""
    taken = {place for feature in features for place in feature.places()}
    return [token for place, token in enumerate(token_ids) if place not in taken]


def features_of(rendered: Mapping[str, Any]) -> list[MultiModalFeature]:
    """The features of what vLLM's renderer made of a prompt, in the order of their places; none of a text.

    :raises TypeError: if vLLM has a kind of field that is not known here
    """
    features = [
        MultiModalFeature(
            modality=modality,
            identifier=identifier,
            offset=position.offset,
            length=position.length,
            fields={name: _field(element) for name, element in item.items()},
            is_embed=position.is_embed,
        )
        for modality, items in rendered.get("mm_kwargs", {}).items()
        for item, identifier, position in zip(
            items, rendered["mm_hashes"][modality], rendered["mm_placeholders"][modality], strict=True
        )
    ]
    return sorted(features, key=lambda feature: feature.offset)


def _field(element: Any) -> MultiModalField:
    kind = type(element.field).__name__
    if kind not in _BATCHINGS:
        raise TypeError(f"{kind}: this kind of vLLM's multimodal fields is not known; those known are {[*_BATCHINGS]}")
    return MultiModalField(
        data=element.data,
        batching=_BATCHINGS[kind],
        dim=getattr(element.field, "dim", 0),
        keep_on_cpu=element.field.keep_on_cpu,
    )


def _item(feature: MultiModalFeature, dtype: Any) -> Any:
    element = find("vllm.multimodal.inputs:MultiModalFieldElem")
    return find("vllm.multimodal.inputs:MultiModalKwargsItem")(
        {
            name: element(data=_tensors(name, field.data, dtype), field=_kind(field))
            for name, field in feature.fields.items()
        }
    )


def _kind(field: MultiModalField) -> Any:
    # An item that is cut out of its batch already has no use for where that was, or how large the batch was.
    known: Mapping[Batching, tuple[str, dict[str, Any]]] = {
        "batched": ("MultiModalBatchedField", {}),
        "flat": ("MultiModalFlatField", {"slices": [], "dim": field.dim}),
        "shared": ("MultiModalSharedField", {"batch_size": 1}),
    }
    name, more = known[field.batching]
    return find(f"vllm.multimodal.inputs:{name}")(keep_on_cpu=field.keep_on_cpu, **more)


def _tensors(name: str, data: Any, dtype: Any) -> Any:
    if isinstance(data, list):
        return [_tensors(name, item, dtype) for item in cast("list[Any]", data)]
    if isinstance(data, int | float):
        return data
    tensor = as_tensor(data)
    if tensor.is_floating_point():
        check_finite(f"the values of {name!r}", tensor.to(dtype))
    return tensor


def as_tensor(data: Any) -> Any:
    """An array as a tensor.

    :raises RequestRefusedError: if torch has no such
    """
    try:
        return find("torch:as_tensor")(data)
    except (TypeError, RuntimeError, ValueError) as error:
        raise RequestRefusedError(f"a feature holds what cannot be made a tensor: {message_of(error)}") from error


def _position(feature: MultiModalFeature) -> Any:
    mask = None if feature.is_embed is None else as_tensor(feature.is_embed)
    return find("vllm.multimodal.inputs:PlaceholderRange")(feature.offset, feature.length, mask)
