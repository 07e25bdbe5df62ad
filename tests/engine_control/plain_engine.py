"""An engine with nothing that an engine need not have."""

from __future__ import annotations

from collections.abc import Sequence

from anyengine.engine import EngineCore, EngineRequest, StepOutputs
from anyengine.types import EngineInfo


class PlainEngine(EngineCore):
    """Only what an engine must have."""

    def __init__(self) -> None:
        self.requests: list[int] = []

    def describe(self) -> EngineInfo:
        return EngineInfo(engine="plain", version="1", max_model_len=100, supported_tasks=("embed", "score"))

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request.handle)

    def abort_requests(self, handles: Sequence[int]) -> None:
        self.requests = [handle for handle in self.requests if handle not in handles]

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> StepOutputs | None:
        return StepOutputs(self.requests, [1] * len(self.requests))
