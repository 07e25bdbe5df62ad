"""The fixture that starts engines by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.attached.hand import Hand


@pytest.fixture
def hand() -> Iterator[Hand]:
    with tempfile.TemporaryDirectory(prefix="attached-") as directory:
        hand = Hand(Path(directory))
        try:
            yield hand
        finally:
            hand.close()
