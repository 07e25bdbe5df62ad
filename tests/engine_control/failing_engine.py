"""An engine that can fail while nobody calls it, as one does whose worker dies."""

from __future__ import annotations

import os
import threading

from tests.engine_control.plain_engine import PlainEngine

from anyengine.engine import utility


class FailingEngine(PlainEngine):
    """Fails a moment after it was told to, from a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._fd, self._write_end = os.pipe()
        self._failed = False

    def failure_fd(self) -> int:
        return self._fd

    def check_health(self) -> None:
        if self._failed:
            raise RuntimeError("a worker has died")

    def unavailable_utilities(self) -> frozenset[str]:
        return frozenset({"not_configured"})

    @utility
    def not_configured(self) -> None:
        """Something that is not there in this configuration."""

    @utility
    def fail_soon(self) -> None:
        threading.Timer(0.05, self._fail).start()

    @utility
    def fail_in_this_call(self) -> None:
        self._failed = True
        raise ValueError("the call's own error")

    @utility
    def fail_alone(self) -> None:
        raise ValueError("the call's own error")

    def _fail(self) -> None:
        self._failed = True
        os.write(self._write_end, b"x")
