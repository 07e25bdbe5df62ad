"""An engine that gives each request two rows in a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from anyengine.engine import EngineCore, EngineRequest, OutputDetails, StepOutputs
from anyengine.types import EngineInfo


class TwofoldEngine(EngineCore):
    """Counts up from each prompt by two tokens a step, and ends each request in a step of its own."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}
        self._next: dict[int, int] = {}

    def describe(self) -> EngineInfo:
        return EngineInfo(engine="twofold", version="1", max_model_len=1000)

    def add_request(self, request: EngineRequest) -> None:
        assert request.prompt_token_ids is not None
        self._left[request.handle] = request.sampling.max_tokens
        self._next[request.handle] = request.prompt_token_ids[-1] + 1

    def abort_requests(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._left.pop(handle, None)

    def has_work(self) -> bool:
        return bool(self._left)

    def step(self) -> StepOutputs:
        ended = [handle for handle, left in self._left.items() if left == 0]
        if ended:
            for handle in ended:
                del self._left[handle]
            finished = OutputDetails(finish_reason="length")
            return StepOutputs(ended, [], [0] * len(ended), dict.fromkeys(range(len(ended)), finished))
        handles, tokens = array("Q"), array("I")
        for offset in range(2):
            for handle in self._left:
                handles.append(handle)
                tokens.append(self._next[handle] + offset)
        for handle in self._left:
            self._left[handle] -= 2
            self._next[handle] += 2
        return StepOutputs(handles, tokens)
