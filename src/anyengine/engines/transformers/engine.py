"""The engine: takes requests, steps the scheduler, the model and the sampler, and says what came of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anyengine.engine.core import (
    EngineCore,
    EngineRequest,
    OutputDetails,
    ProgressReporter,
    StepOutputs,
    from_rows,
)
from anyengine.engines.transformers.checkpoint import default_model
from anyengine.engines.transformers.scheduler import BlockPool, Request, Scheduler
from anyengine.errors import RequestError
from anyengine.protocol.sampling import sampling_differences
from anyengine.types import EngineInfo, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    import torch

    from anyengine.engines.transformers.kv_cache import KVCache, KVLayout
    from anyengine.engines.transformers.model import CausalModel
    from anyengine.engines.transformers.sampler import Sampler

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}
_WARM_UP_TOKENS = 16


class TransformersEngine(EngineCore):
    """Continuous batching for a causal language model of transformers, on the CPU or one CUDA device.

    ``model`` is a directory in Hugging Face's format, or ``"default"`` for SmolLM2-135M-Instruct. ``dtype="auto"`` is
    that of the checkpoint, ``device="auto"`` the first CUDA device if there is one. ``max_model_len`` counts prompt and
    completion tokens together and is by default what the model allows and the cache holds. ``max_num_seqs`` requests
    run at once, with ``max_num_batched_tokens`` tokens in a step at most (by default 256 on the CPU, where a longer
    step brings nothing and makes the others wait, and 2048 on CUDA). The KV cache has blocks of ``block_size``
    tokens and takes ``kv_cache_bytes``; the default is 1 GiB (on CUDA nine tenths of what is free), but no more than
    ``max_num_seqs`` requests of full length can use. ``seed`` seeds the requests that have no seed of their own, and
    ``num_threads`` is the number of CPU threads (None: torch's own choice, all cores). Beside other busy processes
    fewer are faster: torch's threads wait for each other by spinning, and one that lost its core holds up all of them.

    :raises TypeError: if an argument has the wrong type
    :raises ValueError: if an argument is out of its range
    :raises FileNotFoundError: if ``model`` is not the directory of a model
    """

    def __init__(
        self,
        *,
        model: str = "default",
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        kv_cache_bytes: int | None = None,
        seed: int = 0,
        num_threads: int | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(_DTYPES)}")
        if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"device={device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
        self._model_path = _model_path(model)
        self._dtype = dtype
        self._device = device
        self._max_model_len = None if max_model_len is None else _integer("max_model_len", max_model_len, 2)
        self._max_num_seqs = _integer("max_num_seqs", max_num_seqs, 1)
        self._max_num_batched_tokens = max_num_batched_tokens
        if (
            max_num_batched_tokens is not None
            and _integer("max_num_batched_tokens", max_num_batched_tokens, 1) < max_num_seqs
        ):
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens}: less than max_num_seqs={max_num_seqs}, "
                "but each running request takes a token in every step"
            )
        self._block_size = _integer("block_size", block_size, 1)
        self._kv_cache_bytes = None if kv_cache_bytes is None else _integer("kv_cache_bytes", kv_cache_bytes, 1)
        self._seed = _integer("seed", seed, -(2**63))
        self._num_threads = None if num_threads is None else _integer("num_threads", num_threads, 1)
        self._model: CausalModel
        self._cache: KVCache
        self._sampler: Sampler
        self._scheduler: Scheduler
        self._pool: BlockPool
        self._info: EngineInfo

    def load(self, progress: ProgressReporter) -> None:
        """Load the model, allocate the cache and run a first request.

        :raises ValueError: if the model needs what this engine does not compute, or an argument does not fit it
        :raises ModuleNotFoundError: if a package is missing
        """
        progress("importing torch", 0.0)
        import torch
        import transformers

        from anyengine.engines.transformers import sampler
        from anyengine.engines.transformers.kv_cache import KVCache
        from anyengine.engines.transformers.model import CausalModel

        progress("importing torch", 1.0)
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        device = _torch_device(self._device)
        directory = default_model(progress) if self._model_path is None else self._model_path
        progress("loading weights", 0.0)
        model = CausalModel(directory, None if self._dtype == "auto" else getattr(torch, self._dtype), device)
        progress("loading weights", 1.0)
        progress("allocating KV cache", 0.0)
        budget = self._max_num_batched_tokens or max(_BATCHED_TOKENS[device.type], self._max_num_seqs)
        # As many tokens as a step can have: on CUDA what this takes stays reserved and is not given to the cache.
        layout = model.probe(budget if device.type == "cuda" else 1)
        num_blocks = self._num_blocks(layout, model)
        max_model_len = self._length(model, num_blocks * self._block_size)
        self._model = model
        self._cache = KVCache(layout, num_blocks, self._block_size, device)
        self._pool = BlockPool(num_blocks)
        self._scheduler = Scheduler(self._pool, self._block_size, self._max_num_seqs, budget)
        self._sampler = sampler.Sampler(model.vocab_size, model.eos_token_ids, device, self._seed)
        self._info = EngineInfo(
            engine="transformers",
            version=transformers.__version__,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            dtype=str(model.dtype).removeprefix("torch."),
            num_gpu_blocks=num_blocks,
            block_size=self._block_size,
            kv_cache_size_tokens=num_blocks * self._block_size,
            kv_cache_max_concurrency=num_blocks * self._block_size / max_model_len,
            sampling_parameters=sampler.PARAMETERS,
            prompt_embeds=True,
        )
        progress("allocating KV cache", 1.0)
        progress("warming up", 0.0)
        self._warm_up()
        progress("warming up", 1.0)

    def describe(self) -> EngineInfo:
        """What was loaded."""
        return self._info

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        :raises RequestError: if it asks for something that this engine or its model cannot do
        """
        unsupported = sampling_differences(request.sampling).keys() - set(self._info.sampling_parameters)
        if unsupported:
            names = ", ".join(f"SamplingParams.{name}" for name in sorted(unsupported))
            raise RequestError(f"the transformers engine does not support {names}")
        embeds = None if request.prompt_embeds is None else self._model.as_embeds(request.prompt_embeds)
        tokens = [0] * len(embeds) if embeds is not None else list(request.prompt_token_ids or ())
        length, limit = len(tokens), self._info.max_model_len
        if not tokens:
            raise RequestError("the prompt is empty")
        if length >= limit:
            raise RequestError(
                f"the prompt has {length} tokens, but max_model_len={limit} leaves room for at most {limit - 1}"
            )
        if max(tokens) >= self._model.vocab_size:
            raise RequestError(f"the prompt holds token {max(tokens)}: the model has {self._model.vocab_size} tokens")
        self._scheduler.add(
            Request(
                handle=request.handle,
                tokens=tokens,
                prompt_length=length,
                limit=min(length + request.sampling.max_tokens, limit),
                sampling=self._sampler.start(request.sampling, tokens if embeds is None else ()),
                embeds=embeds,
            )
        )

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop requests; their blocks are free at once."""
        for handle in handles:
            self._scheduler.remove(handle)

    def has_work(self) -> bool:
        """Whether any request is under way."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def step(self) -> StepOutputs | None:
        """Run one batch; None if it held only parts of prompts."""
        plan = self._scheduler.schedule()
        if not plan.chunks:
            return None
        self._cache.clear(plan.new_blocks)
        sampled, logits = self._model.forward(plan.chunks, self._cache)
        if not sampled:
            return None
        tokens, logprobs = self._sampler.sample(logits, [chunk.request.sampling for chunk in sampled])
        rows: list[tuple[int, list[int], OutputDetails | None]] = []
        for row, (chunk, token) in enumerate(zip(sampled, tokens, strict=True)):
            request = chunk.request
            request.tokens.append(token)
            details = self._details(request, token, logprobs.get(row))
            rows.append((request.handle, [token] if token >= 0 else [], details))
            if details is not None and details.finish_reason is not None:
                self._scheduler.remove(request.handle)
        return from_rows(rows)

    def statistics(self) -> Mapping[str, float]:
        """Requests that run and wait, and blocks of the cache that are taken and that exist."""
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "kv_blocks_used": self._pool.num_blocks - self._pool.free,
            "kv_blocks_total": self._pool.num_blocks,
        }

    def _details(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> OutputDetails | None:
        params: SamplingParams = request.sampling.params
        if token < 0:
            return OutputDetails(
                finish_reason="error",
                error="no token can be sampled: the model's logits are not finite numbers, or every token is forbidden",
            )
        positions = None if logprobs is None else [logprobs]
        if token in self._model.eos_token_ids and not params.ignore_eos:
            return OutputDetails(finish_reason="stop", logprobs=positions)
        if token in params.stop_token_ids:
            return OutputDetails(finish_reason="stop", stop_reason=token, logprobs=positions)
        if len(request.tokens) >= request.limit:
            return OutputDetails(finish_reason="length", logprobs=positions)
        return None if positions is None else OutputDetails(logprobs=positions)

    def _num_blocks(self, layout: KVLayout, model: CausalModel) -> int:
        block_bytes = layout.bytes_per_token * self._block_size
        if self._kv_cache_bytes is not None:
            return self._kv_cache_bytes // block_bytes
        blocks = layout.default_bytes(model.device) // block_bytes
        if model.device.type == "cpu" and self._max_model_len is not None:
            blocks = max(blocks, -(-self._max_model_len // self._block_size))
        longest = self._max_model_len or model.max_length
        return blocks if longest is None else min(blocks, self._max_num_seqs * -(-longest // self._block_size))

    def _length(self, model: CausalModel, capacity: int) -> int:
        """The value of max_model_len for this model, when the cache holds ``capacity`` tokens."""
        length = self._max_model_len
        if length is None:
            if model.max_length is None:
                raise ValueError("max_model_len=None: this model does not say how long a request may be; pass a number")
            length = min(model.max_length, capacity)
        elif model.max_length is not None and length > model.max_length:
            raise ValueError(f"max_model_len={length}: the model is made for at most {model.max_length} tokens")
        if length > capacity or capacity < 2:
            raise ValueError(
                f"the KV cache holds {capacity} tokens, too few for one request of max_model_len={max(length, 2)} "
                "tokens: pass a greater kv_cache_bytes or a smaller max_model_len"
            )
        if model.window is not None and length > model.window:
            raise ValueError(
                f"max_model_len={length}: beyond {model.window} tokens this model needs sliding-window attention or "
                f"rotary frequencies that change, which this engine does not compute; pass max_model_len={model.window}"
            )
        return length

    def _warm_up(self) -> None:
        prompt = [0] * min(_WARM_UP_TOKENS, self._info.max_model_len - 1)
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        self.add_request(EngineRequest(handle=0, prompt_token_ids=prompt, prompt_embeds=None, sampling=params))
        while self.has_work():
            self.step()


def _integer(name: str, value: int, least: int) -> int:
    if type(value) is not int:
        raise TypeError(f"{name}={value!r} ({type(value).__name__}): expected an integer")
    if value < least:
        raise ValueError(f"{name}={value}: expected at least {least}")
    return value


def _model_path(model: str) -> Path | None:
    """The directory, or None for the default model."""
    if not isinstance(model, str):
        raise TypeError(f"model={model!r} ({type(model).__name__}): expected a directory's path, or 'default'")
    if model == "default":
        return None
    path = Path(model).expanduser().absolute()
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is not a directory"
        raise FileNotFoundError(
            f"model={model!r}: {path} {what}; expected a directory with config.json, weights (*.safetensors) and "
            "tokenizer in Hugging Face's format, or 'default' for SmolLM2-135M-Instruct"
        )
    return path


def _torch_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch {torch.__version__} finds no CUDA device here")
    return torch.device(name)
