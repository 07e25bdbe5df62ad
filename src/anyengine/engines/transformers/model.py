"""A causal language model of transformers, run on the tokens of many requests at once.

The engine computes plain causal attention and keeps nothing of a request but its keys and values. A model that needs
more is refused when it is loaded, never computed wrongly: by its configuration, and by a first pass that sees what
each attention layer asks for.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from anyengine.engines.transformers import attention
from anyengine.engines.transformers.kv_cache import KVCache, KVLayout
from anyengine.engines.transformers.scheduler import Chunk
from anyengine.errors import RequestError

_HARMLESS_OPTIONS = frozenset({"scaling", "dropout", "is_causal", "position_ids", "sliding_window"})
"""What a layer may hand to its attention: without effect here, or checked on its own."""

_OWN_ATTENTION = "attention that cannot be given from outside"

_NEEDED_ARGUMENTS = ("input_ids", "position_ids", "inputs_embeds", "logits_to_keep")


@dataclasses.dataclass
class _Probe:
    """Stands in for the attention in a first pass, and writes down what the layers ask for."""

    shapes: dict[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict[int, tuple[int, int, int]])
    windows: list[int] = dataclasses.field(default_factory=list[int])
    problems: set[str] = dataclasses.field(default_factory=set[str])

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        layer: int | None = getattr(module, "layer_idx", None)
        if layer is None or layer in self.shapes:
            self.problems.add("attention layers that are not numbered one by one")
        else:
            self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        if mask is not None:
            self.problems.add("an attention mask of its own")
        if options.get("is_causal", getattr(module, "is_causal", True)) is False:
            self.problems.add("attention that is not causal")
        if options.get("sliding_window"):
            self.windows.append(options["sliding_window"])
        for name, option in options.items():
            if name not in _HARMLESS_OPTIONS and option is not None and option is not False:
                self.problems.add(f"the attention option {name!r}")
        return query.new_zeros(query.shape[2], query.shape[1], value.shape[3])


class CausalModel:
    """The model and what the engine has to know of it.

    ``max_length`` is the greatest number of tokens it is made for (None if it does not say), ``window`` the number of
    tokens within which its attention is that of this engine (None if there is no bound).

    :raises ValueError: if it needs something that this engine does not compute
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None, device: torch.device) -> None:
        hf: Any = transformers
        hf.utils.logging.disable_progress_bar()  # stderr is for what a person should read after a crash
        hf.AttentionInterface.register(attention.IMPLEMENTATION, attention.forward)
        config = hf.AutoConfig.from_pretrained(directory, local_files_only=True)
        self._name = f"{config.model_type} model {directory}"
        self._refuse(_config_problems(config.get_text_config()))
        try:
            self._model: Any = hf.AutoModelForCausalLM.from_pretrained(
                directory,
                dtype="auto" if dtype is None else dtype,
                attn_implementation=attention.IMPLEMENTATION,
                local_files_only=True,
            )
        except KeyError as error:
            if error.args != (attention.IMPLEMENTATION,):
                raise
            self._refuse([_OWN_ATTENTION])  # it has a table of attention classes and looked this one up
        self._refuse(_model_problems(self._model))
        self._model.to(device).eval()
        self._config = self._model.config.get_text_config()
        self._embed: Any = self._model.get_input_embeddings()
        self.device = device
        self.dtype: torch.dtype = self._model.dtype
        self.vocab_size: int = self._config.vocab_size
        self._hidden_size: int = self._embed.embedding_dim
        self.max_length: int | None = getattr(self._config, "max_position_embeddings", None)
        self.window: int | None = _rope_window(self._config)
        self.eos_token_ids: frozenset[int] = _token_ids(self._model.generation_config.eos_token_id)

    def probe(self, tokens: int) -> KVLayout:
        """Run ``tokens`` tokens without a cache, to learn what the layers need. Settles ``window``.

        :raises ValueError: if a layer needs something that this engine does not compute
        """
        probe = _Probe()
        positions = torch.arange(tokens, device=self.device) % (self.max_length or tokens)
        try:
            self._run(torch.zeros_like(positions), positions, None, positions[-1:], probe)
        except attention.NotGivenError:
            probe.problems.add(_OWN_ATTENTION)
        expected = set(range(self._config.num_hidden_layers))
        if set(probe.shapes) != expected:
            missing = sorted(expected - set(probe.shapes))
            probe.problems.add(f"layers without attention of this kind (numbers {missing})")
        if len(set(probe.shapes.values())) > 1:
            probe.problems.add(f"layers of different shapes ({sorted(set(probe.shapes.values()))})")
        self._refuse(sorted(probe.problems))
        windows = [*probe.windows, *([] if self.window is None else [self.window]), *_sliding_windows(self._config)]
        self.window = min(windows, default=None)
        heads, key_dim, value_dim = probe.shapes[0]
        return KVLayout(len(probe.shapes), heads, key_dim, value_dim, self.dtype)

    def as_embeds(self, value: Any) -> torch.Tensor:
        """A prompt of embeddings, ``[token, hidden]``: from a tensor, a numpy array or a ``WireArray``.

        :raises RequestError: if it is something else, or has another shape, or holds what is not a finite number
        """
        try:
            embeds = torch.as_tensor(value.to_torch() if hasattr(value, "to_torch") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(f"prompt_embeds cannot become a torch tensor: {error}") from error
        if embeds.ndim != 2 or embeds.shape[1] != self._hidden_size or not embeds.is_floating_point():
            raise RequestError(
                f"prompt_embeds of shape {list(embeds.shape)} and {embeds.dtype}: "
                f"expected [tokens, {self._hidden_size}] of floats"
            )
        embeds = embeds.to(device=self.device, dtype=self.dtype)
        if not embeds.isfinite().all():
            raise RequestError(f"prompt_embeds holds NaN, or numbers that are infinite in {self.dtype}")
        return embeds

    def forward(self, chunks: list[Chunk], cache: KVCache) -> tuple[list[Chunk], torch.Tensor]:
        """Run a step. Returns the chunks from which a token is sampled, and their logits ``[chunk, vocab]``."""
        paged = attention.PagedAttention(chunks, cache)
        tokens: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        sampled: list[Chunk] = []
        embeds: list[tuple[int, torch.Tensor]] = []
        for chunk in paged.chunks:
            request = chunk.request
            if request.embeds is not None and chunk.start < request.prompt_length:
                embeds.append((len(tokens), request.embeds[chunk.start : chunk.stop]))
            tokens += request.tokens[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            if chunk.samples:
                keep.append(len(tokens) - 1)
                sampled.append(chunk)
        ids, places = torch.tensor([tokens, positions], device=self.device)
        inputs = None
        if embeds:
            inputs = self._embed(ids)
            for row, part in embeds:
                inputs[row : row + len(part)] = part
        return sampled, self._run(ids, places, inputs, torch.tensor(keep, device=self.device, dtype=torch.long), paged)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        embeds: torch.Tensor | None,
        keep: torch.Tensor,
        paged: attention.Attention,
    ) -> torch.Tensor:
        inputs = {"input_ids": ids[None]} if embeds is None else {"inputs_embeds": embeds[None]}
        with torch.inference_mode():
            output = self._model(
                **inputs, position_ids=positions[None], logits_to_keep=keep, use_cache=False, paged=paged
            )
        return output.logits[0]

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            raise ValueError(f"the {self._name} needs what this engine does not compute: {'; '.join(problems)}")


def _config_problems(config: Any) -> list[str]:
    features = ("is_encoder_decoder", "attn_logit_softcapping", "attention_chunk_size", "num_kv_shared_layers", "alibi")
    problems = [f"{name}={getattr(config, name)}" for name in features if getattr(config, name, None)]
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return [*problems, *([f"layers of the types {sorted(kinds)} (layer_types)"] if kinds else [])]


def _model_problems(model: Any) -> list[str]:
    problems: list[str] = []
    if model._is_stateful:
        problems.append("a state beside its keys and values (state-space or recurrent layers)")
    arguments = inspect.signature(model.forward).parameters
    problems += [f"a call without {name!r}" for name in _NEEDED_ARGUMENTS if name not in arguments]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in arguments.values()):
        problems.append(_OWN_ATTENTION)
    return problems


def _sliding_windows(config: Any) -> list[int]:
    """The window, if layers of this model look at no more than that many tokens."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return [window] if window and (kinds is None or "sliding_attention" in kinds) else []


def _rope_window(config: Any) -> int | None:
    """The length up to which rotary frequencies do not change with the longest request of a batch."""
    parameters = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    # Models with several kinds of layers have one such mapping for each kind.
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, dict) and cast("dict[str, Any]", entry).get("rope_type") == "longrope":
            return cast("dict[str, Any]", entry)["original_max_position_embeddings"]
    return None


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
