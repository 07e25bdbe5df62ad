"""``anyengine keys`` and ``anyengine engine``, as a person types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anyengine import ConnectionKeys, SamplingParams, open_engine_client

PROGRAM = [sys.executable, "-c", "from anyengine.cli import main; main()"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=30, check=False)


def test_keys_are_made_once(tmp_path: Path) -> None:
    path = tmp_path / "engine.keys"
    made = run("keys", str(path))
    assert made.returncode == 0
    assert str(path) in made.stdout
    ConnectionKeys.load(path)
    again = run("keys", str(path))
    assert again.returncode == 1
    assert again.stderr == f"anyengine: {path} cannot be written: File exists\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_engine_command_says_how_it_is_used(words: list[str]) -> None:
    shown = run("engine", *words)
    assert shown.returncode == 0
    assert "usage: anyengine engine" in shown.stdout
    assert "--connect ADDRESS" in shown.stdout


@pytest.mark.anyio
@pytest.mark.usefixtures("leaves_nothing")
async def test_the_command_becomes_the_engine(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    if len(os.fsencode(address)) > 100:
        pytest.skip("the temporary directory's path is too long for a socket")
    words = ["engine", "anyengine.engines.scripted:ScriptedEngine", "vocab_size=77", "--connect", address]
    engine = subprocess.Popen([*PROGRAM, *words], stderr=subprocess.PIPE, text=True)
    with engine:
        async with open_engine_client(address=address) as client:
            assert client.health().pid == engine.pid
            assert client.info.vocab_size == 77
            assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(30) == 0
        assert engine.stderr is not None
        said = engine.stderr.read()
    assert "serves who listens at" in said
    assert "Traceback" not in said
