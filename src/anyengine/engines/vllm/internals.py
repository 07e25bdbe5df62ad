"""All that this adapter knows of vLLM's insides: how its EngineCore is built, fed, stepped and taken down."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyengine.engine.core import EngineRequest
from anyengine.engine.failures import message_of
from anyengine.engines.vllm.adapters import SPARE_PLACES, Adapters
from anyengine.engines.vllm.calls import call_workers, with_guarded_calls
from anyengine.engines.vllm.experts import check_experts
from anyengine.engines.vllm.features import engine_input, tokens_beside
from anyengine.engines.vllm.installed import find, import_vllm
from anyengine.engines.vllm.leftovers import files_in, scratch_directory, start_resource_tracker
from anyengine.engines.vllm.loading import LoadProgress, with_stages
from anyengine.engines.vllm.model_features import ModelFeatures
from anyengine.engines.vllm.outputs import FailedRow
from anyengine.engines.vllm.parameters import embeddings, engine_args, pooling_params, sampling_params
from anyengine.engines.vllm.ranks import Rank
from anyengine.errors import RequestRefusedError
from anyengine.multimodal import MultiModalFeature
from anyengine.params import SamplingParams
from anyengine.types import EngineInfo


class VllmCore:
    """vLLM's EngineCore with its scheduler and executor, and the checks that vLLM does in its client.

    Requests go in as vLLM's client would send them; what comes out of a step is vLLM's ``EngineCoreOutput``. All
    methods are for one thread.

    :param rank: which of several engines it is
    :param on_failure: called, from any thread, when the executor has failed for good
    """

    def __init__(
        self, arguments: Mapping[str, Any], rank: Rank, progress: LoadProgress, on_failure: Callable[[], None]
    ) -> None:
        self._rank = rank
        progress.stage("importing vllm")
        self._version = import_vllm()
        progress.stage("reading configuration")
        # The cache of processed items lies between vLLM's client and its engine, each of which has half of it. Here
        # every item comes with its data, and `inputs` caches what it has processed.
        args = engine_args({**arguments, "mm_processor_cache_gb": 0})
        usage = find("vllm.usage.usage_lib:UsageContext").ENGINE_CONTEXT
        self.config: Any = args.create_engine_config(usage)
        check_experts(self.config)
        rank.apply_to(self.config)
        # Configurations that come with a model's own code are to reach worker processes.
        find("vllm.transformers_utils.config:maybe_register_config_serialize_by_value")()
        progress.stage("loading tokenizer")
        self._processor: Any = find("vllm.v1.engine.input_processor:InputProcessor")(self.config)
        self._features = self._model_features()
        lora = self.config.lora_config
        places, capacity = (lora.max_loras, lora.max_cpu_loras) if lora is not None else (0, 0)
        if lora is not None:
            lora.max_cpu_loras += SPARE_PLACES
        executor_class = with_guarded_calls(find("vllm.v1.executor:Executor").get_class(self.config))
        executor_class = with_stages(executor_class, progress)
        if self.config.parallel_config.distributed_executor_backend != "uni":
            start_resource_tracker()
        with scratch_directory() as directory, files_in(directory, self.config):
            self.core: Any = find("vllm.v1.engine.core:EngineCore")(
                self.config,
                executor_class,
                log_stats=not args.disable_log_stats,
                executor_fail_callback=on_failure,
            )
        self.adapters: Adapters = Adapters(self._call_workers, places, capacity)
        # vLLM makes them from a set, whose order changes from process to process.
        self._tasks: Sequence[str] = tuple(sorted(self.core.get_supported_tasks()))
        self._prefix_queries: int = 0
        self._prefix_hits: int = 0

    @property
    def executor(self) -> Any:
        """What runs the model; its ``collective_rpc`` reaches all workers."""
        return self.core.model_executor

    @property
    def workers(self) -> Sequence[Any]:
        """The worker processes, if there are any."""
        return [worker.proc for worker in getattr(self.executor, "workers", None) or () if hasattr(worker, "proc")]

    @property
    def executor_failed(self) -> bool:
        """Whether vLLM has given the executor up."""
        return getattr(self.executor, "is_failed", False)

    @property
    def can_sleep(self) -> bool:
        """Whether it was built to; vLLM refuses that on platforms that cannot."""
        return bool(self._model.enable_sleep_mode)

    @property
    def can_profile(self) -> bool:
        """Whether a profiler was configured."""
        return getattr(self.config.profiler_config, "profiler", None) is not None

    @property
    def has_lora(self) -> bool:
        """Whether LoRA is enabled."""
        return self.config.lora_config is not None

    def describe(self) -> EngineInfo:
        """What vLLM's own handshake says, which is silent about the number of independent ranks."""
        model, cache, parallel = self._model, self.config.cache_config, self.config.parallel_config
        return EngineInfo(
            engine="vllm",
            version=self._version,
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            dtype=str(model.dtype).removeprefix("torch."),
            num_gpu_blocks=cache.num_gpu_blocks or None,
            block_size=cache.block_size,
            kv_cache_size_tokens=getattr(cache, "kv_cache_size_tokens", None),
            kv_cache_max_concurrency=getattr(cache, "kv_cache_max_concurrency", None),
            world_size=parallel.world_size,
            data_parallel_size=self._rank.size,
            data_parallel_rank=self._rank.number,
            supported_tasks=self._tasks,
            sampling_parameters=(
                [field.name for field in dataclasses.fields(SamplingParams)] if "generate" in self._tasks else ()
            ),
            request_options=self._request_options(),
            prompt_embeds=model.enable_prompt_embeds,
            max_logprobs=model.max_logprobs,
        )

    def _request_options(self) -> Sequence[str]:
        options = ["cache_salt"]
        if self.config.scheduler_config.policy == "priority":
            options.append("priority")  # another scheduler would take it and look away
        if self.has_lora:
            options.append("lora")
        if self._features is not None:
            options.append("features")
        return options

    # ---- requests ----

    def add(self, request: EngineRequest) -> None:
        """Check a request as vLLM's client does, and queue it.

        :raises RequestRefusedError: if it asks for something that this model or engine cannot do
        """
        if request.sampling.seed is not None and not self._seeds_are_safe:
            raise RequestRefusedError(
                "SamplingParams.seed: on this device vLLM cannot take back a random number that it drew for a part of "
                "a prompt, and would end with all requests; start the engine with enable_chunked_prefill=False"
            )
        try:
            prepared = self._processor.process_inputs(
                str(request.handle),
                self._prompt(request),
                sampling_params(request.sampling) if request.pooling is None else pooling_params(request.pooling),
                self._tasks,
                arrival_time=time.time(),
                lora_request=None if request.lora is None else self.adapters.for_vllm(request.lora),
                priority=request.priority,
            )
        except (ValueError, TypeError, NotImplementedError, find("vllm.exceptions:VLLMClientError")) as error:
            raise RequestRefusedError(message_of(error)) from error
        enqueue = functools.partial(self.core.add_request, *self.core.preprocess_add_request(prepared))
        if request.lora is None:
            enqueue()
        else:
            self.adapters.add(str(request.handle), request.lora, enqueue, request.priority)

    def abort(self, handles: Sequence[int]) -> None:
        """Drop requests; nothing comes of them any more."""
        ids = [str(handle) for handle in handles]
        if self.adapters:
            self.adapters.end(ids)
        self.core.abort_requests(ids)

    def _prompt(self, request: EngineRequest) -> dict[str, Any]:
        salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
        if request.prompt_embeds is not None:
            return {"type": "embeds", "prompt_embeds": embeddings(request.prompt_embeds, self._model), **salt}
        import numpy

        # A list is what vLLM wants, which takes some 15 ms for a million tokens, in which no step is made.
        ids = numpy.asarray(request.prompt_token_ids or (), dtype=numpy.uint32)
        tokens: list[int] = ids.tolist()
        if request.features:
            return {**self._multimodal(tokens, request.features), **salt}
        self._check_largest(int(ids.max(initial=0)))
        return {"type": "token", "prompt_token_ids": tokens, **salt}

    def _model_features(self) -> ModelFeatures | None:
        # An encoder's tokens are no part of the prompt where there is a decoder beside it.
        if not self._processor.supports_mm_inputs or self._model.is_encoder_decoder:
            return None
        return ModelFeatures(self.config, self._processor.renderer.get_mm_processor())

    def _multimodal(self, tokens: list[int], features: Sequence[MultiModalFeature]) -> dict[str, Any]:
        if self._features is None:
            raise RequestRefusedError("features: this model takes none")
        features = self._features.fitted(features)
        # What an encoder's output takes the place of may be a number that the model has no token for.
        self._check_largest(max(tokens_beside(tokens, features), default=0))
        return engine_input(tokens, features, self._model.dtype)

    def _check_largest(self, token: int) -> None:
        # Without a tokenizer vLLM does not look, and a token that the model does not have ends the engine.
        if token >= (size := self._model.get_vocab_size()):
            raise RequestRefusedError(f"the prompt holds token {token}: the model has {size} tokens")

    @functools.cached_property
    def _seeds_are_safe(self) -> bool:
        # For a part of a prompt that is not the last, vLLM samples a token, drops it and rewinds the request's
        # generator, which the generator of a CPU refuses. Another device's is not tried: in this process it might take
        # memory of that device.
        if not self.config.scheduler_config.enable_chunked_prefill or self.config.device_config.device_type != "cpu":
            return True
        try:
            find("torch:Generator")().get_offset()
        except RuntimeError:
            return False
        return True

    @property
    def _model(self) -> Any:
        return self.config.model_config

    # ---- steps ----

    @property
    def has_batches(self) -> bool:
        """Whether batches are under way whose results have not been taken."""
        return bool(self.core.batch_queue)

    def has_work(self) -> bool:
        """Whether there is anything to schedule, to tell the workers, or to take from them."""
        return bool(self.core.batch_queue) or self.core.scheduler.has_requests() or self.adapters.held > 0

    def step(self) -> Sequence[Any]:
        """Do what vLLM's own loop does in a turn; a row for each request of which there is anything to say."""
        if not self.adapters:
            return self._turn()
        failed = self.adapters.admit()
        if failed:
            self.core.abort_requests(list(failed))
        rows = self._turn()
        return [*(FailedRow(*each) for each in failed.items()), *rows] if failed else rows

    def _turn(self) -> Sequence[Any]:
        by_client: Mapping[int, Any] | None
        by_client, executed = self.core.step_fn()
        self.core.post_step(executed)
        if not executed and self.core.scheduler.has_requests():
            time.sleep(0.001)  # what is waited for (a grammar, a transfer) needs the GIL
        if not by_client:
            return ()
        outputs = by_client[0]
        stats = outputs.scheduler_stats
        if stats is not None and stats.prefix_cache_stats is not None:
            self._prefix_queries += stats.prefix_cache_stats.queries
            self._prefix_hits += stats.prefix_cache_stats.hits
        if self.adapters:
            self.adapters.end([row.request_id for row in outputs.outputs if row.finish_reason is not None])
        return outputs.outputs

    def drain(self) -> Sequence[Any]:
        """Take the results of the batches that are under way, and begin no other; rows as from :meth:`step`.

        Nothing runs on the devices afterwards, if this version of vLLM can wait for them.
        """
        state = find("vllm.v1.core.sched.interface:PauseState")
        rows: list[Any] = []
        self.core.scheduler.set_pause_state(state.PAUSED_ALL)
        try:
            while self.has_batches:
                rows += self._turn()
        finally:
            self.core.scheduler.set_pause_state(state.UNPAUSED)
        if hasattr(find("vllm.v1.worker.worker_base:WorkerBase"), "synchronize_device"):
            self.executor.collective_rpc("synchronize_device")
        return rows

    def statistics(self) -> Mapping[str, float]:
        """Requests that run and wait, how much of the KV cache is taken, and tokens looked for and found in it."""
        scheduler = self.core.scheduler
        running: int
        waiting: int
        running, waiting = scheduler.get_request_counts()
        return {
            "running": running,
            "waiting": waiting + self.adapters.held,
            "kv_cache_usage": scheduler.get_kv_cache_usage(),
            "prefix_cache_queries": self._prefix_queries,
            "prefix_cache_hits": self._prefix_hits,
        }

    def call_workers(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a method of each worker, or an importable function on it; what each has returned.

        :raises WorkerCallError: if one has failed
        :raises UnencodableError: if what one has returned cannot travel
        """
        self.adapters.distrust()
        return call_workers(self.executor, method, args, kwargs)

    def _call_workers(self, method: str, *args: Any) -> Sequence[Any]:
        return self.executor.collective_rpc(method, args=args)

    # ---- memory ----

    def sleep(self, level: int) -> None:
        """Drop what the KV cache holds, and give memory back. Requests that run begin anew.

        :raises RuntimeError: if a connector keeps what it holds of the cache; nothing sleeps then
        :raises Exception: what vLLM raised
        """
        is_reset = self.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if not is_reset and self.config.kv_transfer_config is not None:
            raise RuntimeError("the KV connector could not reset its cache")
        self.core.reset_mm_cache()
        self.core.reset_encoder_cache()
        if level == 2:
            # They lie in memory that is dropped with the weights. Some versions drop them when weights are read again,
            # others go on with whatever is in that memory then.
            self.adapters.unload_all()
        self.executor.sleep(level)

    def wake_up(self, tags: Sequence[str], reload_weights: bool) -> None:
        """Take memory again; weights that were dropped are read from the checkpoint."""
        self.executor.wake_up(list(tags))
        if reload_weights:
            self.executor.collective_rpc("reload_weights")

    def shutdown(self) -> None:
        """End the workers and free what they hold."""
        self._processor.renderer.shutdown()
        if self.workers:
            # When they have let go of what outlives them, there is nothing left to do for them. vLLM would wait for
            # Python to take each process apart, which takes seconds with torch in it.
            self.core.collective_rpc("shutdown")
            for worker in self.workers:
                worker.kill()
        self.core.shutdown()
