"""Fixtures of two models: the default one, which is converted into the user's own cache, once for all, and a stand-in
of its vocabulary, for whatever does not depend on what a model says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engines.runs import load, save_stand_in, save_tiny

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
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stand_in(tmp_path_factory.mktemp("stand_in") / "model")


@pytest.fixture(scope="session")
def engine(stand_in: Path, tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    """Steps of at most 16 tokens: every longer prompt comes in pieces."""
    profiles = tmp_path_factory.mktemp("profiles")
    return load(stand_in, max_num_seqs=8, max_num_batched_tokens=16, profile_dir=str(profiles))


@pytest.fixture(scope="session")
def reference(stand_in: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(stand_in, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def expected(reference: Any, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities ``[position, vocab]`` of what follows each token of the prompt."""
    with torch.inference_mode():
        return reference(torch.tensor([prompt])).logits[0].log_softmax(-1)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A small random model, in a directory of the test's own, with tied embeddings."""
    return save_tiny(tmp_path / "model")
