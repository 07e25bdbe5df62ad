"""What a mixture of experts cannot do here, refused before its weights are loaded."""

from __future__ import annotations

from typing import Any


def check_experts(config: Any) -> None:
    """Refuse a configuration of vLLM's with which a mixture of experts would hang or crash.

    :raises ValueError: if it asks for ranks that have to step together, or for expert parallelism on the CPU
    """
    parallel = config.parallel_config
    is_cpu = config.device_config.device_type == "cpu"
    if parallel.enable_expert_parallel and is_cpu:
        # The kernel is not told which experts its worker has, and a worker's first forward ends with SIGSEGV.
        raise ValueError(
            "enable_expert_parallel=True: vLLM's workers crash with it on the CPU; leave it out, for "
            "tensor_parallel_size alone shares each expert out among the workers"
        )
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        instead = "tensor_parallel_size" if is_cpu else "tensor_parallel_size, with enable_expert_parallel=True"
        raise ValueError(
            f"data_parallel_size={parallel.data_parallel_size}: the ranks of a mixture of experts have to step "
            "together, idle ones included, and engines with clients of their own do not; "
            f"set {instead}, or run engines without data_parallel_size"
        )
