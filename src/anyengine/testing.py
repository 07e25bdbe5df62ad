"""For test suites of applications: an engine without a model, and every way in which an engine can fail.

``scripted_spec`` names a :class:`~anyengine.engines.scripted.ScriptedEngine`, which counts up from each prompt and has
utilities that make it fail on demand; ``faulty_launcher`` starts a process that fails before any engine is loaded.
"""

from __future__ import annotations

from typing import Any

from anyengine.engines.faulty_start import VARIABLE, StartFault
from anyengine.engines.scripted import ScriptedEngine
from anyengine.process.launcher import ProcessLauncher
from anyengine.types import EngineSpec

__all__ = ["ScriptedEngine", "StartFault", "faulty_launcher", "scripted_spec"]


def scripted_spec(**arguments: Any) -> EngineSpec:
    """A ScriptedEngine with these constructor arguments."""
    return EngineSpec("anyengine.engines.scripted:ScriptedEngine", arguments)


def faulty_launcher(fault: StartFault) -> ProcessLauncher:
    """A launcher for ``open_engine_client`` whose process fails in the way of ``fault`` before it loads an engine.

    ``"raise"``, ``"exit"`` (with code 0) and ``"kill"`` end it before HELLO, ``"hang"`` never says HELLO,
    ``"hang_after_hello"`` nothing more; ``"other_version"`` and ``"wrong_token"`` say a HELLO that is refused.
    """
    return ProcessLauncher(module="anyengine.engines.faulty_start", environment={VARIABLE: fault})
