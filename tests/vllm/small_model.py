"""A language model of two layers with random weights, with heads for two workers, which the default model has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def make_small_model(directory: Path, text_model: Path) -> Path:
    """Write a model's directory, which is returned.

    :param text_model: a model whose tokenizer it takes
    """
    tokenizer = AutoTokenizer.from_pretrained(text_model)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=49152,
        max_position_embeddings=1024,
        **{name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    save_random(LlamaForCausalLM, config, directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_random(model_class: Any, config: Any, directory: Path) -> None:
    """Write a model with weights that are random, always the same, and large enough for tokens to differ."""
    torch.manual_seed(0)
    model = model_class(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15)
    model.save_pretrained(directory)
