"""vLLM's clients; what the benchmarks call has the names that :mod:`benchmarks.baseline` gives it."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import time
from collections.abc import AsyncGenerator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.vllm.settings import SETTINGS

__all__ = ["AsyncRival", "RivalDeadError", "StreamingRival", "SyncRival", "configuration"]

os.environ.update(SETTINGS)

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient, SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError as RivalDeadError
from vllm.v1.executor import Executor

from benchmarks.vllm.rival_engine import install

_SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}
"""A configuration that vLLM accepts. No weights belong to it, and none are loaded."""


@cache
def configuration() -> VllmConfig:
    """What a client is made with."""
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)  # AsyncLLM reads it once more
    Path(directory.name, "config.json").write_text(json.dumps(_SMALL))
    arguments = EngineArgs(model=directory.name, skip_tokenizer_init=True, distributed_executor_backend="uni")
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    # vLLM's default, which it changes on CPUs alone: a child that is forked starts without importing vLLM again.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return config


def _request(
    request_id: str, prompt_token_ids: list[int] | None, max_tokens: int, prompt_embeds: Any
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        prompt_embeds=prompt_embeds,
    )


class AsyncRival(AsyncMPClient):
    """``AsyncMPClient``, with its engine process, which it starts, watches and ends itself."""

    def __init__(self) -> None:
        install()
        config = configuration()
        super().__init__(config, Executor.get_class(config), log_stats=False)

    get_output = AsyncMPClient.get_output_async
    call_utility = AsyncMPClient.call_utility_async

    async def add_request(
        self, request_id: str, prompt_token_ids: list[int] | None, max_tokens: int, prompt_embeds: Any = None
    ) -> None:
        """Send a request; its outputs come from :meth:`get_output`."""
        await self.add_request_async(_request(request_id, prompt_token_ids, max_tokens, prompt_embeds))

    async def close_dispatcher(self) -> None:
        """There is none: whole steps are all that this client has."""

    @property
    def process(self) -> Any:
        """The engine's process."""
        return self.resources.engine_manager.processes[0]


class StreamingRival(AsyncLLM):
    """``AsyncLLM``, which turns no tokens into text here."""

    def __init__(self) -> None:
        install()
        config = configuration()
        super().__init__(config, Executor.get_class(config), log_stats=False, log_requests=False)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        return await self.engine_core.call_utility_async(method, *args)

    def stream(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> AsyncGenerator[Any, None]:
        """The outputs of one request, each with the tokens that are new."""
        params = SamplingParams(max_tokens=max_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA)
        return self.generate({"prompt_token_ids": prompt_token_ids}, params, request_id)

    @property
    def process(self) -> Any:
        """The engine's process."""
        return self.engine_core.resources.engine_manager.processes[0]


class SyncRival(SyncMPClient):
    """``SyncMPClient``; the same."""

    def __init__(self) -> None:
        install()
        config = configuration()
        super().__init__(config, Executor.get_class(config), log_stats=False)

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        """Send a request; its outputs come from :meth:`get_output`."""
        super().add_request(_request(request_id, prompt_token_ids, max_tokens, None))

    process = AsyncRival.process
