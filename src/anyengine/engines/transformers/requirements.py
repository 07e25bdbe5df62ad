"""What a model needs that this engine does not compute: told by its configuration, its class, and a first pass.

The engine computes plain causal attention and keeps nothing of a request but its keys and values. A model that needs
more is refused when it is loaded, never computed wrongly.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, cast

import torch

_HARMLESS_OPTIONS = frozenset({"scaling", "dropout", "is_causal", "position_ids", "sliding_window"})
"""What a layer may hand to its attention: without effect here, or checked on its own."""

OWN_ATTENTION = "attention that cannot be given from outside"
"""The problem of a model that does not call the attention that it was given."""

_NEEDED_ARGUMENTS = ("input_ids", "position_ids", "inputs_embeds", "logits_to_keep")


@dataclasses.dataclass
class Probe:
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
        """Answer zeros; see :class:`~anyengine.engines.transformers.attention.Attention`."""
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


def config_problems(config: Any) -> list[str]:
    """What a text configuration asks for and this engine does not compute."""
    features = ("is_encoder_decoder", "attn_logit_softcapping", "attention_chunk_size", "num_kv_shared_layers", "alibi")
    problems = [f"{name}={getattr(config, name)}" for name in features if getattr(config, name, None)]
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return [*problems, *([f"layers of the types {sorted(kinds)} (layer_types)"] if kinds else [])]


def model_problems(model: Any) -> list[str]:
    """What keeps a model from being called as this engine calls it."""
    problems: list[str] = []
    if model._is_stateful:
        problems.append("a state beside its keys and values (state-space or recurrent layers)")
    arguments = inspect.signature(model.forward).parameters
    problems += [f"a call without {name!r}" for name in _NEEDED_ARGUMENTS if name not in arguments]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in arguments.values()):
        problems.append(OWN_ATTENTION)
    return problems


def sliding_windows(config: Any) -> list[int]:
    """The window, if layers of this model look at no more than that many tokens."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return [window] if window and (kinds is None or "sliding_attention" in kinds) else []


def rope_window(config: Any) -> int | None:
    """The length up to which rotary frequencies do not change with the longest request of a batch."""
    parameters = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    # Models with several kinds of layers have one such mapping for each kind.
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, dict) and cast("dict[str, Any]", entry).get("rope_type") == "longrope":
            return cast("dict[str, Any]", entry)["original_max_position_embeddings"]
    return None
