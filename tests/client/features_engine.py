"""An engine that answers each request with what it got of its multimodal features."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from tests.client.lane_engine import digest
from tests.client.options_engine import OptionsEngine

from anyengine.engine import EngineRequest, OutputDetails, ProgressReporter, StepOutputs, from_rows
from anyengine.errors import RequestRefusedError
from anyengine.multimodal import MultiModalFeature, MultiModalField


class FeaturesEngine(OptionsEngine):
    """Ends each request in its first step.

    :param libraries: what to load: torch, numpy, or nothing, as an engine without either
    :param keeps: whether requests are kept when they have ended
    """

    def __init__(self, libraries: str = "", options: Sequence[str] = ("features",), keeps: bool = False) -> None:
        super().__init__(options)
        self._keeps = keeps
        self._kept: list[EngineRequest] = []
        self._libraries = libraries

    def load(self, progress: ProgressReporter) -> None:
        for library in self._libraries.split():
            __import__(library)

    def add_request(self, request: EngineRequest) -> None:
        if any(feature.modality == "smell" for feature in request.features):
            raise RequestRefusedError("this model has no nose")
        super().add_request(request)

    def step(self) -> StepOutputs:
        requests, self._requests = self._requests, []
        if self._keeps:
            self._kept += requests
        return from_rows(
            (request.handle, array("I"), OutputDetails(finish_reason="stop", events=told(request.features)))
            for request in requests
        )


def told(features: Sequence[MultiModalFeature]) -> list[Any]:
    """All of features, the same on both sides of the wire."""
    return [
        {
            "name": [feature.modality, feature.identifier],
            "place": [feature.offset, feature.length, None if feature.is_embed is None else digest(feature.is_embed)],
            "fields": {
                name: [_told(field.data), field.batching, field.dim, field.keep_on_cpu]
                for name, field in feature.fields.items()
            },
        }
        for feature in features
    ]


def _told(data: Any) -> Any:
    if isinstance(data, list):
        return [_told(item) for item in data]
    return data if isinstance(data, int | float) else [list(data.shape), digest(data)]


def image(offset: int, length: int = 2, data: Any = 1.5, **more: Any) -> MultiModalFeature:
    """A feature with one field."""
    given = {"modality": "image", "identifier": f"image-{offset}", "fields": {"pixels": MultiModalField(data=data)}}
    return MultiModalFeature(**{**given, "offset": offset, "length": length, **more})
