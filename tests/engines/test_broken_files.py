"""A model of which a file is broken: the error names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engines.runs import load

from anyengine.engines.transformers.broken_files import broken_file


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("model.safetensors", lambda data: data[: len(data) // 2]),
        ("model.safetensors", lambda data: b""),
        ("model.safetensors", lambda data: b"not weights at all"),
        ("config.json", lambda data: data[:20]),
        ("config.json", lambda data: b"\xff\xfe"),
    ],
)
def test_it_is_named(tiny: Path, name: str, spoil: Callable[[bytes], bytes]) -> None:
    assert broken_file(tiny) is None
    file = tiny / name
    file.write_bytes(spoil(file.read_bytes()))
    assert str(file) in (broken_file(tiny) or "")
    with pytest.raises(ValueError, match=rf"{name} is broken: "):
        load(tiny)


def test_a_file_that_is_not_the_models_is_blamed_for_nothing(tiny: Path) -> None:
    (tiny / "notes.json").write_text("")
    (tiny / "dataset.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert broken_file(tiny) is None


def test_weights_in_torchs_own_format_are_named_too(tiny: Path) -> None:
    file = tiny / "pytorch_model.bin"
    file.write_bytes(b"not weights at all")
    assert (broken_file(tiny) or "").startswith(f"{file} is broken: ")
