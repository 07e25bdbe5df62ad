"""The CPU threads of torch: how many the engine takes, and what it does when others take their cores."""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import resource
import time
from collections.abc import Callable
from types import TracebackType

from anyengine.engines.transformers.cores import FreeCores, usable_cores
from anyengine.engines.transformers.thread_policy import WINDOW, ThreadPolicy, Window, cores_lost
from anyengine.notices import warn

logger: logging.Logger = logging.getLogger("anyengine")

SETTINGS = (
    "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES",
    "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME", "KMP_LIBRARY", "KMP_AFFINITY", "KMP_HW_SUBSET",
    "MKL_NUM_THREADS", "MKL_DYNAMIC",
)  # fmt: skip
"""Environment variables by which a user decides how many threads there are, where they run, or how they wait."""


class WatchedSteps(contextlib.AbstractContextManager[None]):
    """Judges the steps, each of which is made in a ``with`` block of it, in windows of :data:`WINDOW` seconds.

    :param who: whose context switches count, as for ``getrusage``
    :param cpu_time: seconds of CPU time of the same
    """

    def __init__(self, who: int, cpu_time: Callable[[], float]) -> None:
        self._who = who
        self._cpu_time = cpu_time
        self._window = Window()
        self._begin = (0.0, 0.0, 0)

    def __enter__(self) -> None:
        self._begin = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        wall, cpu, switches = self._now()
        window = self._window
        window.wall += wall - self._begin[0]
        window.cpu += cpu - self._begin[1]
        window.switches += switches - self._begin[2]
        if window.wall >= WINDOW:
            self._window = Window()
            self._judge(window)

    def _now(self) -> tuple[float, float, int]:
        return time.perf_counter(), self._cpu_time(), resource.getrusage(self._who).ru_nivcsw

    @abc.abstractmethod
    def _judge(self, window: Window) -> None:
        """Take in what the steps of a window used."""


class AdaptedThreads(WatchedSteps):
    """The threads of a process that is the engine's own: fewer where others take their cores, more when those are free.

    Where somebody else changes their number, it is left alone from then on.

    :param limit: the greatest number of threads, which is also the first
    :param get: returns torch's number of threads
    :param change: sets it
    """

    def __init__(self, limit: int, get: Callable[[], int], change: Callable[[int], None]) -> None:
        super().__init__(resource.RUSAGE_SELF, time.process_time)
        self._policy = ThreadPolicy(limit)
        self._free = FreeCores()
        self._get = get
        self._change = change
        change(limit)

    def _judge(self, window: Window) -> None:
        before = self._policy.threads
        if self._get() != before:  # a worker's function or the model's own code has set it
            return
        self._policy.judge(window, self._free.look)
        now = self._policy.threads
        if now != before:
            self._change(now)
            self._free.look()  # what was free before says nothing about the time from now on
            why = "other processes use the cores" if now < before else "there are free cores"
            logger.info("the engine computes with %d threads in place of %d: %s", now, before, why)


class SharedThreads(WatchedSteps):
    """The threads of a process that is not the engine's alone: their number is not the engine's to change.

    Once the log says if the engine's own thread has to wait for a core.

    :param number: how many there are
    """

    def __init__(self, number: int) -> None:
        super().__init__(resource.RUSAGE_THREAD, time.thread_time)
        self._number = number
        self._told = False

    def _judge(self, window: Window) -> None:
        if not self._told and cores_lost(1, window):
            self._told = True
            warn(
                "others use the engine's cores, which slows down all of torch's %d threads, as they wait for each "
                "other: give the engine num_threads=1, or a process of its own, where it adapts",
                self._number,
            )


def settle_threads(
    num_threads: int | None, *, on_cpu: bool, owns_process: bool
) -> contextlib.AbstractContextManager[None]:
    """Settle the number of torch's threads, and return a context for each step.

    :param num_threads: the user's choice; None leaves it to the engine, unless the environment has one of
        :data:`SETTINGS`
    :param on_cpu: whether these threads compute the model
    :param owns_process: whether settings of the whole process are the engine's to change
    """
    import torch

    if num_threads is not None:
        torch.set_num_threads(num_threads)
        return contextlib.nullcontext()
    number = torch.get_num_threads()  # one for each physical core that the process's affinity allows
    if not on_cpu or number == 1 or any(name in os.environ for name in SETTINGS):
        return contextlib.nullcontext()
    if not owns_process:
        # Where the system has no figures of one thread, nothing is said.
        return SharedThreads(number) if hasattr(resource, "RUSAGE_THREAD") else contextlib.nullcontext()
    limit = min(number, usable_cores())
    if limit == 1:
        torch.set_num_threads(1)
        return contextlib.nullcontext()
    return AdaptedThreads(limit, torch.get_num_threads, torch.set_num_threads)
