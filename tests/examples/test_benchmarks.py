"""The benchmarks run to their end; what they measure is nobody's to assert."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.programs import ROOT


@pytest.mark.timeout(180)
def test_the_quick_benchmarks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--backends", "asyncio"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr
    assert "targets missed" in result.stdout
    units = {figure["unit"] for figure in json.loads((tmp_path / "build/bench.json").read_text())["figures"]}
    assert {"1/s", "GB/s", "us", "ms", "B"} <= units
