"""The utilities that vLLM's core offers beside generating."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyengine.brief import brief
from anyengine.engine.core import EngineCore, utility
from anyengine.engines.vllm import internals
from anyengine.params import LoRARequest


class VllmUtilities(EngineCore):
    """What an engine on vLLM's core offers; it sets ``_vllm`` when it loads.

    :mod:`anyengine.utilities` describes them for those who call.
    """

    _vllm: internals.VllmCore

    def unavailable_utilities(self) -> frozenset[str]:
        """What vLLM was not configured for."""
        missing: set[str] = set()
        if not self._vllm.can_sleep:
            missing |= {"sleep", "wake_up", "is_sleeping"}
        if not self._vllm.has_lora:
            missing |= {"add_lora", "remove_lora", "list_loras", "pin_lora"}
        if not self._vllm.can_profile:
            missing |= {"profile"}
        return frozenset(missing)

    # ---- caches ----

    @utility
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; False if running requests hold on to them."""
        return self._vllm.core.reset_prefix_cache(reset_running_requests, reset_connector)

    @utility
    def reset_mm_cache(self) -> None:
        """Forget preprocessed multimodal inputs."""
        self._vllm.core.reset_mm_cache()

    @utility
    def reset_encoder_cache(self) -> None:
        """Forget the outputs of the multimodal encoder."""
        self._vllm.core.reset_encoder_cache()

    # ---- adapters ----

    @utility
    def add_lora(self, lora_request: Mapping[str, Any]) -> bool:
        """Load an adapter; false if it is there already.

        :raises TypeError, RequestRefusedError: if the fields are not those of a LoRARequest, vLLM cannot load it, its
            number or name is that of another one, or all that are loaded are in use or pinned
        :raises RequestFailedError: if a worker has no memory for it, or could not unload another one
        """
        return self._vllm.adapters.load(LoRARequest(**lora_request))

    @utility
    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; whether there was one.

        :raises RequestRefusedError: if there are requests for it
        """
        return self._vllm.adapters.remove(lora_id)

    @utility
    def list_loras(self) -> list[int]:
        """The ids of loaded adapters, in order."""
        return self._vllm.adapters.numbers()

    @utility
    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter from being evicted.

        :raises RequestRefusedError: if requests use others, which would have no place on the device then
        :raises Exception: what vLLM raised, such as for an adapter that is not loaded
        """
        return self._vllm.adapters.pin(lora_id)

    # ---- workers ----

    @utility
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker, or an importable function on it, between two steps.

        Whoever may call this may run whatever can be imported there.

        :raises TypeError: if ``method`` is not a string
        :raises ValueError: if it is not the name of a public method or of a function, or if a ``timeout`` is given
        :raises WorkerCallError: if a worker raised; the others have done it all the same
        :raises UnencodableError: if what a worker returned cannot travel
        """
        if not isinstance(method, str):
            raise TypeError(f"method={brief(method)} ({type(method).__name__}): expected a string")
        if ":" not in method and not method[:1].isalpha():
            raise ValueError(
                f"method={brief(method)}: expected the name of a worker's public method, or 'package.module:function'"
            )
        if timeout is not None:
            raise ValueError(
                f"timeout={brief(timeout)}: vLLM cannot take a call back from its workers, and would take the late "
                "answer for that of the next call; pass None, and to wait no longer than that use call_utility with a "
                "timeout"
            )
        return self._vllm.call_workers(method, args, kwargs or {})

    @utility
    def execute_dummy_batch(self) -> None:
        """Run the model once on made-up input."""
        self._vllm.core.execute_dummy_batch()

    @utility
    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Begin or end a profile, as ``profiler_config`` says; vLLM does not tell where its files are."""
        self._vllm.core.profile(is_start, profile_prefix)

    @utility
    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write each worker's part of the weights into a directory."""
        self._vllm.core.save_sharded_state(path, pattern, max_size)
