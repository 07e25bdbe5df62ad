"""Arguments and requests in vLLM's words."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from anyengine.brief import brief
from anyengine.engines.vllm.installed import find
from anyengine.errors import RequestRefusedError
from anyengine.params import LoRARequest, PoolingParams, SamplingParams, StructuredOutputs

_CONFIGURATIONS = {
    "structured_outputs_config": "StructuredOutputsConfig",
    "profiler_config": "ProfilerConfig",
    "kv_transfer_config": "KVTransferConfig",
}
"""Arguments that vLLM's EngineArgs take as objects alone; its LLM makes them of mappings."""


def check_model(arguments: Mapping[str, Any]) -> None:
    """Refuse a model that can only be a path and leads nowhere: vLLM would take it for a name on the hub.

    :raises FileNotFoundError: if there is no such directory or file
    """
    model = arguments.get("model")
    if isinstance(model, str) and model.startswith(("/", "./", "../", "~")) and not os.path.exists(model):
        hint = "; vLLM does not know ~, write the home directory out" if model.startswith("~") else ""
        raise FileNotFoundError(f"model={brief(model)}: there is no such directory{hint}")


def engine_args(arguments: Mapping[str, Any]) -> Any:
    """The arguments as vLLM's EngineArgs.

    :raises ValueError: if vLLM refuses them
    """
    made = {
        name: find(f"vllm.config:{_CONFIGURATIONS[name]}")(**value)
        for name, value in arguments.items()
        if name in _CONFIGURATIONS and isinstance(value, Mapping)
    }
    return find("vllm.engine.arg_utils:EngineArgs")(**{**arguments, **made})


def lora_request(lora: LoRARequest) -> Any:
    """The adapter as vLLM's LoRARequest."""
    return find("vllm.lora.request:LoRARequest")(**dataclasses.asdict(lora))


def pooling_params(params: PoolingParams) -> Any:
    """The parameters as vLLM's PoolingParams."""
    return find("vllm:PoolingParams")(**dataclasses.asdict(params))


def sampling_params(params: SamplingParams) -> Any:
    """The parameters as vLLM's SamplingParams.

    :raises ValueError: if vLLM refuses them
    """
    return find("vllm:SamplingParams")(
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
        output_kind=find("vllm.sampling_params:RequestOutputKind").DELTA,
    )


def _structured_outputs(wanted: StructuredOutputs | None) -> Any:
    if wanted is None:
        return None
    return find("vllm.sampling_params:StructuredOutputsParams")(
        json=wanted.json if wanted.json is None or isinstance(wanted.json, str) else dict(wanted.json),
        regex=wanted.regex,
        choice=None if wanted.choice is None else list(wanted.choice),
        grammar=wanted.grammar,
    )


def embeddings(embeds: Any, model_config: Any) -> Any:
    """A prompt of embeddings as a tensor of the model's type, on the host.

    :raises RequestRefusedError: if the engine takes none, or none like these, or not all are finite
    """
    if not model_config.enable_prompt_embeds:
        raise RequestRefusedError("prompt_embeds: start the engine with enable_prompt_embeds=True")
    tensor: Any = find("torch:as_tensor")(embeds).cpu()
    width = model_config.get_hidden_size()
    if tensor.dim() != 2 or tensor.shape[1] != width or not tensor.is_floating_point():
        raise RequestRefusedError(
            f"prompt_embeds of shape {tuple(tensor.shape)} and {tensor.dtype}: expected tokens x {width} numbers"
        )
    converted = tensor.to(model_config.dtype)
    check_finite("prompt_embeds", converted)
    return converted


def check_finite(what: str, tensor: Any) -> None:
    """Refuse floating numbers that would reach other requests by the KV cache.

    :param tensor: in the type in which the model computes: what is finite in another may be infinite in this
    :raises RequestRefusedError: if one is NaN or infinite
    """
    if not find("torch:isfinite")(tensor).all():
        raise RequestRefusedError(f"{what} hold NaN or infinity as {str(tensor.dtype).removeprefix('torch.')}")
