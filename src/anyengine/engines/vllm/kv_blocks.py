"""Keeping what a request leaves in the KV cache from the next."""

from __future__ import annotations

from typing import Any

from anyengine.engines.vllm.installed import find


def zero_new_blocks(core: Any) -> None:
    """Have blocks of full attention zeroed when a request is given them, on a CPU.

    vLLM's attention for CPUs multiplies what a block holds behind a request's last token by zero, and what another
    request has left there may be NaN, which an adapter or an overflow can make of any prompt. vLLM zeroes blocks for
    models whose caches share memory; here it is asked to for all. It takes less than a thousandth of the time in which
    the block's tokens are computed.
    """
    scheduler = core.scheduler
    if core.vllm_config.device_config.device_type != "cpu" or not hasattr(scheduler, "needs_kv_cache_zeroing"):
        return
    full_attention = find("vllm.v1.kv_cache_interface:FullAttentionSpec")
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        # 0.27 zeroes no others.
        if isinstance(manager.kv_cache_spec, full_attention):
            manager._record_new_block_ids = True
    scheduler.needs_kv_cache_zeroing = True
