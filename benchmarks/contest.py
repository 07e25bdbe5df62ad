"""Contestants that take turns: A B C A B C ..., so that whatever else the machine does hits all of them alike."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self


class Contestant:
    """A worker process: ``module``, told the contestant's name, such as ``"ours"``, and its event loop."""

    def __init__(self, name: str, backend: str, module: str = "benchmarks.worker") -> None:
        self.name = name
        self.backend = backend
        self.key = f"{name}/{backend}"
        command = [sys.executable, "-m", module, name, backend]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pids: list[int] = self._read()

    def run(self, command: str, **arguments: Any) -> Any:
        """Run one command and return its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.key} ended with status {self._process.wait()}; its traceback is above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def take_turns(contestants: Sequence[Contestant], rounds: int, command: str, **arguments: Any) -> dict[str, list[Any]]:
    """``command`` by each contestant in each round; every other round in reverse order. Results by contestant."""
    results: dict[str, list[Any]] = {contestant.key: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants if number % 2 == 0 else reversed(contestants):
            results[contestant.key].append(contestant.run(command, **arguments))
    return results


def column(results: dict[str, list[dict[str, float]]], name: str) -> dict[str, list[float]]:
    """One figure of results that have several."""
    return {key: [result[name] for result in rounds] for key, rounds in results.items()}


def medians(slices: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """The median of each slice."""
    return {key: [statistics.median(part) for part in parts] for key, parts in slices.items()}
