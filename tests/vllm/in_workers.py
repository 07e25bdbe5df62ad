"""What tests run in the workers of an engine, by ``collective_rpc``."""

from __future__ import annotations

import os
import time
from typing import Any


def sleep_for(worker: Any, seconds: float) -> None:
    """Keep the worker busy."""
    time.sleep(seconds)


def describe(worker: Any, *, greeting: str) -> dict[str, Any]:
    """Something of the worker that can travel."""
    return {"greeting": greeting, "pid": os.getpid(), "rank": worker.rank, "class": type(worker).__name__}


def directory_of_sockets(worker: Any) -> str:
    """Where vLLM would make one."""
    from vllm import envs

    return envs.VLLM_RPC_BASE_PATH


def unencodable(worker: Any) -> Any:
    """Something that cannot."""
    return worker


def fail(worker: Any, rank: int | None = None) -> int:
    """Nothing at all, in the worker of this rank or in all of them."""
    if rank in (None, worker.rank):
        raise ValueError("a worker's own error")
    return worker.rank


def loaded_adapters(worker: Any) -> list[int]:
    """Their numbers."""
    return sorted(worker.list_loras())


def lose_adapter(worker: Any, rank: int, number: int) -> None:
    """Let one worker fail to load an adapter."""
    if worker.rank != rank:
        return
    load = worker.worker.add_lora

    def add_lora(lora: Any) -> bool:
        if lora.lora_int_id == number:
            raise FileNotFoundError(lora.lora_path)
        return load(lora)

    worker.worker.add_lora = add_lora
