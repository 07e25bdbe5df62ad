"""An engine that has two batches under way at a time, as with pipeline parallelism, which the CPU does not have."""

from __future__ import annotations

from collections import deque

from anyengine.engine import ProgressReporter, utility
from anyengine.engines.vllm import VllmEngine


class QueuedEngine(VllmEngine):
    """Its core is told so after it has been loaded."""

    def load(self, progress: ProgressReporter) -> None:
        super().load(progress)
        core = self._vllm.core
        assert core.batch_queue is None
        core.batch_queue, core.batch_queue_size = deque(maxlen=2), 2
        core.step_fn = core.step_with_batch_queue
        self._under_way: list[tuple[int, int]] = []

    def quiesce(self) -> None:
        before = len(self._vllm.core.batch_queue)
        super().quiesce()
        self._under_way.append((before, len(self._vllm.core.batch_queue)))

    @utility
    def under_way(self) -> list[tuple[int, int]]:
        """The batches that were under way before and after each pause began."""
        return self._under_way
