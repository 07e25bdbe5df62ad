"""Fixtures of the real model. It is converted into the user's own cache, once for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engines.runs import load, save_tiny

from anyengine.engines.transformers import TransformersEngine, default_model

TEXT = (
    "The ferry left at six, and whoever came later had to take the long road around the lake. In winter the road was "
    "closed, so that the village on the other side heard no news until the ice was thick enough for a sledge."
)


@pytest.fixture(scope="session")
def directory() -> Path:
    return default_model(lambda stage, fraction=None: None)


@pytest.fixture(scope="session")
def prompt(directory: Path) -> list[int]:
    tokens = transformers.AutoTokenizer.from_pretrained(directory)(TEXT).input_ids
    assert 40 < len(tokens) < 64
    return tokens


@pytest.fixture(scope="session")
def engine(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    """Steps of at most 16 tokens: every longer prompt comes in pieces."""
    profiles = tmp_path_factory.mktemp("profiles")
    return load(directory, max_num_seqs=8, max_num_batched_tokens=16, profile_dir=str(profiles))


@pytest.fixture(scope="session")
def reference(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def expected(reference: Any, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities ``[position, vocab]`` of what follows each token of the prompt."""
    with torch.inference_mode():
        return reference(torch.tensor([prompt])).logits[0].log_softmax(-1)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A small random model, in a directory of the test's own, with tied embeddings."""
    return save_tiny(tmp_path / "model")
