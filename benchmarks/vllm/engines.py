"""The engine that is measured behind anyengine: as the one behind vLLM's process, it counts, waits and stamps."""

from __future__ import annotations

from anyengine.engine import ProgressReporter
from benchmarks.engines import EmbedsEngine


class TorchEngine(EmbedsEngine):
    """Takes embeddings as torch tensors, as vLLM does."""

    def load(self, progress: ProgressReporter) -> None:
        """Load torch, so that tensors arrive as tensors."""
        import torch  # noqa: F401

        super().load(progress)
