"""The engines that are measured behind anyengine: the scripted engine with a brake, and one that takes embeddings."""

from __future__ import annotations

import dataclasses
import time
from array import array
from typing import Any

from anyengine.engine import Deferred, EngineRequest, ProgressReporter, StepOutputs, utility
from anyengine.engines.scripted import ScriptedEngine
from anyengine.protocol.arrays import WireArray
from anyengine.types import EngineInfo
from benchmarks.stamps import stamp, wait_until

_HELD_STEP = 0.0002
"""Seconds of a step in which an engine that is held does nothing: it leaves the processor to whoever sends."""


class HeldEngine(ScriptedEngine):
    """A scripted engine that can be held while requests are sent, so that all of them start with the same step."""

    _held = False

    def step(self) -> StepOutputs | None:
        """Nothing while it is held."""
        if self._held:
            time.sleep(_HELD_STEP)
            return None
        return super().step()

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


class PacedEngine(HeldEngine):
    """One that can make a step every so many seconds, with a stamp as the first token of each."""

    _interval = 0.0
    _stamped = False
    _due = 0.0

    def step(self) -> StepOutputs | None:
        """One token for every request."""
        if not self._interval:
            return super().step()
        wait_until(self._due)
        self._due += self._interval
        outputs = super().step()
        assert outputs is not None
        if self._stamped:
            outputs.token_ids[0] = stamp()  # type: ignore[index] - a column of the scripted engine is an array
        if not self.has_work():
            self._interval = 0.0
        return outputs

    @utility
    def release(self, interval: float = 0.0, stamped: bool = True) -> None:
        """Make steps again, one every ``interval`` seconds, or as fast as they come."""
        super().release()
        self._interval, self._stamped = interval, stamped
        self._due = time.monotonic() + interval


class EmbedsEngine(PacedEngine):
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
