"""The engine that is measured behind anyengine: as the one behind vLLM's process, it counts, waits and stamps."""

from __future__ import annotations

import time

from anyengine.engine import ProgressReporter, StepOutputs, utility
from benchmarks.engines import EmbedsEngine, HeldEngine
from benchmarks.vllm.stamps import stamp, wait_until


class PacedEngine(HeldEngine):
    """A scripted engine that can make a step every so many seconds; the first token of each is then a stamp."""

    _interval = 0.0
    _due = 0.0

    def step(self) -> StepOutputs | None:
        """One token for every request."""
        if not self._interval:
            return super().step()
        wait_until(self._due)
        self._due += self._interval
        outputs = super().step()
        assert outputs is not None
        outputs.token_ids[0] = stamp()  # type: ignore[index] - a column of the scripted engine is an array
        if not self.has_work():
            self._interval = 0.0
        return outputs

    @utility
    def release(self, interval: float = 0.0) -> None:
        """Make steps again, one every ``interval`` seconds, or as fast as they come."""
        super().release()
        self._interval = interval
        self._due = time.monotonic() + interval


class TorchEngine(EmbedsEngine, PacedEngine):
    """Takes embeddings as torch tensors, as vLLM does."""

    def load(self, progress: ProgressReporter) -> None:
        """Load torch, so that tensors arrive as tensors."""
        import torch  # noqa: F401

        super().load(progress)
