"""One of several data-parallel engines, each with a client of its own, who share the requests out among themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from anyengine.brief import brief
from anyengine.engines.vllm.installed import find

_OTHERS = {
    "data_parallel_start_rank": None,
    "data_parallel_hybrid_lb": False,
    "data_parallel_multi_port_external_lb": False,
    "data_parallel_backend": "mp",
}
"""Arguments with which vLLM starts several engines, or starts them itself; and what they are without that."""


class Rank(NamedTuple):
    """Which of ``size`` engines, 0 to ``size - 1``. Hosts have ``local_size`` each, and are filled in rank order."""

    number: int = 0
    size: int = 1
    local_size: int = 1

    @property
    def local(self) -> int:
        """Its number among the engines of its host, where each takes its own devices out of those that all see."""
        return self.number % self.local_size

    def apply_to(self, config: Any) -> None:
        """Make vLLM's configuration of several engines that of this one, as vLLM does in each of its engines.

        Ranks of a model that is no mixture of experts have nothing to do with each other. What is left of the rank
        chooses the devices and NUMA nodes, makes the seed of requests without one, and names connectors and topics.

        :raises Exception: what vLLM raised, if this host has no devices for this rank
        """
        parallel = config.parallel_config
        if self.size == 1:
            return
        parallel.data_parallel_rank_local = self.local
        if config.kv_transfer_config is not None:
            config.kv_transfer_config.engine_id = f"{config.kv_transfer_config.engine_id}_dp{self.number}"
        platform = find("vllm.platforms:current_platform")
        if parallel.use_ray or not (platform.is_cuda_alike() or platform.is_xpu()):
            # Elsewhere the worker does this, by its local rank.
            assign = find("vllm.v1.engine.utils:set_assigned_physical_gpu_ids_for_dp_rank")
            assign(config, self.local, parallel.assigned_physical_gpu_ids)
        parallel.data_parallel_index = self.number
        if hasattr(parallel, "reconfigure_for_independent_dp_rank"):
            parallel.reconfigure_for_independent_dp_rank()
        else:  # 0.27
            parallel.data_parallel_size = parallel.data_parallel_size_local = 1
            parallel.data_parallel_rank = 0


def take_rank(arguments: Mapping[str, Any]) -> tuple[Rank, Mapping[str, Any]]:
    """Which rank the arguments ask for, and the arguments without it.

    vLLM itself refuses a rank of its own for a model that is no mixture of experts, and wants engines that know nothing
    of each other; but then all of them would take the same devices and draw the same random numbers.

    :raises ValueError: if they ask for several engines, or for a rank that there is not
    """
    for name, default in _OTHERS.items():
        if (value := arguments.get(name, default)) != default and value is not None:
            raise ValueError(f"{name}={brief(value)}: an engine is one rank; say which by data_parallel_rank")
    size = _integer(arguments, "data_parallel_size", 1)
    number: object = arguments.get("data_parallel_rank")
    if number is None:
        if size > 1 or arguments.get("data_parallel_external_lb"):
            raise ValueError(
                f"data_parallel_size={size}: an engine is one of them; say which by data_parallel_rank, "
                "and open a client for each"
            )
        return Rank(), arguments
    if "data_parallel_size" not in arguments:
        raise ValueError(f"data_parallel_rank={brief(number)}: say of how many by data_parallel_size")
    number = _integer(arguments, "data_parallel_rank", 0, size - 1)
    local_size = size
    if arguments.get("data_parallel_size_local") is not None:
        local_size = _integer(arguments, "data_parallel_size_local", 1, size)
    taken = ("data_parallel_rank", "data_parallel_external_lb")
    return Rank(number, size, local_size), {name: value for name, value in arguments.items() if name not in taken}


def _integer(arguments: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int:
    value = arguments.get(name, least)
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"{least} to {most}" if least < most else f"{least}"
        raise ValueError(f"{name}={brief(value)}: expected {limits}")
    return value
