"""A causal language model of transformers, run on the tokens of many requests at once."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from anyengine.engine.failures import message_of
from anyengine.engines.transformers import attention, requirements
from anyengine.engines.transformers.broken_files import naming_broken_files
from anyengine.engines.transformers.kv_cache import KVCache, KVLayout
from anyengine.engines.transformers.scheduler import Chunk, Request
from anyengine.errors import RequestRefusedError


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogits:
    """Logits ``[token, vocab]`` that a step computed of a prompt's tokens, of which the first is at ``position``."""

    request: Request
    position: int
    logits: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class StepLogits:
    """What one step computed: ``next`` is ``[chunk, vocab]``, one row for each of the chunks ``sampled``."""

    sampled: list[Chunk]
    next: torch.Tensor
    prompts: list[PromptLogits]


class CausalModel:
    """The model and what the engine has to know of it.

    ``module`` is transformers' own model. ``max_length`` is the greatest number of tokens it is made for (None if it
    does not say), ``window`` the number of tokens within which its attention is that of this engine (None if there is
    no bound).

    :raises ValueError: if it needs something that this engine does not compute, or a file is broken
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None, device: torch.device) -> None:
        hf: Any = transformers
        hf.utils.logging.disable_progress_bar()  # stderr is for what a person should read after a crash
        hf.AttentionInterface.register(attention.IMPLEMENTATION, attention.forward)
        with naming_broken_files(directory):
            config = hf.AutoConfig.from_pretrained(directory, local_files_only=True)
        self._name = f"{config.model_type} model {directory}"
        self._refuse(requirements.config_problems(config.get_text_config()))
        self._read = functools.partial(_read, directory, config, "auto" if dtype is None else dtype)
        try:
            with naming_broken_files(directory):
                self.module: Any = self._read()
        except KeyError as error:
            if error.args != (attention.IMPLEMENTATION,):
                raise
            self._refuse([requirements.OWN_ATTENTION])  # it has a table of attention classes and looked this one up
        self._refuse(requirements.model_problems(self.module))
        self.module.to(device)
        self._weights: Literal["resident", "on the host", "dropped"] = "resident"
        self._config = self.module.config.get_text_config()
        self._embed: Any = self.module.get_input_embeddings()
        self.device = device
        self.dtype: torch.dtype = self.module.dtype
        self.vocab_size: int = self._config.vocab_size
        self._hidden_size: int = self._embed.embedding_dim
        self.max_length: int | None = getattr(self._config, "max_position_embeddings", None)
        self.window: int | None = requirements.rope_window(self._config)
        self.eos_token_ids: frozenset[int] = _token_ids(self.module.generation_config.eos_token_id)

    def probe(self, tokens: int) -> KVLayout:
        """Run ``tokens`` tokens without a cache, to learn what the layers need. Settles ``window``.

        :raises ValueError: if a layer needs something that this engine does not compute
        """
        probe = requirements.Probe()
        positions = torch.arange(tokens, device=self.device) % (self.max_length or tokens)
        try:
            self._run(torch.zeros_like(positions), positions, None, positions[-1:], probe)
        except attention.NotGivenError:
            probe.problems.add(requirements.OWN_ATTENTION)
        expected = set(range(self._config.num_hidden_layers))
        if set(probe.shapes) != expected:
            missing = sorted(expected - set(probe.shapes))
            probe.problems.add(f"layers without attention of this kind (numbers {missing})")
        if len(set(probe.shapes.values())) > 1:
            probe.problems.add(f"layers of different shapes ({sorted(set(probe.shapes.values()))})")
        self._refuse(sorted(probe.problems))
        known = [] if self.window is None else [self.window]
        windows = [*probe.windows, *known, *requirements.sliding_windows(self._config)]
        self.window = min(windows, default=None)
        heads, key_dim, value_dim = probe.shapes[0]
        return KVLayout(len(probe.shapes), heads, key_dim, value_dim, self.dtype)

    def as_embeds(self, value: Any) -> torch.Tensor:
        """A prompt of embeddings, ``[token, hidden]``: from a tensor, a numpy array or a ``WireArray``.

        :raises RequestRefusedError: if it is something else, or has another shape, or holds what is not a finite number
        """
        try:
            embeds = torch.as_tensor(value.to_torch() if hasattr(value, "to_torch") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestRefusedError(f"prompt_embeds cannot become a torch tensor: {message_of(error)}") from error
        if embeds.ndim != 2 or embeds.shape[1] != self._hidden_size or not embeds.is_floating_point():
            raise RequestRefusedError(
                f"prompt_embeds of shape {list(embeds.shape)} and {embeds.dtype}: "
                f"expected [tokens, {self._hidden_size}] of floats"
            )
        embeds = embeds.to(device=self.device, dtype=self.dtype)
        if not embeds.isfinite().all():
            raise RequestRefusedError(f"prompt_embeds holds NaN, or numbers that are infinite in {self.dtype}")
        return embeds

    def forward(self, chunks: list[Chunk], cache: KVCache) -> StepLogits:
        """Run a step: logits of the chunks from which a token is sampled, and of prompts that are to be scored."""
        paged = attention.PagedAttention(chunks, cache)
        tokens: list[int] = []
        positions: list[int] = []
        embeds: list[tuple[int, torch.Tensor]] = []
        keep: list[int] = []
        sampled: list[Chunk] = []
        scored: list[tuple[Request, range]] = []
        scored_rows: list[int] = []
        for chunk in paged.chunks:
            request = chunk.request
            if request.embeds is not None and chunk.start < request.prompt_length:
                embeds.append((len(tokens), request.embeds[chunk.start : chunk.stop]))
            if chunk.samples:
                keep.append(len(tokens) + chunk.stop - chunk.start - 1)
                sampled.append(chunk)
            if scores := chunk.scores:
                scored.append((request, scores))
                scored_rows += [len(tokens) + position - 1 - chunk.start for position in scores]
            tokens += request.tokens[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
        ids, places = torch.tensor([tokens, positions], device=self.device)
        inputs = None
        if embeds:
            inputs = self._embed(ids)
            for row, part in embeds:
                inputs[row : row + len(part)] = part
        rows = torch.tensor(keep + scored_rows, device=self.device, dtype=torch.long)
        logits = self._run(ids, places, inputs, rows, paged)
        prompts: list[PromptLogits] = []
        row = len(keep)
        for request, scores in scored:
            prompts.append(PromptLogits(request, scores.start, logits[row : row + len(scores)]))
            row += len(scores)
        return StepLogits(sampled, logits[: len(keep)], prompts)

    @property
    def is_resident(self) -> bool:
        """Whether the weights are where :meth:`forward` can use them."""
        return self._weights == "resident"

    def move_to_host(self) -> None:
        """Move the weights from the device to the host's memory, where they are already if the device is the CPU.

        :raises RuntimeError: if the host has not enough memory; then they are where they were
        """
        if not self.is_resident:
            return
        try:
            self.module.to("cpu")
        except RuntimeError:
            self.module.to(self.device)
            raise
        self._weights = "on the host"

    def drop_weights(self) -> None:
        """Give up the weights. Buffers stay: they are small, and not all of them are in the checkpoint."""
        for parameter in self.module.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self._weights = "dropped"

    def restore(self) -> None:
        """Have the weights on the device again: from the host, or from the checkpoint if they were dropped.

        :raises OSError: if the checkpoint cannot be read any more
        :raises RuntimeError: if it holds another model now, or the device has not enough memory
        """
        if self._weights == "dropped":
            fresh = self._read()
            for name, parameter in self.module.named_parameters():
                parameter.data = fresh.get_parameter(name).data
            self._weights = "on the host"
        self.module.to(self.device)
        self._weights = "resident"

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
            output = self.module(
                **inputs, position_ids=positions[None], logits_to_keep=keep, use_cache=False, paged=paged
            )
        return output.logits[0]

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            raise ValueError(f"the {self._name} needs what this engine does not compute: {'; '.join(problems)}")


def _read(directory: Path, config: Any, dtype: Any) -> Any:
    """The model with its weights, in the host's memory."""
    hf: Any = transformers
    model = hf.AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION, local_files_only=True
    )
    return model.eval().requires_grad_(False)


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
