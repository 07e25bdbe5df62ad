"""Passing on what an engine prints to this process's stderr, which nobody may be reading."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import anyio

from anyengine.process.host import HostOutput
from anyengine.process.threads import ThreadCall
from anyengine.streams import write_stderr

FLUSH_LIMIT = 0.5
"""Seconds that an engine's last words may take to reach a terminal that does not read."""

STUCK = 0.5
"""Seconds after which a reader that has taken nothing does not get everything any more."""

MOST_UNREAD = 64 * 1024 * 1024
"""Bytes of output that wait for a reader that is slow."""

MOST_UNREAD_IF_STUCK = 1024 * 1024
"""The same for one that does not read at all."""


class OutputRelay:
    """Shows the output of one engine after the other. What is written comes from a daemon thread, which may block."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._counting = threading.Lock()
        self._dropped = 0  # bytes that were not shown, which has not been said yet
        self._pieces = 0  # that were taken by the reader

    async def show(self, output: HostOutput) -> None:
        """Pass on what is there now, after what somebody else is passing on at this moment.

        :raises OSError: if no thread is to be had
        """
        async with self._lock:
            if not output.unread() and not self._dropped:
                return
            abandoned = threading.Event()
            call = ThreadCall(self._pass_on, output, lambda: not abandoned.is_set(), name="output")
            try:
                while True:
                    taken = self._pieces
                    with anyio.move_on_after(STUCK):
                        await call.wait()
                        break
                    if self._pieces == taken and output.unread() > MOST_UNREAD_IF_STUCK:
                        # In a thread, too: giving memory back takes a millisecond for 8 MiB.
                        dropping = ThreadCall(self._drop, output, MOST_UNREAD_IF_STUCK, name="drop")
                        await dropping.wait()
            finally:
                abandoned.set()

    async def flush(self, output: HostOutput) -> None:
        """Pass on the rest of what an engine printed that has ended; what is not read in time is dropped."""
        with anyio.move_on_after(FLUSH_LIMIT), contextlib.suppress(OSError):
            await self.show(output)
        self._drop(output, 0)

    def _pass_on(self, output: HostOutput, is_wanted: Callable[[], bool]) -> None:
        while is_wanted():
            self._drop(output, MOST_UNREAD)
            text = output.read_new()
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                text = f"\n[... {_size(dropped)} of the engine's output not shown ...]\n{text}"
            if not text:
                return
            self._count(write_stderr(text, is_wanted, self._count_piece))

    def _count_piece(self) -> None:
        self._pieces += 1

    def _drop(self, output: HostOutput, keep: int) -> None:
        self._count(output.drop(keep))

    def _count(self, dropped: int) -> None:
        with self._counting:
            self._dropped += dropped


def _size(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} bytes"
