"""Multimodal features in vLLM's words, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from anyengine.engines.vllm.installed import find
from anyengine.errors import RequestError
from anyengine.multimodal import Batching, MultiModalFeature, MultiModalField

_BATCHINGS: Mapping[str, Batching] = {
    "MultiModalBatchedField": "batched",
    "MultiModalFlatField": "flat",
    "MultiModalSharedField": "shared",
}


def engine_input(token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> dict[str, Any]:
    """A prompt and its features as what vLLM's renderer makes of a prompt with images."""
    items: dict[str, list[Any]] = {}
    identifiers: dict[str, list[str]] = {}
    positions: dict[str, list[Any]] = {}
    for feature in features:
        items.setdefault(feature.modality, []).append(_item(feature))
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


class ModelFeatures:
    """What a model takes: the limits of each modality, and the fields that its own processor makes of an item.

    An encoder that is given something else raises in the middle of a step, and ends the engine. What shapes and values
    mean only the model knows; who has features of its processor has them right.
    """

    def __init__(self, config: Any, processor: Any) -> None:
        self._info = processor.info
        self._takes_embeds: bool = config.model_config.get_multimodal_config().enable_mm_embeds
        # With a limit of 0 and embeddings allowed, embeddings are all that comes, in any number.
        self._layouts = {
            modality: _layout(config, processor, modality) if limit else None
            for modality, limit in self._info.allowed_mm_limits.items()
            if limit or self._takes_embeds
        }

    def check(self, features: Sequence[MultiModalFeature]) -> None:
        """Refuse what the model has no encoder for.

        :raises RequestError: if a modality, or a field of an item, is not what the model takes
        :raises ValueError: if there are more items of a modality than the engine allows
        """
        for modality, count in Counter(feature.modality for feature in features).items():
            if modality not in self._layouts:
                known = ", ".join(self._layouts) or "none"
                raise RequestError(f"features: there is one of modality {modality!r}; the engine takes {known}")
            if self._layouts[modality] is not None:
                self._info.validate_num_items(modality, count)
        for index, feature in enumerate(features):
            self._check_fields(f"features[{index}].fields", feature)

    def _check_fields(self, where: str, feature: MultiModalFeature) -> None:
        layout = self._layouts[feature.modality] or {}
        if not self._takes_embeds:
            # Others may be optional; these are what is encoded.
            encoded = [name for name, kind in layout.items() if kind.is_float and kind.dimensions > 1]
            missing = [name for name in encoded if name not in feature.fields]
            if missing:
                raise RequestError(
                    f"{where} lacks {', '.join(missing)}; the model's processor makes {', '.join(layout)}"
                )
        for name, field in feature.fields.items():
            expected, given = layout.get(name), _kind_of(field)
            if expected is not None and given is not None and given != expected:
                raise RequestError(f"{where}[{name!r}] is {given}; the model's processor makes {expected}")


class _Kind(NamedTuple):
    batching: Batching
    dimensions: int
    is_float: bool

    def __str__(self) -> str:
        numbers = "floats" if self.is_float else "integers"
        return f"{self.batching}, of {self.dimensions} dimensions and {numbers}"


def _kind_of(field: MultiModalField) -> _Kind | None:
    if not hasattr(field.data, "shape"):
        return None  # a list, of items whose shapes differ
    data = find("torch:as_tensor")(field.data)
    return _Kind(field.batching, data.dim(), data.is_floating_point())


def _layout(config: Any, processor: Any, modality: str) -> Mapping[str, _Kind]:
    """The fields of the example that vLLM has for measuring; none if there is no example."""
    try:
        if hasattr(processor, "get_dummy_mm_inputs"):
            example = processor.get_dummy_mm_inputs({modality: 1}, scheduler_config=config.scheduler_config)
        else:
            registry = find("vllm.multimodal:MULTIMODAL_REGISTRY")
            example = registry.get_dummy_mm_inputs(config.model_config, {modality: 1}, processor=processor)
        (feature,) = features_of(example)
    except Exception:
        return {}
    kinds = {name: _kind_of(field) for name, field in sorted(feature.fields.items())}
    return {name: kind for name, kind in kinds.items() if kind is not None}


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


def _item(feature: MultiModalFeature) -> Any:
    element = find("vllm.multimodal.inputs:MultiModalFieldElem")
    return find("vllm.multimodal.inputs:MultiModalKwargsItem")(
        {name: element(data=_tensors(name, field.data), field=_kind(field)) for name, field in feature.fields.items()}
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


def _tensors(name: str, data: Any) -> Any:
    if isinstance(data, list):
        return [_tensors(name, item) for item in cast("list[Any]", data)]
    if isinstance(data, int | float):
        return data
    try:
        return find("torch:as_tensor")(data)
    except (TypeError, RuntimeError, ValueError) as error:
        raise RequestError(f"the feature's field {name!r} cannot be made a tensor: {error}") from error


def _position(feature: MultiModalFeature) -> Any:
    mask = None if feature.is_embed is None else find("torch:as_tensor")(feature.is_embed)
    return find("vllm.multimodal.inputs:PlaceholderRange")(feature.offset, feature.length, mask)
