"""One engine's process: waiting for its end, signalling it and its group, and reading what it left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time

import anyio

from anyengine import forks
from anyengine.errors import CrashReport, Phase, ProtocolError
from anyengine.excerpts import MESSAGE_LIMIT, NAME_LIMIT, excerpt, trace_excerpt
from anyengine.notices import warn
from anyengine.process.lane import Lane
from anyengine.process.lifelines import close_lifeline
from anyengine.process.output import AnonymousFile, ChildOutput
from anyengine.process.remains import has_members, take_group, take_orphans
from anyengine.process.threads import run_in_thread
from anyengine.protocol import cbor
from anyengine.protocol.checks import expect_array, expect_type

REAP_LIMIT = 0.5
"""Seconds to wait for a process that was killed: one that the kernel holds cannot be waited for."""


FIRST_LOOK = 0.0002
LONGEST_LOOK = 0.025
"""Seconds between the first two looks, and any two, for the exit status of a process whose pidfd says that it ended."""


class EngineProcess:
    """A running child. Its end is known from the pidfd, then believed from its exit status.

    Where a sandbox refuses pidfds, a thread waits for the exit status.

    :param mark: what this engine's descendants have in their environment, see :mod:`anyengine.process.remains`
    """

    shares_memory: bool = False
    can_be_killed: bool = True
    outlives_close: bool = False
    sends_at_once: bool = False

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        lifeline: int,
        exception: AnonymousFile,
        native: AnonymousFile,
        output: ChildOutput,
        lane: Lane | None,
        mark: str,
    ) -> None:
        self.pid: int = child.pid
        self.output = output
        self.lane = lane
        self._child = child
        self._mark = mark
        self._lifeline: int | None = lifeline
        self._exception = exception
        self._native = native
        self._pidfd = _open_pidfd(child.pid)
        if self._pidfd is not None:
            forks.watch(self._pidfd)
        self._status_taken = False
        self._reaped = False
        self._watched = False
        self._closed = False

    async def wait(self) -> None:
        """Return when the process has ended. On Linux it is not reaped then, so its group can still be named."""
        if self._pidfd is not None:
            with contextlib.suppress(OSError):  # the system gives them, and cannot wait for them
                await self._wait_by_pidfd(self._pidfd)
        if not self.has_ended():
            with contextlib.suppress(OSError):  # there is no thread to be had, either
                await run_in_thread(self._wait_in_thread, name="wait", abandon_on_cancel=True)
        while not self.has_ended():  # noqa: ASYNC110 - then nothing tells of it
            await anyio.sleep(LONGEST_LOOK)

    async def _wait_by_pidfd(self, pidfd: int) -> None:
        self._watched = True
        pause = FIRST_LOOK
        try:
            await anyio.wait_readable(pidfd)
            while not self.has_ended():
                # The status follows at once, as a rule. Where it does not (a debugger holds the process, a sandbox has
                # descriptors that are always readable), waiting for the descriptor alone would take a whole core.
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_LOOK)
                await anyio.wait_readable(pidfd)
        finally:
            self._watched = False

    def _wait_in_thread(self) -> None:
        if sys.platform == "linux":
            try:
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:  # somebody else has taken the status
                return
            except OSError:  # a sandbox refuses the call
                pass
            else:
                return
        self._child.wait()

    def has_ended(self) -> bool:
        """Whether there is an exit status. Readiness of a descriptor alone is not believed."""
        if self._child.returncode is not None or self._status_taken:
            return True
        if sys.platform != "linux":
            return self._child.poll() is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            # Somebody else waits for all children of this process (a PID 1, a SIGCHLD that is ignored).
            self._status_taken = True
            return True
        except OSError:  # a sandbox refuses it; then looking takes the status, too
            return self._child.poll() is not None

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM), if the system lets us."""
        if not self.has_ended():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process and all of its group (SIGKILL); does nothing after :meth:`reap`."""
        if self._reaped:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except OSError:
            # It is another user's, or a sandbox refuses the call: the lifeline's end kills all the same. macOS says so
            # of a group in which nobody is left.
            self._cut_lifeline()

    def reap(self) -> None:
        """Take the exit status, after :meth:`wait` or :meth:`kill`; blocks for the moment that a kill takes."""
        try:
            self._child.wait(timeout=REAP_LIMIT)
        except subprocess.TimeoutExpired:
            warn("process %d outlives SIGKILL for %s s; it is left behind", self.pid, REAP_LIMIT)
        self._reaped = True

    def is_gone(self, limit: float) -> bool:
        """Wait up to ``limit`` seconds for the killed group to be gone; blocking, for a worker thread.

        What this process has become the parent of stays no zombie.
        """
        deadline = time.monotonic() + limit
        while (is_left := has_members(self.pid)) and time.monotonic() < deadline:
            if self._is_reaped:
                take_group(self.pid)
            time.sleep(0.002)
        self._take_orphans()
        return not is_left

    @property
    def _is_reaped(self) -> bool:
        """Whether statuses of the engine's session are those of orphans, and not the one of its own process."""
        return self._child.returncode is not None

    def _take_orphans(self) -> None:
        if self._is_reaped:
            take_orphans(self.pid, self._mark)

    def _cut_lifeline(self) -> None:
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            close_lifeline(lifeline)

    def report(self, *, rank: int, phase: Phase, reason: str | None) -> CrashReport:
        """What is known about the end of the process, after :meth:`reap`."""
        returncode = None if self._status_taken else self._child.returncode
        report = CrashReport(
            rank=rank,
            pid=self.pid,
            phase=phase,
            exit_code=returncode if returncode is not None and returncode >= 0 else None,
            signal=-returncode if returncode is not None and returncode < 0 else None,
            native_stack=trace_excerpt(self._native.read_from(0).decode(errors="replace")) or None,
            stderr_tail=self.output.tail(),
            reason=reason,
        )
        return self._with_exception(report)

    def _with_exception(self, report: CrashReport) -> CrashReport:
        record = self._exception.read_from(0)
        if not record:
            return report
        try:
            kind, message, traceback = expect_array("the exception record", cbor.decode_plain(record), 3)
            for text in (kind, message, traceback):
                expect_type("exception record", text, str)
        except ProtocolError:
            return report  # the process was killed while it wrote
        return dataclasses.replace(
            report,
            exception_type=excerpt(kind, NAME_LIMIT),
            exception_message=excerpt(message, MESSAGE_LIMIT),
            traceback=trace_excerpt(traceback),
        )

    def close(self) -> None:
        """Let go of all descriptors, after :meth:`reap`. What still lives of the group, the lifeline's end kills."""
        if self._closed:
            return
        self._closed = True
        self._cut_lifeline()
        self._take_orphans()
        if self.lane is not None:
            self.lane.close()
        for file in (self._exception, self._native, self.output):
            file.close()
        if self._pidfd is not None:
            if self._watched:
                anyio.notify_closing(self._pidfd)
            forks.unwatch(self._pidfd)
            os.close(self._pidfd)


def _open_pidfd(pid: int) -> int | None:
    """A pidfd; None where the system has none, or a sandbox refuses it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None
