"""Utilities that produce the faults which a real engine can have."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from typing import Any

from anyengine.engine.core import EngineCore, utility


class FaultUtilities(EngineCore):
    """An engine that fails on demand; its :meth:`step` begins with :meth:`_strike`."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen: tuple[float, bool] | None = None
        self._error_in_step: str | None = None
        self._grandchildren: list[subprocess.Popen[bytes]] = []

    @property
    def _fault_is_due(self) -> bool:
        return self._frozen is not None or self._error_in_step is not None

    def _strike(self) -> None:
        """Have the fault that was ordered for this step, if one was."""
        if self._error_in_step is not None:
            raise RuntimeError(self._error_in_step)
        if self._frozen is not None:
            (seconds, hold_gil), self._frozen = self._frozen, None
            sleep_in_c(seconds, hold_gil=hold_gil)

    @utility
    def sleep_for(self, seconds: float) -> float:
        """Answer after ``seconds``; the engine does nothing else meanwhile."""
        time.sleep(seconds)
        return seconds

    @utility
    def raise_error(self, text: str) -> None:
        """Fail this call with a RuntimeError."""
        raise RuntimeError(text)

    @utility
    def return_unencodable(self) -> Any:
        """Return a function inside a list inside a map."""
        return {"fine": 1, "items": [0, sleep_in_c]}

    @utility
    def exit(self, code: int) -> None:
        """End the process without a word."""
        os._exit(code)

    @utility
    def kill(self, number: int) -> None:
        """Send this process a signal."""
        os.kill(os.getpid(), number)

    @utility
    def abort(self) -> None:
        """End as ``std::terminate`` does."""
        os.abort()

    @utility
    def segfault(self) -> None:
        """Read address 0 in native code."""
        ctypes.string_at(0)

    @utility
    def raise_in_step(self, text: str) -> None:
        """Have the next step raise a RuntimeError."""
        self._error_in_step = text

    @utility
    def freeze(self, seconds: float, hold_gil: bool) -> None:
        """Have the next step sleep in native code, keeping the GIL or not; the answer comes before."""
        self._frozen = (seconds, hold_gil)

    @utility
    def spawn_grandchild(self) -> int:
        """Start a process that sleeps for an hour and answer its pid."""
        code = "import time; time.sleep(3600)"
        grandchild = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL)
        self._grandchildren.append(grandchild)
        return grandchild.pid


def sleep_in_c(seconds: float, *, hold_gil: bool) -> None:
    """Sleep in native code, keeping the GIL or not; no signal ends it before its time."""
    library = ctypes.PyDLL(None) if hold_gil else ctypes.CDLL(None)
    microseconds = math.ceil(seconds * 1e6)
    # Like a native call that does not come back for a signal; usleep would.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while microseconds > 0:  # usleep takes less than a second at a time
        chunk = min(microseconds, 900_000)
        library.usleep(chunk)
        microseconds -= chunk
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
