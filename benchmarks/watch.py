"""What a stretch of code costs its process, and how long it kept the event loop from everybody else."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskStatus

SAMPLE_EVERY = 0.001
"""Seconds between two looks at the event loop."""


class Watch:
    """Measures a block: ``seconds`` on the clock, ``cpu`` seconds of this process, ``engine_cpu`` of the engine's.

    ``late`` is the longest time in seconds by which a task that sleeps for :data:`SAMPLE_EVERY` woke up late, and
    ``pause`` the longest such time in which the event loop's thread was computing.

    :param looks: whether that is measured; it costs some 30 us of CPU a millisecond
    """

    seconds = 0.0
    cpu = 0.0
    engine_cpu = 0.0
    late = 0.0
    pause = 0.0

    def __init__(self, engine_pid: int, *, looks: bool = True) -> None:
        self._engine_pid = engine_pid
        self._looks = looks

    async def __aenter__(self) -> Self:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        if self._looks:
            await self._group.start(self._sample)
        gc.collect()
        await anyio.sleep(2 * SAMPLE_EVERY)
        self.late = self.pause = 0.0
        self._engine_cpu_at_start = cpu_seconds(self._engine_pid)
        self._cpu_at_start = time.process_time()
        self._started = time.perf_counter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self.seconds = time.perf_counter() - self._started
        self.cpu = time.process_time() - self._cpu_at_start
        self.engine_cpu = cpu_seconds(self._engine_pid) - self._engine_cpu_at_start
        if self._looks:
            self._look()
        self._group.cancel_scope.cancel()
        return await self._group.__aexit__(kind, error, traceback)

    async def _sample(self, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        while True:
            self._due = time.perf_counter() + SAMPLE_EVERY
            self._cpu_when_set = time.thread_time()
            await anyio.sleep(SAMPLE_EVERY)
            self._look()

    def _look(self) -> None:
        late = time.perf_counter() - self._due
        # A thread that waits for a processor is late too; only what this thread itself computed has held its loop.
        self.late = max(self.late, late)
        self.pause = max(self.pause, min(late, time.thread_time() - self._cpu_when_set))

    def figures(self, outputs: int) -> dict[str, float]:
        """The block's figures, ``outputs`` being the number of rows it brought."""
        return {
            "outputs_per_s": outputs / self.seconds,
            "cpu_us_per_output": self.cpu / outputs * 1e6,
            "engine_cpu_us_per_output": self.engine_cpu / outputs * 1e6,
            "pause_ms": self.pause * 1e3,
        }

    def pauses(self) -> dict[str, float]:
        """The loop's longest pause, and by how much a timer of it was late at most."""
        return {"pause_ms": self.pause * 1e3, "late_ms": self.late * 1e3}


def cpu_seconds(pid: int) -> float:
    """CPU time of all living threads of a process, to the nanosecond."""
    total = 0
    for statistics in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # that thread ends
            total += int(statistics.read_text().split()[0])
    return total / 1e9
