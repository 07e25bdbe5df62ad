"""The layers: what may import what, and what the two processes load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import anyengine


def loaded_by(code: str) -> set[str]:
    code += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "module",
    ["anyengine.engine", "anyengine.engine.__main__", "anyengine.engines.scripted", "anyengine.protocol.messages"],
)
def test_the_engines_process_loads_no_async_library_and_no_client(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert not loaded & {"anyio", "trio", "asyncio", "torch", "numpy", "transformers"}
    code = f"import {module}, sys; print('anyengine.client' in sys.modules, 'anyengine.transport' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_importing_the_package_is_light() -> None:
    assert not loaded_by("import anyengine") & {"anyio", "zmq", "torch", "numpy", "transformers", "cbor2"}
    assert not loaded_by("from anyengine import open_engine_client") & {"torch", "numpy", "transformers", "trio"}


def test_every_public_name_is_there_and_nothing_else() -> None:
    for name in anyengine.__all__:
        assert getattr(anyengine, name) is not None
        assert name in dir(anyengine)
    with pytest.raises(AttributeError, match="no attribute 'open_engine_cliemt'"):
        anyengine.open_engine_cliemt  # noqa: B018
