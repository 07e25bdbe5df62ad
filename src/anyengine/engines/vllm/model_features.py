"""Which multimodal features a model takes: the limits of each modality, and what its own processor makes of an item."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, cast

from anyengine.engines.vllm.features import as_tensor, features_of
from anyengine.engines.vllm.installed import find
from anyengine.errors import RequestRefusedError
from anyengine.multimodal import Batching, MultiModalFeature, MultiModalField

logger: logging.Logger = logging.getLogger("anyengine")


class ModelFeatures:
    """What a model's encoders take.

    An encoder that is given something else raises in the middle of a step, and ends the engine. So each field is
    compared with that of vLLM's own example. What shapes and values mean only the model knows; who has features of its
    processor has them right.
    """

    def __init__(self, config: Any, processor: Any) -> None:
        self._info = processor.info
        self._takes_embeds: bool = config.model_config.get_multimodal_config().enable_mm_embeds
        self._embeds_width: int | None = getattr(self._info.data_parser, "expected_hidden_size", None)
        # With a limit of 0 and embeddings allowed, embeddings are all that comes, in any number.
        self._limits: Mapping[str, int] = {
            modality: limit for modality, limit in self._info.allowed_mm_limits.items() if limit or self._takes_embeds
        }
        self._layouts: Mapping[str, _Layout | None] = {
            modality: _layout(config, processor, modality) if limit else None
            for modality, limit in self._limits.items()
        }

    def fitted(self, features: Sequence[MultiModalFeature]) -> Sequence[MultiModalFeature]:
        """The features as the model takes them: a list of tensors is one tensor where its processor makes one.

        What would end the engine is refused, as far as that can be told.

        :raises RequestRefusedError: if there is no such modality, there are more items of it than the engine allows, or
            a field is not what the model takes
        """
        for modality, count in Counter(feature.modality for feature in features).items():
            if modality not in self._limits:
                known = ", ".join(self._limits) or "none"
                raise RequestRefusedError(f"features: there is one of modality {modality!r}; the engine takes {known}")
            if self._limits[modality]:
                try:
                    self._info.validate_num_items(modality, count)
                except (ValueError, find("vllm.exceptions:VLLMClientError")) as error:
                    raise RequestRefusedError(f"features: {error}") from error
        return [self._fitted(f"features[{index}]", feature) for index, feature in enumerate(features)]

    def _fitted(self, where: str, feature: MultiModalFeature) -> MultiModalFeature:
        layout, embeds = self._layouts[feature.modality], f"{feature.modality}_embeds"
        if self._takes_embeds and embeds in feature.fields:
            self._check_embeds(where, feature, embeds)
        elif not self._limits[feature.modality]:
            raise RequestRefusedError(
                f"{where}.fields lacks {embeds}: with a limit of 0 the engine takes embeddings only"
            )
        elif layout is not None:
            layout.check_names(f"{where}.fields", feature)
        if layout is not None:
            fields = {
                name: layout.fitted(f"{where}.fields[{name!r}]", name, field) for name, field in feature.fields.items()
            }
            if any(fields[name] is not field for name, field in feature.fields.items()):
                feature = dataclasses.replace(feature, fields=fields)
            _check_places(where, feature, layout.places_of(feature))
        return feature

    def _check_embeds(self, where: str, feature: MultiModalFeature, name: str) -> None:
        missing = sorted(self._needed_beside_embeds(feature.modality) - feature.fields.keys())
        if missing:
            raise RequestRefusedError(f"{where}.fields lacks {', '.join(missing)}, which the model needs beside {name}")
        data = feature.fields[name].data
        measured = _measured(data)
        if measured is None or measured[0] < 2 or measured[1] != "floats":
            raise RequestRefusedError(f"{where}.fields[{name!r}]: expected floats, of dimensions tokens x width")
        for width in _widths(data):
            if self._embeds_width not in (None, width):
                raise RequestRefusedError(
                    f"{where}.fields[{name!r}] is {width} wide; the model's embeddings are {self._embeds_width}"
                )
        if not isinstance(data, list) and measured[0] == 2:
            _check_places(where, feature, data.shape[0])

    def _needed_beside_embeds(self, modality: str) -> Set[str]:
        field_sets = getattr(self._info.data_parser, "embedding_field_sets", None)
        if field_sets is not None:
            required, _ = field_sets(modality)
            return required
        # Before 0.32 vLLM did not tell. The positions of such models are counted from the sizes of an item's grid.
        layout = self._layouts[modality]
        return {name for name in (() if layout is None else layout.kinds) if name.endswith("_grid_thw")}


class _Kind(NamedTuple):
    """What one field has in common with that of all other items."""

    batching: Batching
    dim: int | None
    keep_on_cpu: bool
    dimensions: int | None
    """None is a number of Python's. A list of tensors has one more than they have."""
    numbers: str

    def __str__(self) -> str:
        along = f" along dimension {self.dim}" if self.dim else ""
        place = ", kept on the CPU" if self.keep_on_cpu else ""
        content = "a number" if self.dimensions is None else f"of {self.dimensions} dimensions and {self.numbers}"
        return f"{self.batching}{along}, {content}{place}"


