"""An engine in a thread of this process: the same loop and the same messages, over ``inproc://``.

ZeroMQ hands a peer in the same process the frames themselves. So messages are copied, and large tensors go by the lane,
as they do to a process: what the engine keeps, or writes to, is its own.

It starts at once and shares this process's memory and devices, which has its price: a native crash takes this process
along, its Python code and the application's take turns, and a step that hangs can be neither interrupted nor killed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import anyio
import zmq

from anyengine import forks
from anyengine.engine.failures import describe_failure
from anyengine.engine.proc import EngineCoreProc
from anyengine.errors import CrashReport, Phase
from anyengine.process.lane import Lane, open_lane
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.thread_limits import none_left


class EngineThread:
    """A running thread. Its end closes a pipe, which wakes whoever waits, on any event loop."""

    output: None = None
    shares_memory: bool = True
    can_be_killed: bool = False
    outlives_close: bool = True
    sends_at_once: bool = True

    def __init__(self, bootstrap: Bootstrap, context: zmq.Context[Any]) -> None:
        self.pid: int = os.getpid()
        self.lane: Lane | None = None
        self._failure: tuple[str, str, str] | None = None
        self._watched = False
        with contextlib.ExitStack() as kept:
            self._reader, self._writer = os.pipe()
            kept.callback(os.close, self._reader)
            kept.callback(os.close, self._writer)
            if sys.platform == "linux":
                self.lane, lane_end = open_lane()
                if self.lane is not None and lane_end is not None:
                    kept.callback(self.lane.close)
                    lane_fd = lane_end.detach()
                    kept.callback(os.close, lane_fd)
                    bootstrap = bootstrap._replace(lane=lane_fd)
            # A daemon, so that an engine which hangs does not keep the program from ending.
            self._thread = threading.Thread(
                target=self._run, args=(bootstrap, context), name=f"anyengine-{bootstrap.rank}", daemon=True
            )
            # The writing end too: in a fork it would keep the end of the thread from being seen.
            for end in (self._reader, self._writer):
                forks.watch(end)
                kept.callback(forks.unwatch, end)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads: for the caller the same as no more processes
                raise none_left("a thread for the engine") from error
            kept.pop_all()

    def _run(self, bootstrap: Bootstrap, context: zmq.Context[Any]) -> None:
        try:
            proc = EngineCoreProc(bootstrap, context, alone=False)
            try:
                proc.run()
            except zmq.ContextTerminated:
                pass  # the client has left, and did not wait any longer for this thread
            except BaseException as error:  # sys.exit() in an engine ends the engine, as it does in a process
                self._failure = describe_failure(error)
                with contextlib.suppress(zmq.ContextTerminated):
                    proc.announce_death(error)
            finally:
                proc.close()
        finally:
            forks.unwatch(self._writer)
            os.close(self._writer)

    async def wait(self) -> None:
        """Return when the thread has left the engine's loop."""
        self._watched = True
        try:
            await anyio.wait_readable(self._reader)
        finally:
            self._watched = False
        self._thread.join()  # it has nothing left to do

    def has_ended(self) -> bool:
        """Whether the thread is over."""
        return not self._thread.is_alive()

    def terminate(self) -> None:
        """Nothing reaches a thread that does not read its messages."""

    def kill(self) -> None:
        """Nothing ends a thread."""

    def reap(self) -> None:
        """There is no status to take."""

    def is_gone(self, limit: float) -> bool:
        """Wait up to ``limit`` seconds for its end; blocking, for a worker thread."""
        self._thread.join(limit)
        return self.has_ended()

    def report(self, *, rank: int, phase: Phase, reason: str | None) -> CrashReport:
        """What the thread raised, if it did."""
        kind, message, traceback = self._failure or (None, None, None)
        return CrashReport(
            rank=rank,
            pid=None,
            phase=phase,
            exit_code=0 if self._failure is None and self.has_ended() else None,
            exception_type=kind,
            exception_message=message,
            traceback=traceback,
            reason=reason,
        )

    def close(self) -> None:
        """Let go of this side's ends of the pipe and the lane; the thread closes the others."""
        if self._reader < 0:
            return
        if self.lane is not None:
            self.lane.close()
        if self._watched:
            anyio.notify_closing(self._reader)
        forks.unwatch(self._reader)
        os.close(self._reader)
        self._reader = -1


class ThreadLauncher:
    """Starts engines in threads; ``context`` is the one in which the client's sockets are."""

    description: str = "a thread"

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context

    def start(self, bootstrap: Bootstrap) -> EngineThread:
        """Start one.

        :raises OSError: if there can be no more threads
        """
        return EngineThread(bootstrap, self._context)
