"""The examples that use vLLM run, and show what their docstrings promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.vllm import setups

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


def run(name: str, *words: str) -> str:
    environ = os.environ | setups.environment("uni")
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py", *words],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_deadlines_on_trio() -> None:
    shown = run("vllm_trio")
    assert re.search(r"vLLM [\d.]+: \d+ tokens of KV cache", shown)
    assert len(re.findall(r"s  (?:deadline|finished) +\d+ tokens", shown)) == 8
    assert "{'running': 0" in shown
    assert "'waiting': 0" in shown


def test_embeddings() -> None:
    tasks, shape, *table = run("vllm_embeddings", "--backend", "asyncio").splitlines()
    assert tasks == "tasks: embed, token_embed"
    assert shape == "4 vectors of 576 numbers, torch.float32"
    cosines = [list(map(float, line.split()[:4])) for line in table]
    assert [row[number] for number, row in enumerate(cosines)] == [1.0] * 4
    assert max(cosine for row in cosines for cosine in row if cosine < 1) == cosines[0][1] == cosines[1][0]


def test_an_image(directory: Path, tmp_path: Path) -> None:
    from tests.vllm.image_model import image, make_model

    model, file = tmp_path / "model", tmp_path / "image.png"
    make_model(model, directory)
    image(1).save(file)
    arguments = ("--question", "What is it?", "--backend", "trio")
    shown = run("vllm_image", str(model), str(file), *arguments).splitlines()
    assert re.fullmatch(r"image: 33 of \d\d tokens, from \d on", shown[0])
    assert len("".join(shown[1:])) > 20


def test_structured_outputs() -> None:
    shown = dict(line.split(maxsplit=1) for line in run("vllm_structured", "--backend", "trio").splitlines())
    assert set(json.loads(shown["json"])) == {"name", "age"}
    assert re.fullmatch(r"(Mon|Tues|Fri)day, \d\d:\d\d", shown["regex"])
    assert shown["choice"] in ("positive", "neutral", "negative")
    assert re.fullmatch(r"[1-9]\d \+ [1-9]\d", shown["grammar"])
    assert shown["broken"].startswith("refused: ")
