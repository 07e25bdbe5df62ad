"""The benchmarks run to their end; what they measure is nobody's to assert."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.programs import ROOT
from tests.engines.runs import save_stand_in

ONCE = """
import dataclasses
from benchmarks import __main__ as program
program.QUICK = dataclasses.replace(program.QUICK, rounds=1, work=0.05, latency_rounds=1, idle=0.2)
program.main()
"""
"""The program, which measures each figure a single time."""


@pytest.mark.timeout(180)
def test_the_quick_benchmarks(tmp_path: Path) -> None:
    result = run(tmp_path, "-c", ONCE, "--quick", "--backends", "asyncio")
    assert "targets missed" in result
    units = {figure["unit"] for figure in json.loads((tmp_path / "build/bench.json").read_text())["figures"]}
    assert {"1/s", "GB/s", "us", "ms", "B"} <= units


@pytest.mark.engines
@pytest.mark.timeout(180)
def test_the_benchmark_beside_a_busy_process(tmp_path: Path) -> None:
    model = str(save_stand_in(tmp_path / "model"))
    short = ("--rounds", "1", "--seconds", "0.1", "--settle", "0")
    result = run(tmp_path, "-m", "benchmarks.busy_neighbour", "--model", model, *short)
    assert "alone, 1 request " in result
    assert "beside a busy process, 16 requests" in result


def test_the_benchmark_of_long_prompts(tmp_path: Path) -> None:
    result = run(tmp_path, "-m", "benchmarks.long_prompts", "--rounds", "1", "--tokens", "50000")
    assert "a prompt of 50,000 tokens on trio" in result
    assert "longest wait for a neighbour's output" in result


def run(directory: Path, *arguments: str) -> str:
    """What a program of Python's printed that ran to its end."""
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr
    return result.stdout