class _Layout(NamedTuple):
    """The example that vLLM has of one modality for measuring; of floats only the shapes."""

    kinds: Mapping[str, _Kind]
    data: Mapping[str, Any]
    places: int

    def check_names(self, where: str, feature: MultiModalFeature) -> None:
        made = f"the model's processor makes {', '.join(self.kinds)}"
        if missing := [name for name in self.kinds if name not in feature.fields]:
            raise RequestRefusedError(f"{where} lacks {', '.join(missing)}; {made}")
        if unknown := [name for name in feature.fields if name not in self.kinds]:
            raise RequestRefusedError(f"{where} has {', '.join(unknown)}; {made}")

    def fitted(self, where: str, name: str, field: MultiModalField) -> MultiModalField:
        expected = self.kinds.get(name)
        if expected is None:
            return field  # beside embeddings
        given = _kind_of(field)
        if given is None:
            raise RequestRefusedError(
                f"{where}: expected a tensor, or a list of tensors that are alike; the model's processor makes "
                f"{expected}"
            )
        if given != expected:
            raise RequestRefusedError(f"{where} is {given}; the model's processor makes {expected}")
        data: Any = field.data
        if not isinstance(data, list):
            return field
        # vLLM has lists of what differs in shape. Of what does not it makes tensors, and some models count on that.
        if not isinstance(self.data[name], list):
            data = _stacked(data)
        if isinstance(data, list) and field.batching == "flat" and field.dim:
            raise RequestRefusedError(f"{where} is a list; vLLM joins lists along dimension 0 only, not {field.dim}")
        return field if data is field.data else dataclasses.replace(field, data=data)

    def places_of(self, feature: MultiModalFeature) -> int | None:
        """Of how many tokens the encoder's output takes the place; None if only the model knows.

        That depends on shapes and on integers, as sizes and masks. Where both are the example's, it is as many.
        """
        if feature.fields.keys() != self.data.keys():
            return None
        alike = all(_is_alike(field.data, self.data[name]) for name, field in feature.fields.items())
        return self.places if alike else None


def _layout(config: Any, processor: Any, modality: str) -> _Layout | None:
    try:
        if hasattr(processor, "get_dummy_mm_inputs"):
            example = processor.get_dummy_mm_inputs({modality: 1}, scheduler_config=config.scheduler_config)
        else:
            registry = find("vllm.multimodal:MULTIMODAL_REGISTRY")
            example = registry.get_dummy_mm_inputs(config.model_config, {modality: 1}, processor=processor)
        (feature,) = (feature for feature in features_of(example) if feature.modality == modality)
        kinds = {name: _kind_of(field) for name, field in sorted(feature.fields.items())}
        if unclear := [name for name, kind in kinds.items() if kind is None]:
            raise TypeError(f"{', '.join(unclear)}: a list of what is not alike")
    except Exception as error:  # a processor is a model's own code
        logger.warning(
            "vLLM has no example of modality %r for this model (%s: %s): the fields of its features are not checked, "
            "and one that the model cannot take ends the engine",
            modality, type(error).__name__, error,
        )  # fmt: skip
        return None
    data = {name: _without_floats(field.data) for name, field in feature.fields.items()}
    return _Layout(cast("Mapping[str, _Kind]", kinds), data, _places(feature))


def _kind_of(field: MultiModalField) -> _Kind | None:
    """None if the field is a list of nothing, of numbers, or of what is not alike."""
    dim = field.dim if field.batching == "flat" else None
    if isinstance(field.data, int | float):
        return _Kind(field.batching, dim, field.keep_on_cpu, None, "numbers")
    measured = _measured(field.data)
    return None if measured is None else _Kind(field.batching, dim, field.keep_on_cpu, *measured)


def _measured(data: Any) -> tuple[int, str] | None:
    """The dimensions of a tensor, or of tensors in lists, and which numbers it holds."""
    if isinstance(data, list):
        kinds = {_measured(item) for item in cast("list[Any]", data)}
        kind = kinds.pop() if len(kinds) == 1 else None
        return None if kind is None else (kind[0] + 1, kind[1])
    if isinstance(data, int | float):
        return None
    tensor = as_tensor(data)
    numbers = "floats" if tensor.is_floating_point() else "complex numbers" if tensor.is_complex() else "integers"
    return tensor.dim(), numbers


def _widths(data: Any) -> set[int]:
    """The last dimensions of a tensor, or of tensors in lists."""
    if isinstance(data, list):
        return {width for item in cast("list[Any]", data) for width in _widths(item)}
    return {data.shape[-1]}


def _stacked(data: Any) -> Any:
    if not isinstance(data, list):
        return as_tensor(data)
    items = [_stacked(item) for item in cast("list[Any]", data)]
    shapes = {None if isinstance(item, list) else tuple(item.shape) for item in items}
    return items if None in shapes or len(shapes) > 1 else find("torch:stack")(items)


def _without_floats(data: Any) -> Any:
    if isinstance(data, list):
        return [_without_floats(item) for item in cast("list[Any]", data)]
    if isinstance(data, int | float):
        return data
    return data.to("meta") if data.is_floating_point() else data


def _is_alike(data: Any, example: Any) -> bool:
    """Whether it has the shapes and the integers of what :func:`_without_floats` made."""
    if isinstance(data, list) or isinstance(example, list):
        if not (isinstance(data, list) and isinstance(example, list)):
            return False
        items, others = cast("list[Any]", data), cast("list[Any]", example)
        return len(items) == len(others) and all(map(_is_alike, items, others))
    if isinstance(example, int | float):
        return data == example
    tensor = as_tensor(data)
    if tensor.shape != example.shape:
        return False
    return example.is_floating_point() or find("torch:equal")(tensor.to(example.dtype), example)


def _places(feature: MultiModalFeature) -> int:
    return feature.length if feature.is_embed is None else int(as_tensor(feature.is_embed).sum())


def _check_places(where: str, feature: MultiModalFeature, expected: int | None) -> None:
    if expected is not None and (given := _places(feature)) != expected:
        raise RequestRefusedError(
            f"{where} has places for {given} embeddings, by its length and is_embed; the model makes {expected} of it"
        )
