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


def fail(worker: Any) -> None:
    """Nothing at all."""
    raise ValueError("a worker's own error")
