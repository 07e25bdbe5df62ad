"""What the examples with vLLM share: arguments for a small machine, and a model's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

SMALL = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 1024, "enforce_eager": True}
"""Arguments of vLLM's EngineArgs: no compilation and few requests, so that it starts in seconds."""


def text_model(model: str) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    """How the model's text becomes tokens, and back. Call it when the engine is ready: it has fetched the files."""
    from transformers import AutoTokenizer

    from anyengine.engines.transformers import default_model

    directory = default_model(lambda stage, fraction=None: None) if model == "default" else model
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return tokenizer.encode, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)
