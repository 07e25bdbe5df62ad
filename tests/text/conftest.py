"""The default model's directory, whose tokenizer is the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.programs import default_model_converted

from anyengine.engines.transformers.checkpoint import NAME, cache_directory
from anyengine.text import ModelText

__all__ = ["default_model_converted"]


@pytest.fixture(scope="session")
def model_directory(default_model_converted: None) -> Path:
    return cache_directory() / NAME


@pytest.fixture(scope="session")
def smol(model_directory: Path) -> ModelText:
    return ModelText.load_sync(model_directory)
