"""Noticing that a worker process of vLLM has died."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

_EXIT_CODE_LIMIT = 0.5


class WorkerDiedError(RuntimeError):
    """A worker process of the engine has died, and the engine with it."""


class WorkerWatch:
    """Waits in a thread for the death of a worker, which is the engine's, whether a step waits for it or nobody does.

    The other workers are killed then: they may wait for the dead one in a collective operation, and vLLM would give
    each some seconds to end in good order before it lets a step fail that waits for them.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._failed = threading.Event()
        self._lock = threading.Lock()  # nobody writes to a descriptor that is closed, or another's by then
        self._closing = False
        self._workers: Sequence[BaseProcess] = ()
        self._thread: threading.Thread | None = None
        # Readable: there is a failure. And: the thread is to end.
        self.fd: int
        self.fd, self._failure_end = os.pipe()
        self._stop, self._stop_end = os.pipe()

    def start(self, workers: Sequence[BaseProcess]) -> None:
        """Watch these processes, of which there may be none."""
        if workers:
            self._workers = workers
            self._thread = threading.Thread(target=self._watch, name="anyengine-workers", daemon=True)
            self._thread.start()

    def fail(self, failure: str) -> None:
        """Take note of a failure, the first of which counts. Any thread may call this."""
        with self._lock:
            if self.failure is None and not self._closing:
                self.failure = failure
                self._failed.set()
                os.write(self._failure_end, b"x")

    def fail_without_workers(self) -> None:
        """Take note that vLLM gives its executor up; if a worker process has died, the watch itself says which."""
        if self._thread is None:
            self.fail("vLLM's executor has failed")

    def check(self, limit: float = 0.0) -> None:
        """:raises WorkerDiedError: if a failure has been noted, or is within ``limit`` seconds"""
        if self._failed.wait(limit):
            raise WorkerDiedError(self.failure)

    def kill_workers(self) -> None:
        """End all of them."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.kill()

    def close(self) -> None:
        """End the watch, before the workers are ended in good order."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.close(self._stop_end)
        if self._thread is not None:
            self._thread.join()
        for fd in (self._stop, self.fd, self._failure_end):
            os.close(fd)

    def _watch(self) -> None:
        ended = wait([*(worker.sentinel for worker in self._workers), self._stop])
        if self._stop in ended:
            return
        dead = next(worker for worker in self._workers if worker.sentinel in ended)
        self.fail(f"worker {dead.name} (pid {dead.pid}) {_ending(dead)}")
        self.kill_workers()


def _ending(process: BaseProcess) -> str:
    # vLLM watches its workers too. Whoever asks first is told the exit status, and the other finds it a moment later.
    deadline = time.monotonic() + _EXIT_CODE_LIMIT
    while (code := process.exitcode) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    if code is None:
        return "has ended"
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"
