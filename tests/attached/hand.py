"""Engines that are started by hand, as a person in another terminal or a service manager would."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from anyengine import ConnectionKeys

SCRIPTED = "anyengine.engines.scripted:ScriptedEngine"


class Hand:
    """Starts engines, and ends what still runs of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.keys = directory / "keys"
        ConnectionKeys.generate().save(self.keys)
        self._engines: list[subprocess.Popen[str]] = []
        self._stack = contextlib.ExitStack()

    def address(self, name: str = "engine") -> str:
        return f"ipc://{self.directory}/{name}"

    def start(self, *words: str, connect: str | None = None, spec: str = SCRIPTED) -> subprocess.Popen[str]:
        log = self._stack.enter_context((self.directory / f"log-{len(self._engines)}").open("w+"))
        engine = subprocess.Popen(
            [sys.executable, "-m", "anyengine.engine.attach", spec, "--connect", connect or self.address(), *words],
            stderr=log,
            stdout=log,
            text=True,
            start_new_session=True,
        )
        self._engines.append(engine)
        return engine

    def log(self, engine: subprocess.Popen[str]) -> str:
        return (self.directory / f"log-{self._engines.index(engine)}").read_text()

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
            engine.wait()
        self._stack.close()
