"""Sleeping: giving the memory of weights and KV cache back, and taking it again."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence

import torch

from anyengine.engines.transformers.kv_cache import KVCache
from anyengine.engines.transformers.model import CausalModel


def give_back(level: int, model: CausalModel, cache: KVCache) -> None:
    """Drop the cache, and move the weights to the host's memory (level 1) or drop them too (level 2).

    :raises RuntimeError: if the host has not enough memory for the weights; then nothing has changed
    """
    if level == 1:
        model.move_to_host()
    else:
        model.drop_weights()
    cache.release()
    _release_freed(model.device)


def take_again(tags: Sequence[str], model: CausalModel, cache: KVCache) -> None:
    """Bring back ``"weights"`` or ``"kv_cache"``, or both; what is there stays as it is.

    :raises OSError: if dropped weights cannot be read any more
    :raises RuntimeError: if the device has not enough memory, or the checkpoint holds another model now
    """
    if "weights" in tags and not model.is_resident:
        model.restore()
    if "kv_cache" in tags and not cache.is_allocated:
        cache.allocate()


def _release_freed(device: torch.device) -> None:
    # What lies in reference cycles is freed by the collector alone. torch keeps freed CUDA memory for its next tensors.
    # glibc keeps freed blocks in its heap, weights among them: the size from which it maps a block on its own, and
    # unmaps it when freed, rises up to 32 MiB as such blocks are freed.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
