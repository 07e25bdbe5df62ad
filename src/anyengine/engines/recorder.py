"""The utilities that engines commonly have, for an engine without a model: they record what they were asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anyengine.brief import brief
from anyengine.engine.core import EngineCore, utility
from anyengine.engine.loading import import_object

_METHOD = re.compile(r"[A-Za-z]\w*")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class RecordingUtilities(EngineCore):
    """Nothing is profiled, saved or cached here; what was called, and with which arguments, can be asked for.

    Adapters are kept in a table, and the engine itself is the one worker of ``collective_rpc``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[tuple[str, list[Any]]] = []
        self._loras: dict[int, Mapping[str, Any]] = {}
        self._asleep: set[str] = set()

    @utility
    def recorded_calls(self) -> list[tuple[str, list[Any]]]:
        """The calls of the utilities that only record, and of the hooks ``sleep`` and ``wake_up``: name, arguments."""
        return list(self._recorded)

    # ---- sleeping ----

    def sleep(self, level: int) -> None:
        """Record the level; a step before everything is awake again is an error."""
        self._recorded.append(("sleep", [level]))
        self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: Sequence[str]) -> None:
        """Record the tags."""
        self._recorded.append(("wake_up", [list(tags)]))
        self._asleep -= set(tags)

    def _check_awake(self) -> None:
        if self._asleep:
            raise RuntimeError(f"a step was made while {' and '.join(sorted(self._asleep))} slept")

    # ---- caches, steps, files ----

    @utility
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Record the call; there is no cache, so emptying it always succeeds."""
        self._recorded.append(("reset_prefix_cache", [reset_running_requests, reset_connector]))
        return True

    @utility
    def reset_mm_cache(self) -> None:
        """Record the call."""
        self._recorded.append(("reset_mm_cache", []))

    @utility
    def reset_encoder_cache(self) -> None:
        """Record the call."""
        self._recorded.append(("reset_encoder_cache", []))

    @utility
    def execute_dummy_batch(self) -> None:
        """Record the call; no request gets a token."""
        self._check_awake()
        self._recorded.append(("execute_dummy_batch", []))

    @utility
    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Record the call; no trace is written, so there is no path to answer."""
        self._recorded.append(("profile", [is_start, profile_prefix]))

    @utility
    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Record the call; there are no weights, so nothing is written."""
        self._recorded.append(("save_sharded_state", [path, pattern, max_size]))

    # ---- workers ----

    @utility
    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of this engine, or a function that takes it; the one worker's result, in a list.

        The worker runs in the engine's own thread, where nothing can end a call early: ``timeout`` changes nothing.

        :raises TypeError: if ``method`` is not a string, or names something that cannot be called
        :raises ValueError: if it is neither the name of a public method nor ``"package.module:function"``
        :raises AttributeError, ImportError: if there is no such method, function or module
        """
        if not isinstance(method, str):
            raise TypeError(
                f"method={brief(method)} ({type(method).__name__}): expected a method's name or an import path"
            )
        worker: tuple[object, ...] = ()
        if _METHOD.fullmatch(method):
            function = getattr(self, method)
        elif _FUNCTION.fullmatch(method):
            function = import_object(method)
            worker = (self,)
        else:
            raise ValueError(
                f"method={brief(method)}: expected the name of a public method, or 'package.module:function'"
            )
        if not callable(function):
            raise TypeError(f"method={brief(method)}: {type(function).__name__} cannot be called")
        return [function(*worker, *args, **(kwargs or {}))]

    # ---- adapters ----

    @utility
    def add_lora(self, lora_request: Mapping[str, Any]) -> bool:
        """Put an adapter into the table; False if it is there already.

        :raises ValueError: if one of ``lora_name``, ``lora_int_id`` and ``lora_path`` is missing
        """
        for name in ("lora_name", "lora_int_id", "lora_path"):
            if name not in lora_request:
                raise ValueError(f"lora_request={brief(dict(lora_request))}: {name} is missing")
        number = lora_request["lora_int_id"]
        if number in self._loras:
            return False
        self._loras[number] = lora_request
        return True

    @utility
    def remove_lora(self, lora_id: int) -> bool:
        """Take an adapter out of the table; whether it was there."""
        return self._loras.pop(lora_id, None) is not None

    @utility
    def list_loras(self) -> list[int]:
        """The ids in the table, in the order in which they came."""
        return list(self._loras)

    @utility
    def pin_lora(self, lora_id: int) -> bool:
        """Whether the adapter is in the table; it is never evicted."""
        return lora_id in self._loras
