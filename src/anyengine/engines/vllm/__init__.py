"""vLLM's engine core in the child process, without vLLM's own client, sockets or threads around it.

Importing this package loads neither torch nor vLLM: :meth:`VllmEngine.load` does.
"""

from __future__ import annotations

from anyengine.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
