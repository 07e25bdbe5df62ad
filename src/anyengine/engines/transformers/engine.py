"""The engine: takes requests, steps the scheduler, the model and the sampler, and says what came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from anyengine.engine.core import EngineRequest, OutputDetails, ProgressReporter, StepOutputs, from_rows
from anyengine.engines.transformers import requests
from anyengine.engines.transformers.arguments import EngineArguments
from anyengine.engines.transformers.checkpoint import default_model
from anyengine.engines.transformers.scheduler import BlockPool, Scheduler
from anyengine.engines.transformers.threads import settle_threads
from anyengine.engines.transformers.utilities import WorkerUtilities
from anyengine.params import SamplingParams
from anyengine.types import EngineInfo

if TYPE_CHECKING:
    from anyengine.engines.transformers.kv_cache import KVCache
    from anyengine.engines.transformers.model import CausalModel
    from anyengine.engines.transformers.sampler import Sampler

_WARM_UP_TOKENS = 16


class TransformersEngine(WorkerUtilities):
    """Continuous batching for a causal language model of transformers, on the CPU or one CUDA device.

    ``model`` is a directory in Hugging Face's format, or ``"default"`` for SmolLM2-135M-Instruct. ``dtype="auto"`` is
    that of the checkpoint, ``device="auto"`` the first CUDA device if there is one. ``max_model_len`` counts prompt and
    completion tokens together and is by default what the model allows and the cache holds. ``max_num_seqs`` requests
    run at once, with ``max_num_batched_tokens`` tokens in a step at most (by default 256 on the CPU, where a longer
    step brings nothing and makes the others wait, and 2048 on CUDA). The KV cache has blocks of ``block_size``
    tokens and takes ``kv_cache_bytes``; the default is 1 GiB (on CUDA nine tenths of what is free), but no more than
    ``max_num_seqs`` requests of full length can use. A request may ask for ``max_logprobs`` log-probabilities at each
    token, -1 being as many as the vocabulary has. ``seed`` seeds the requests that have no seed of their own, and
    ``num_threads`` is the number of CPU threads. None is one for each core that the process's affinity and the CPU
    quotas of its cgroups allow, and fewer while other processes use the cores: torch's threads wait for each other by
    spinning, and one that has lost its core stalls the others. Where the engine shares its process, or the
    environment has settings of OpenMP's threads (``OMP_NUM_THREADS``, ``GOMP_SPINCOUNT``), None is torch's own choice.
    Profiles go into ``profile_dir``, by default ``profiles`` in the directory of converted models.

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
        max_logprobs: int = 20,
        seed: int = 0,
        num_threads: int | None = None,
        profile_dir: str | None = None,
    ) -> None:
        self._arguments = EngineArguments(
            model=model,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            max_logprobs=max_logprobs,
            seed=seed,
            num_threads=num_threads,
            profile_dir=profile_dir,
        )
        self._model: CausalModel
        self._cache: KVCache
        self._sampler: Sampler
        self._scheduler: Scheduler
        self._pool: BlockPool
        self._threads: contextlib.AbstractContextManager[None]
        self._info: EngineInfo

    def load(self, progress: ProgressReporter) -> None:
        """Load the model, allocate the cache and run a first request.

        :raises ValueError: if the model needs what this engine does not compute, or an argument does not fit it
        :raises ModuleNotFoundError: if a package is missing
        """
        progress("importing torch", 0.0)
        try:
            import torch
            import transformers
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"TransformersEngine needs the package {error.name!r}: pip install {error.name}, or all that it needs "
                "by pip install '.[transformers]' in the checkout of anyengine",
                name=error.name,
            ) from error

        from anyengine.engines.transformers import sampler
        from anyengine.engines.transformers.kv_cache import KVCache
        from anyengine.engines.transformers.model import CausalModel
        from anyengine.engines.transformers.profiler import Profiler
        from anyengine.engines.transformers.worker import Worker

        progress("importing torch", 1.0)
        arguments = self._arguments
        device = arguments.torch_device()
        self._threads = settle_threads(
            arguments.num_threads, on_cpu=device.type == "cpu", owns_process=self.owns_process
        )
        directory = arguments.directory or default_model(progress)
        progress("loading weights", 0.0)
        model = CausalModel(directory, None if arguments.dtype == "auto" else getattr(torch, arguments.dtype), device)
        progress("loading weights", 1.0)
        progress("allocating KV cache", 0.0)
        budget, block_size = arguments.batched_tokens(device), arguments.block_size
        # As many tokens as a step can have: on CUDA what this takes stays reserved and is not given to the cache.
        layout = model.probe(budget if device.type == "cuda" else 1)
        num_blocks = arguments.num_blocks(layout, model)
        max_model_len = arguments.length(model, num_blocks * block_size)
        self._model = model
        self._cache = KVCache(layout, num_blocks, block_size, device)
        self._pool = BlockPool(num_blocks)
        self._scheduler = Scheduler(self._pool, block_size, arguments.max_num_seqs, budget)
        self._sampler = sampler.Sampler(model.vocab_size, model.eos_token_ids, device, arguments.seed)
        self._worker = Worker(model, self._cache)
        self._profiler = Profiler(lambda: arguments.profile_directory)
        self._info = EngineInfo(
            engine="transformers",
            version=transformers.__version__,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            dtype=str(model.dtype).removeprefix("torch."),
            num_gpu_blocks=num_blocks,
            block_size=block_size,
            kv_cache_size_tokens=num_blocks * block_size,
            kv_cache_max_concurrency=num_blocks * block_size / max_model_len,
            sampling_parameters=sampler.PARAMETERS,
            supported_tasks=("generate",),
            prompt_embeds=True,
            max_logprobs=arguments.max_logprobs,
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

        :raises RequestRefusedError: if it asks for something that this engine or its model cannot do
        """
        self._scheduler.add(requests.accept(request, self._info, self._model, self._sampler))

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop requests; their blocks are free at once."""
        for handle in handles:
            self._scheduler.remove(handle)

    def has_work(self) -> bool:
        """Whether any request is under way."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def step(self) -> StepOutputs | None:
        """Run one batch; None if it held only parts of prompts.

        :raises RuntimeError: if the engine sleeps
        """
        if not (self._model.is_resident and self._cache.is_allocated):
            raise RuntimeError("step() of an engine that sleeps: wake_up() first")
        with self._threads:
            return self._step()

    def _step(self) -> StepOutputs | None:
        plan = self._scheduler.schedule()
        if not plan.chunks:
            return None
        self._cache.clear(plan.new_blocks)
        logits = self._model.forward(plan.chunks, self._cache)
        for prompt in logits.prompts:
            requests.score_prompt(prompt, self._sampler)
        if not logits.sampled:
            return None
        tokens, logprobs = self._sampler.sample(logits.next, [chunk.request.sampling for chunk in logits.sampled])
        rows: list[tuple[int, list[int], OutputDetails | None]] = []
        for row, (chunk, token) in enumerate(zip(logits.sampled, tokens, strict=True)):
            request = chunk.request
            if token >= 0:
                request.tokens.append(token)
            details = requests.details_of(request, token, logprobs.get(row), self._model.eos_token_ids)
            rows.append((request.handle, [token] if token >= 0 else [], details))
            if details is not None and details.finish_reason is not None:
                self._scheduler.remove(request.handle)
        return from_rows(rows)

    def statistics(self) -> Mapping[str, float]:
        """Requests that run and wait, blocks of the cache that are taken and that exist, and CPU threads."""
        import torch

        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "kv_blocks_used": self._pool.num_blocks - self._pool.free,
            "kv_blocks_total": self._pool.num_blocks,
            "threads": torch.get_num_threads(),
        }

    def sleep(self, level: int) -> None:
        """Give memory back: the KV cache, and at level 1 the device's part of the weights, at level 2 all of it.

        Level 1 moves the weights to the host's memory; an engine on the CPU has them there, so that it gives only the
        cache back. Level 2 drops them, to be read from the checkpoint again. Requests that run are computed again when
        the engine is awake, and go on with the same tokens; what the sampler keeps of each, and a prompt's embeddings,
        stay on the device.

        :raises RuntimeError: if the host has not enough memory for the weights; then nothing has changed
        """
        from anyengine.engines.transformers import memory

        memory.give_back(level, self._model, self._cache)
        self._scheduler.preempt_all()

    def wake_up(self, tags: Sequence[str]) -> None:
        """Bring back ``"weights"`` or ``"kv_cache"``, or both.

        :raises OSError: if dropped weights cannot be read any more
        :raises RuntimeError: if the device has not enough memory, or the checkpoint holds another model now
        """
        from anyengine.engines.transformers import memory

        memory.take_again(tags, self._model, self._cache)

    def _warm_up(self) -> None:
        prompt = [0] * min(_WARM_UP_TOKENS, self._info.max_model_len - 1)
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        self.add_request(EngineRequest(handle=0, prompt_token_ids=prompt, prompt_embeds=None, sampling=params))
        while self.has_work():
            self.step()
