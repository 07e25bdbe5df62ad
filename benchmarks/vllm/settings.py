"""How vLLM runs here, on both sides."""

from __future__ import annotations

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}
"""For vLLM, on both sides: quiet, offline, one GiB of cache, and the model in the engine's process itself."""

ENGINE_ARGUMENTS = {
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "distributed_executor_backend": "uni",
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}
"""vLLM's engine arguments for the small model."""
