"""A block that is taken for the client it gives says that it has to be entered."""

from __future__ import annotations

from typing import Any

import pytest

from anyengine import open_engine_client, open_sync_engine_client
from anyengine.testing import scripted_spec


@pytest.mark.parametrize(
    ("block", "name", "how"),
    [
        (open_engine_client(scripted_spec()), "generate", "async with open_engine_client(...) as client: client.gen"),
        (open_engine_client(scripted_spec()), "info", "async with .* client.info"),
        (open_sync_engine_client(scripted_spec()), "stream", "with open_sync_engine_client(...) as client: client.str"),
        (open_sync_engine_client(scripted_spec()), "generate_many", "client.generate_many"),
    ],
)
def test_what_the_client_has(block: Any, name: str, how: str) -> None:
    with pytest.raises(AttributeError, match=how.replace("(...)", r"\(\.\.\.\)")) as caught:
        getattr(block, name)
    assert f"'{type(block).__name__}' object has no attribute {name!r}" in str(caught.value)


@pytest.mark.parametrize("block", [open_engine_client(scripted_spec()), open_sync_engine_client(scripted_spec())])
def test_what_nobody_has(block: Any) -> None:
    for name in ("genrate", "_portal_", "__len__"):
        with pytest.raises(AttributeError) as caught:
            getattr(block, name)
        assert str(caught.value).endswith(f"no attribute {name!r}")
        assert not hasattr(block, name)
