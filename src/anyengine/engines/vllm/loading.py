"""Signs of life while vLLM loads, which may block this process's thread for minutes."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from anyengine.engine.core import ProgressReporter
from anyengine.engines.vllm.spawning import spawned_workers
from anyengine.engines.vllm.workers import WorkerWatch

_INTERVAL = 1.0
"""Seconds between two signs of life."""

_STAGES = {
    "_init_executor": "loading weights",
    "determine_available_memory": "measuring memory",
    "initialize_from_config": "allocating KV cache",
    "compile_or_warm_up_model": "warming up",
}
"""What an executor of vLLM is asked to do while an engine core is built, in this order, and what that is."""


class LoadProgress:
    """Reports the stage that loading has come to when it changes, as done when the next one comes, and every second.

    A thread repeats it, because vLLM holds up the thread that loads; the two never report at once.

    :param watch: what watches the worker processes that the executor starts
    """

    def __init__(self, progress: ProgressReporter, watch: WorkerWatch) -> None:
        self.watch: WorkerWatch = watch
        self._progress = progress
        self._stage: str | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="anyengine-loading", daemon=True)

    def __enter__(self) -> LoadProgress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is None:
            self._finish()

    def stage(self, stage: str, fraction: float | None = None) -> None:
        """Report a stage and how much of it is done; also a ``ProgressReporter`` itself."""
        with self._lock:
            if stage != self._stage:
                self._finish()
            self._stage = stage
            self._progress(stage, fraction)

    def _finish(self) -> None:
        if self._stage is not None:
            self._progress(self._stage, 1.0)

    def _repeat(self) -> None:
        while not self._ended.wait(_INTERVAL):
            with self._lock:
                if self._stage is not None:
                    self._progress(self._stage, None)


def with_stages(executor_class: Any, progress: LoadProgress) -> Any:
    """The class of an executor that says what it does before it does it, and tells of its workers."""

    def telling(name: str, stage: str) -> Any:
        method = getattr(executor_class, name)

        def tell(self: Any, *args: Any, **kwargs: Any) -> Any:
            progress.stage(stage)
            with spawned_workers(progress.watch):
                return method(self, *args, **kwargs)

        return tell

    methods = {name: telling(name, stage) for name, stage in _STAGES.items() if hasattr(executor_class, name)}
    return type(executor_class.__name__, (executor_class,), methods)
