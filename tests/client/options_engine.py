"""An engine that answers each request with what it was asked besides the prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from anyengine.engine import EngineCore, EngineRequest, OutputDetails, StepOutputs, from_rows
from anyengine.types import EngineInfo


class OptionsEngine(EngineCore):
    """Ends each request in its first step.

    :param options: the request options that it supports
    """

    def __init__(
        self,
        options: Sequence[str] = ("priority", "cache_salt", "lora"),
        tasks: Sequence[str] = ("generate", "embed"),
    ) -> None:
        self._options = options
        self._tasks = tasks
        self._requests: list[EngineRequest] = []

    def describe(self) -> EngineInfo:
        return EngineInfo(
            engine="options",
            version="1",
            max_model_len=100,
            supported_tasks=self._tasks,
            request_options=self._options,
        )

    def add_request(self, request: EngineRequest) -> None:
        self._requests.append(request)

    def abort_requests(self, handles: Sequence[int]) -> None:
        self._requests = [request for request in self._requests if request.handle not in handles]

    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> StepOutputs:
        requests, self._requests = self._requests, []
        return from_rows((request.handle, array("I"), _details(request)) for request in requests)


def _details(request: EngineRequest) -> OutputDetails:
    asked: list[Any] = [request.priority, request.cache_salt, None if request.lora is None else request.lora.lora_name]
    pooled = None
    if request.pooling is not None:
        assert request.prompt_token_ids is not None
        pooled = [list(request.prompt_token_ids), request.pooling.task, request.pooling.dimensions]
    return OutputDetails(finish_reason="stop", events=[asked], pooling_output=pooled)
