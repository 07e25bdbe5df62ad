"""The utilities that concern the worker and its model, and not the requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anyengine.brief import brief
from anyengine.engine.core import EngineCore, utility

if TYPE_CHECKING:
    from anyengine.engines.transformers.profiler import Profiler
    from anyengine.engines.transformers.worker import Worker


class WorkerUtilities(EngineCore):
    """What an engine with one worker and a profiler offers; it sets both when it loads."""

    _worker: Worker
    _profiler: Profiler

    def shutdown(self) -> None:
        """End a profile that is under way."""
        self._profiler.close()

    @utility
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the one worker, or an importable function on it; a list of one result.

        The function runs between two steps, in the engine's process and its thread: whoever may call this may run
        whatever can be imported there.

        :raises ValueError: if a ``timeout`` is given, or ``method`` is neither a name nor an import path
        :raises TypeError: if an argument has the wrong type, or what ``method`` names cannot be called
        :raises AttributeError: if there is no such method or function
        :raises ImportError: if there is no such module
        """
        # Not with the module: it needs torch, which only load() loads.
        from anyengine.engines.transformers.worker import call_worker

        if timeout is not None:
            raise ValueError(
                f"timeout={brief(timeout)}: the worker runs in the engine's thread, where nothing can interrupt it; "
                "pass None, and to wait no longer than that use call_utility with a timeout"
            )
        return [call_worker(self._worker, method, args, {} if kwargs is None else kwargs)]

    @utility
    def execute_dummy_batch(self) -> None:
        """Run the model on one made-up token, beside all requests.

        :raises RuntimeError: if the engine sleeps
        """
        self._worker.execute_dummy_batch()

    @utility
    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> str | None:
        """Begin to record a profile, or end it and answer the path of its trace (Chrome's format, ``.json.gz``).

        :raises RuntimeError: if there is one already, or none
        :raises TypeError: if an argument has the wrong type
        :raises ValueError: if ``profile_prefix`` cannot begin a file's name
        :raises OSError: if the trace cannot be written
        """
        if not isinstance(is_start, bool):
            raise TypeError(f"is_start={brief(is_start)} ({type(is_start).__name__}): expected a bool")
        if is_start:
            self._profiler.start(profile_prefix)
            return None
        return str(self._profiler.stop(profile_prefix))

    @utility
    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the weights into a directory; see :meth:`Worker.save_sharded_state`."""
        self._worker.save_sharded_state(path, pattern, max_size)
