"""An engine that says whether it was told, before it was loaded, that it has its process to itself."""

from __future__ import annotations

from tests.engine_control.plain_engine import PlainEngine

from anyengine.engine import ProgressReporter, utility


class OwningEngine(PlainEngine):
    """A plain engine with one utility."""

    def load(self, progress: ProgressReporter) -> None:
        self._owned = self.owns_process

    @utility
    def owned(self) -> bool:
        return self._owned
