"""An engine that starts processes, some of which outlive it."""

from __future__ import annotations

import subprocess
import sys
import time

from anyengine.engine import utility
from anyengine.engines.scripted import ScriptedEngine


class OrphansEngine(ScriptedEngine):
    """Counts, and starts processes."""

    @utility
    def start_in_group(self) -> None:
        """Start one with a child, in this group, and one whose status nobody takes."""
        subprocess.Popen(["true"])
        subprocess.Popen(["sh", "-c", "sleep 3600 & wait"])
        time.sleep(0.1)  # the shell starts its child

    @utility
    def start(self) -> None:
        """The same, and some outside of the group, which end when this process does."""
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0)
        slow = "import sys; sys.stdin.read(); import time; time.sleep(0.3)"
        subprocess.Popen([sys.executable, "-c", slow], stdin=subprocess.PIPE, process_group=0)
        subprocess.Popen([sys.executable, "-c", slow], stdin=subprocess.PIPE, start_new_session=True)
        self.start_in_group()
