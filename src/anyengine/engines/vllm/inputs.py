"""Prompts with images to token ids and features, by vLLM's own processors.

For the application's process, in which vLLM has to be installed; the engine's does not load this module.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Self
from weakref import WeakKeyDictionary

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

from anyengine.brief import brief
from anyengine.engine.failures import message_of, name_of
from anyengine.engines.transformers.checkpoint import default_model
from anyengine.engines.vllm.features import features_of
from anyengine.engines.vllm.installed import check_arguments, find, require
from anyengine.engines.vllm.parameters import check_model, engine_args
from anyengine.errors import RequestRefusedError
from anyengine.multimodal import MultiModalFeature

_NEEDED = {
    "vllm.renderers:renderer_from_config": (),
    "vllm.renderers:BaseRenderer": ("render_cmpl(skip_mm_cache)",),
    "vllm.renderers.inputs.preprocess:parse_model_prompt": (),
    "vllm.usage.usage_lib:UsageContext": ("ENGINE_CONTEXT",),
}

_limiters: RunVar[WeakKeyDictionary[VllmInputs, anyio.CapacityLimiter]] = RunVar("_limiters")


class VllmInputs:
    """What vLLM does with a prompt before its engine gets it: the tokenizer, the model's processor, the placeholders.

        inputs = await VllmInputs.load(**spec.arguments)
        tokens, features = await inputs.process({"prompt": "USER: <image> ...", "multi_modal_data": {"image": image}})
        completion = await client.generate(tokens, params, features=features)

    Any number of tasks and threads may use it; one prompt is processed at a time, for vLLM's processors are not for
    several threads. What was made of an image is kept for the next prompt with the same, within
    ``mm_processor_cache_gb``.
    """

    def __init__(self, **arguments: Any) -> None:
        """As :meth:`load`, in the caller's thread."""
        check_arguments(arguments)
        check_model(arguments)
        require(_NEEDED)
        # Which engine it is has nothing to do with its inputs, and vLLM would refuse it for a model without experts.
        arguments = {name: value for name, value in arguments.items() if not name.startswith("data_parallel_")}
        if arguments.get("model") == "default":
            arguments["model"] = str(default_model(_report_nothing))
        # Without it vLLM may number items, each process from one on, where it names them by their content otherwise. An
        # engine with several clients would take one's image for another's.
        args = engine_args({**arguments, "enable_prefix_caching": True})
        config = args.create_engine_config(find("vllm.usage.usage_lib:UsageContext").ENGINE_CONTEXT)
        self._model_config: Any = config.model_config
        self._renderer: Any = find("vllm.renderers:renderer_from_config")(config)
        self._lock = threading.Lock()

    @classmethod
    async def load(cls, **arguments: Any) -> Self:
        """Load tokenizer and processor of a model in a worker thread; importing vLLM takes some seconds.

        :param arguments: those of the engine, also of one that is a data-parallel rank: what they say of the model,
            dtype, limits and processors counts here
        :raises ImportError: if vLLM is not installed, or has not what is needed
        :raises TypeError: if vLLM has no such argument
        :raises ValueError: if vLLM refuses an argument
        """
        return await to_thread.run_sync(lambda: cls(**arguments))

    async def process(self, prompt: Mapping[str, Any]) -> tuple[list[int], list[MultiModalFeature]]:
        """Token ids and features of one prompt, made in a worker thread; features are none if it is only text.

        Cancelling it waits for the end of the prompt's own turn, and not for that of others before it.

        :param prompt: as vLLM takes it: ``prompt`` or ``prompt_token_ids``, ``multi_modal_data`` and the like; what is
            the request's own, as ``cache_salt`` and embeddings of a prompt, goes to the request
        :raises TypeError: if the prompt is not a mapping, or vLLM makes a kind of field of it that is not known here
        :raises RequestRefusedError: if vLLM refuses it, or it holds what goes to the request
        """
        return await to_thread.run_sync(self.process_sync, prompt, limiter=self._turns())

    def _turns(self) -> anyio.CapacityLimiter:
        # A limiter belongs to one event loop. Threads that waited for each other at the lock would take up the loop's.
        try:
            limiters = _limiters.get()
        except LookupError:
            _limiters.set(limiters := WeakKeyDictionary())
        return limiters.setdefault(self, anyio.CapacityLimiter(1))

    def process_sync(self, prompt: Mapping[str, Any]) -> tuple[list[int], list[MultiModalFeature]]:
        """As :meth:`process`, in the caller's thread.

        :raises TypeError: if the prompt is not a mapping, or vLLM makes a kind of field of it that is not known here
        :raises RequestRefusedError: if vLLM refuses it, or it holds what goes to the request
        """
        if not isinstance(prompt, Mapping):
            raise TypeError(f"prompt={brief(prompt)} ({type(prompt).__name__}): expected a mapping, as vLLM takes it")
        if prompt.get("cache_salt") is not None:
            raise RequestRefusedError("the prompt holds a cache_salt: pass it to the request, as cache_salt=")
        with self._lock:
            try:
                parsed = find("vllm.renderers.inputs.preprocess:parse_model_prompt")(self._model_config, dict(prompt))
                # The other of vLLM's caches leaves out what it takes the engine to have.
                (rendered,) = self._renderer.render_cmpl([parsed], skip_mm_cache=True)
            except Exception as error:  # assertions too; processors are code of models
                raise RequestRefusedError(f"vLLM refuses the prompt ({name_of(error)}: {message_of(error)})") from error
        if rendered["type"] not in ("token", "multimodal"):
            raise RequestRefusedError(
                f"vLLM makes {rendered['type']!r} of the prompt, not token ids with features; embeddings of a prompt "
                "go to the request, as prompt_embeds="
            )
        return rendered["prompt_token_ids"], features_of(rendered)


def _report_nothing(stage: str, fraction: float | None = None) -> None:
    pass
