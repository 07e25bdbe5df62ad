"""The engine's side: what an adapter implements, and the loop that runs it in the child process.

Imports the protocol, pyzmq and the standard library; neither anyio nor trio.
"""

from anyengine.engine.core import (
    Deferred,
    EngineCore,
    EngineRequest,
    OutputDetails,
    ProgressReporter,
    StepOutputs,
    from_rows,
    utility,
)

__all__ = [
    "Deferred",
    "EngineCore",
    "EngineRequest",
    "OutputDetails",
    "ProgressReporter",
    "StepOutputs",
    "from_rows",
    "utility",
]
