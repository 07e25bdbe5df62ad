"""The utilities that engines commonly have, as typed methods: once to await, once to block.

Each of them is a call by name; an engine lists at READY which it has (``client.info.utilities``), and a call of any
other is refused by name before anything is sent. Their parameters are those of the vLLM utilities of the same names.
Errors are those of ``call_utility``. A test keeps the two classes alike.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from anyengine.brief import brief
from anyengine.params import LoRARequest

PauseMode = Literal["abort", "wait", "keep"]
"""What happens to the requests that an engine has when it is paused: they end now, they may finish, or they stay."""


class EngineUtilities(abc.ABC):
    """The utilities of an engine, awaited; a client has them beside its own methods."""

    @abc.abstractmethod
    async def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a utility by its name."""

    async def get_supported_tasks(self) -> list[str]:
        """What the engine can be used for: ``"generate"``, ``"embed"``, ..."""
        return await self.call_utility("get_supported_tasks")

    # ---- pausing and sleeping ----

    async def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop making steps; when this returns, the engine makes none. Requests sent meanwhile are held in the engine.

        A paused engine can be paused again: ``"abort"`` then also ends the requests that it kept and holds, ``"wait"``
        makes steps again until those that it kept have finished, and ``"keep"`` changes nothing. Several calls with
        ``"wait"`` are answered together, also when an ``"abort"`` ends what they wait for; ``"keep"`` and
        :meth:`resume_scheduler` fail those that are still waiting. While the engine sleeps, what it kept cannot be
        waited for. Should emptying the cache fail, so does the call, but the engine is paused.

        :param mode: what happens to the requests that the engine has: ``"abort"`` ends them now, with that finish
            reason, ``"wait"`` lets them finish first, ``"keep"`` keeps them as they are until they can go on
        :param clear_cache: whether the prefix cache, if there is one, is emptied too; not with ``"keep"``
        """
        await self.call_utility("pause_scheduler", mode, clear_cache)

    async def resume_scheduler(self) -> None:
        """Make steps again and take in what was held, in its order; nothing happens if the engine is not paused.

        It fails if part of the engine sleeps: :meth:`wake_up` ends that.
        """
        await self.call_utility("resume_scheduler")

    async def is_scheduler_paused(self) -> bool:
        """Whether the engine is paused, or about to be when its requests have finished."""
        return await self.call_utility("is_scheduler_paused")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and give the accelerator's memory back; the KV cache is dropped.

        An engine that sleeps can be told so again, to no effect but that of ``mode``; another level is an error. Should
        falling asleep fail, the engine is paused and may sleep in part, until :meth:`wake_up` succeeds.

        :param level: 0 only pauses and keeps all memory; 1 moves the weights to the host's memory; 2 drops them
        :param mode: as for :meth:`pause_scheduler`; requests that are kept are computed anew after a sleep
        """
        await self.call_utility("sleep", level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End a sleep, or a pause; as soon as nothing sleeps any more, the engine makes steps again.

        What is awake already is left as it is. ``["scheduling"]`` ends a sleep of level 0, and is an error while
        something else would sleep on.

        :param tags: what to bring back, of ``"weights"``, ``"kv_cache"`` and ``"scheduling"``; None for everything
        """
        await self.call_utility("wake_up", None if tags is None else list(tags))

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps, or part of it; level 0 is a pause, so a paused engine sleeps."""
        return await self.call_utility("is_sleeping")

    # ---- caches ----

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; whether that was possible.

        :param reset_running_requests: preempt running requests first, so that nothing holds on to the cache
        :param reset_connector: also empty the cache behind a KV connector
        """
        return await self.call_utility("reset_prefix_cache", reset_running_requests, reset_connector)

    async def reset_mm_cache(self) -> None:
        """Forget preprocessed multimodal inputs."""
        await self.call_utility("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        """Forget the outputs of the multimodal encoder."""
        await self.call_utility("reset_encoder_cache")

    # ---- adapters ----

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter; false if it is there already.

        :raises TypeError: if ``lora_request`` is not a LoRARequest
        """
        return await self.call_utility("add_lora", _as_mapping(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload a LoRA adapter; whether there was one.

        What comes by its name later is another adapter, even from the same directory: nothing that was computed with
        the old one is used for it. An engine may refuse to unload one that requests are using.
        """
        return await self.call_utility("remove_lora", lora_id)

    async def list_loras(self) -> list[int]:
        """The ids of loaded LoRA adapters."""
        return await self.call_utility("list_loras")

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep a LoRA adapter from being evicted."""
        return await self.call_utility("pin_lora", lora_id)

    # ---- workers ----

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method or a function on each of the engine's workers; their results, in the order of ranks.

        :param method: the name of a worker's method, or the import path (``"package.module:function"``) of a function
            that takes the worker as its first argument
        :param timeout: seconds for the workers to answer
        """
        return await self.call_utility("collective_rpc", method, timeout, list(args), dict(kwargs or {}))

    async def execute_dummy_batch(self) -> None:
        """Make one step on made-up input."""
        await self.call_utility("execute_dummy_batch")

    async def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> str | None:
        """Start or end profiling; the end answers the path of the trace file, where the engine knows it.

        :param profile_prefix: how the trace file's name begins
        """
        return await self.call_utility("profile", is_start, profile_prefix)

    async def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write each worker's part of the weights into a directory.

        :param pattern: how the files are named
        :param max_size: bytes that one file may have
        """
        await self.call_utility("save_sharded_state", path, pattern, max_size)


class BlockingEngineUtilities(abc.ABC):
    """The utilities of an engine, as blocking calls."""

    @abc.abstractmethod
    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a utility by its name."""

    def get_supported_tasks(self) -> list[str]:
        """What the engine can be used for: ``"generate"``, ``"embed"``, ..."""
        return self.call_utility("get_supported_tasks")

    # ---- pausing and sleeping ----

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop making steps; when this returns, the engine makes none. Requests sent meanwhile are held in the engine.

        A paused engine can be paused again: ``"abort"`` then also ends the requests that it kept and holds, ``"wait"``
        makes steps again until those that it kept have finished, and ``"keep"`` changes nothing. Several calls with
        ``"wait"`` are answered together, also when an ``"abort"`` ends what they wait for; ``"keep"`` and
        :meth:`resume_scheduler` fail those that are still waiting. While the engine sleeps, what it kept cannot be
        waited for. Should emptying the cache fail, so does the call, but the engine is paused.

        :param mode: what happens to the requests that the engine has: ``"abort"`` ends them now, with that finish
            reason, ``"wait"`` lets them finish first, ``"keep"`` keeps them as they are until they can go on
        :param clear_cache: whether the prefix cache, if there is one, is emptied too; not with ``"keep"``
        """
        self.call_utility("pause_scheduler", mode, clear_cache)

    def resume_scheduler(self) -> None:
        """Make steps again and take in what was held, in its order; nothing happens if the engine is not paused.

        It fails if part of the engine sleeps: :meth:`wake_up` ends that.
        """
        self.call_utility("resume_scheduler")

    def is_scheduler_paused(self) -> bool:
        """Whether the engine is paused, or about to be when its requests have finished."""
        return self.call_utility("is_scheduler_paused")

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and give the accelerator's memory back; the KV cache is dropped.

        An engine that sleeps can be told so again, to no effect but that of ``mode``; another level is an error. Should
        falling asleep fail, the engine is paused and may sleep in part, until :meth:`wake_up` succeeds.

        :param level: 0 only pauses and keeps all memory; 1 moves the weights to the host's memory; 2 drops them
        :param mode: as for :meth:`pause_scheduler`; requests that are kept are computed anew after a sleep
        """
        self.call_utility("sleep", level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End a sleep, or a pause; as soon as nothing sleeps any more, the engine makes steps again.

        What is awake already is left as it is. ``["scheduling"]`` ends a sleep of level 0, and is an error while
        something else would sleep on.

        :param tags: what to bring back, of ``"weights"``, ``"kv_cache"`` and ``"scheduling"``; None for everything
        """
        self.call_utility("wake_up", None if tags is None else list(tags))

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps, or part of it; level 0 is a pause, so a paused engine sleeps."""
        return self.call_utility("is_sleeping")

    # ---- caches ----

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; whether that was possible.

        :param reset_running_requests: preempt running requests first, so that nothing holds on to the cache
        :param reset_connector: also empty the cache behind a KV connector
        """
        return self.call_utility("reset_prefix_cache", reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Forget preprocessed multimodal inputs."""
        self.call_utility("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        """Forget the outputs of the multimodal encoder."""
        self.call_utility("reset_encoder_cache")

    # ---- adapters ----

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter; false if it is there already.

        :raises TypeError: if ``lora_request`` is not a LoRARequest
        """
        return self.call_utility("add_lora", _as_mapping(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload a LoRA adapter; whether there was one.

        What comes by its name later is another adapter, even from the same directory: nothing that was computed with
        the old one is used for it. An engine may refuse to unload one that requests are using.
        """
        return self.call_utility("remove_lora", lora_id)

    def list_loras(self) -> list[int]:
        """The ids of loaded LoRA adapters."""
        return self.call_utility("list_loras")

    def pin_lora(self, lora_id: int) -> bool:
        """Keep a LoRA adapter from being evicted."""
        return self.call_utility("pin_lora", lora_id)

    # ---- workers ----

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method or a function on each of the engine's workers; their results, in the order of ranks.

        :param method: the name of a worker's method, or the import path (``"package.module:function"``) of a function
            that takes the worker as its first argument
        :param timeout: seconds for the workers to answer
        """
        return self.call_utility("collective_rpc", method, timeout, list(args), dict(kwargs or {}))

    def execute_dummy_batch(self) -> None:
        """Make one step on made-up input."""
        self.call_utility("execute_dummy_batch")

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> str | None:
        """Start or end profiling; the end answers the path of the trace file, where the engine knows it.

        :param profile_prefix: how the trace file's name begins
        """
        return self.call_utility("profile", is_start, profile_prefix)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write each worker's part of the weights into a directory.

        :param pattern: how the files are named
        :param max_size: bytes that one file may have
        """
        self.call_utility("save_sharded_state", path, pattern, max_size)


def _as_mapping(lora_request: object) -> dict[str, Any]:
    if not isinstance(lora_request, LoRARequest):
        raise TypeError(f"lora_request={brief(lora_request)} ({type(lora_request).__name__}): expected a LoRARequest")
    return dataclasses.asdict(lora_request)
