"""The engines that are measured behind anyengine: the scripted engine with a brake, and one that takes embeddings."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

from anyengine.engine import Deferred, EngineRequest, ProgressReporter, utility
from anyengine.engines.scripted import ScriptedEngine
from anyengine.protocol.arrays import WireArray
from anyengine.types import EngineInfo


class HeldEngine(ScriptedEngine):
    """A scripted engine that can be held while requests are sent, so that all of them start with the same step."""

    _held = False

    def has_work(self) -> bool:
        """Never while it is held."""
        return not self._held and super().has_work()

    @utility
    def hold(self) -> None:
        """Make no steps for now."""
        self._held = True

    @utility
    def release(self) -> None:
        """Make steps again."""
        self._held = False

    @utility
    def never(self) -> Deferred:
        """An answer that does not come."""
        return Deferred()


class EmbedsEngine(HeldEngine):
    """Takes prompts as embeddings and counts up from the last element, read as a number."""

    def load(self, progress: ProgressReporter) -> None:
        """Load numpy, so that arrays arrive as arrays."""
        import numpy  # noqa: F401

        super().load(progress)

    def describe(self) -> EngineInfo:
        """As the scripted engine, with embeddings."""
        return dataclasses.replace(super().describe(), prompt_embeds=True)

    def add_request(self, request: EngineRequest) -> None:
        """Take a request with embeddings of shape [tokens, hidden size]."""
        if request.prompt_embeds is not None:
            embeds = request.prompt_embeds
            if isinstance(embeds, WireArray):  # of torch, which is not loaded here
                embeds = embeds.to_numpy()
            last = int(embeds[-1, -1])
            request = dataclasses.replace(request, prompt_token_ids=array("I", [last]), prompt_embeds=None)
        super().add_request(request)

    @utility
    def take(self, value: Any) -> None:
        """Do nothing with it."""
