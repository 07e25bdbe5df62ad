"""An engine that says what its process has got from the application's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyengine
from anyengine.engine import utility
from anyengine.engines.scripted import ScriptedEngine


class InheritedEngine(ScriptedEngine):
    """Counts, and tells of its process."""

    @utility
    def inherited(self) -> dict[str, Any]:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "anyengine": anyengine.__path__[0],
            "executable": sys.executable,
            "path": [entry.encode(errors="backslashreplace").decode() for entry in sys.path],
            "flags": {
                name: int(getattr(sys.flags, name))
                for name in dir(sys.flags)
                if name.islower() and name[0] != "_"
                if isinstance(getattr(sys.flags, name), int)
            },
            "blocked": int(status["SigBlk"], 16),
            "ignored": int(status["SigIgn"], 16),
            "odd": os.environb.get(b"ODD", b""),
        }
