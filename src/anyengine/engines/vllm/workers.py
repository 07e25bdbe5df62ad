"""Noticing that a worker process of vLLM has died."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

_EXIT_CODE_LIMIT = 0.5

_LAST_LOOK = 0.02
"""Seconds for a death that vLLM has noticed by another pipe to be seen here; to end in good order takes longer."""

_ADDED, _ENDING = b"a", b"e"


class WorkerDiedError(RuntimeError):
    """A worker process of the engine has died, or raised before it was ready, and the engine ends with it."""


class WorkerWatch:
    """Waits in a thread for the death of a worker, which is the engine's, whether a step waits for it or nobody does.

    Each is watched from its first moment, so that a death while the engine loads is told by name too.

    The other workers are killed then: they may wait for the dead one in a collective operation, and vLLM would give
    each some seconds to end in good order before it lets a step fail that waits for them.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._failed = threading.Event()
        self._lock = threading.Lock()  # nobody writes to a descriptor that is closed, or another's by then
        self._closing = False
        self._workers: list[BaseProcess] = []
        self._starting: dict[Connection, BaseProcess] = {}
        self._thread: threading.Thread | None = None
        # Readable: there is a failure. And: there is another worker, or vLLM is to end them, or the watch is to end.
        self.fd: int
        self.fd, self._failure_end = os.pipe()
        self._change, self._change_end = os.pipe()

    def add(self, worker: BaseProcess, starting: Connection) -> None:
        """Watch a process from now on.

        :param starting: the pipe on which it says what it raises while it starts, as from ``spawned_workers``; closed
            here
        """
        self._workers.append(worker)
        self._starting[starting] = worker
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="anyengine-workers", daemon=True)
            self._thread.start()
        else:
            os.write(self._change_end, _ADDED)

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

    def death(self, limit: float) -> str | None:
        """The failure of a worker process, if one has been noted, or is within ``limit`` seconds."""
        if self._thread is None:
            return None
        self._failed.wait(limit if self._thread.is_alive() else 0.0)
        return self.failure

    def workers_end(self) -> None:
        """Look for deaths a last time: whatever ends from now on is ended by vLLM, for a reason of its own.

        Any thread may call this.
        """
        with self._lock:
            if self._thread is None or self._closing:
                return
            os.write(self._change_end, _ENDING)
        self._thread.join()

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
            os.close(self._change_end)
        if self._thread is not None:
            self._thread.join()
        for starting in self._starting:
            starting.close()
        for fd in (self._change, self.fd, self._failure_end):
            os.close(fd)

    def _watch(self) -> None:
        deadline: float | None = None
        while True:
            starting, workers = list(self._starting), list(self._workers)
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([*starting, *(worker.sentinel for worker in workers), self._change], timeout)
            change = os.read(self._change, 1) if self._change in ready else None
            if change == b"" or not ready:
                return
            # What a worker has raised is said before it ends for it, and is the better reason.
            for pipe in starting:
                if pipe in ready:
                    self._take_reason(pipe)
            for worker in workers:
                if worker.sentinel in ready:
                    self.fail(f"{_name(worker)} {_ending(worker)}")
                    self.kill_workers()
                    return
            if change == _ENDING:
                deadline = time.monotonic() + _LAST_LOOK

    def _take_reason(self, pipe: Connection) -> None:
        worker = self._starting.pop(pipe)
        with pipe:
            try:
                reason = pipe.recv_bytes().decode()
            except (EOFError, OSError):
                return  # it is ready, or is no more
        # It is not killed for that: it has yet to print where it was raised.
        self.fail(f"{_name(worker)} raised {reason}")


def _name(worker: BaseProcess) -> str:
    return f"worker {worker.name} (pid {worker.pid})"


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
