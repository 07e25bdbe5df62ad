"""How the engines of this tier are set up: small, on the CPU, in an environment that vLLM knows by its variables."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

from tests.helpers import children_of, is_running

from anyengine import EngineSpec, ProcessLauncher, ShutdownPolicy

Topology = Literal["uni", "mp"]
"""Where the model is: in the engine's own process, as on one GPU, or in a worker process below it."""

PATH = "anyengine.engines.vllm:VllmEngine"

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # With two threads on two processors, one busy process beside makes vLLM many times slower.
    "OMP_NUM_THREADS": "1",
}
UNI = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

ARGUMENTS = {
    "model": "default",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "enable_chunked_prefill": False,  # on the CPU vLLM has seeded requests only without
}

CLOSE = ShutdownPolicy(grace=10)
"""Longer than any machine needs, so that a test sees what is left by an engine that ends by itself."""


def spec(topology: Topology = "uni", **arguments: Any) -> EngineSpec:
    """An engine in one of the topologies."""
    return EngineSpec(PATH, {**ARGUMENTS, "distributed_executor_backend": topology, **arguments})


def environment(topology: Topology) -> dict[str, str]:
    """What its process needs."""
    return ENVIRONMENT | (UNI if topology == "uni" else {})


class Traces:
    """What engines leave on the host: processes, shared memory, and files in their directory for temporary ones."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pids: set[int] = set()
        self._segments: set[str] = set()

    def launcher(self, topology: Topology = "uni", **more: str) -> ProcessLauncher:
        """Starts engines whose temporary files are looked at."""
        return ProcessLauncher(environment=environment(topology) | {"TMPDIR": str(self.directory)} | more)

    def look(self, pid: int) -> list[int]:
        """Remember all that a living engine has; the pids of its workers."""
        pids = [pid, *_descendants(pid)]
        self._pids |= set(pids)
        for each in pids:
            maps = Path(f"/proc/{each}/maps").read_text()
            self._segments |= set(re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE))  # the rest is " (deleted)"
        return [each for each in pids if b"Worker" in _command(each)]

    def look_at_workers(self, pid: int) -> list[int]:
        """Remember the worker processes that an engine has by now, ready or not; their pids."""
        workers = [
            each
            for each in _descendants(pid)
            if re.search(rb"spawn_main|Worker", _command(each))  # by its name when it has one
        ]
        self._pids |= set(workers)
        return workers

    @property
    def has_segments(self) -> bool:
        return bool(self._segments)

    def left(self) -> list[str]:
        """What is still there."""
        files = [str(file) for file in self.directory.rglob("*") if "torchinductor" not in str(file)]
        segments = [segment for segment in self._segments if os.path.exists(segment)]
        return files + segments + [f"process {pid}" for pid in self._pids if is_running(pid)]

    def expect_none(self, limit: float = 10) -> None:
        """Fail if there is anything after ``limit`` seconds: who cleans up after a kill takes a moment."""
        deadline = time.monotonic() + limit
        while left := self.left():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.02)


@contextlib.contextmanager
def traces() -> Generator[Traces]:
    """In a directory with a short path, since sockets have to fit in it."""
    directory = Path(tempfile.mkdtemp(prefix="aev", dir="/tmp"))
    try:
        yield Traces(directory)
    finally:
        shutil.rmtree(directory)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _descendants(pid: int) -> list[int]:
    found = children_of(pid)
    return found + [each for child in found for each in _descendants(child)]


@contextlib.contextmanager
def standing_engine(topology: Topology = "uni", **arguments: Any) -> Generator[str]:
    """An engine that tests attach to, each with a backend of its own; the address at which it looks for them."""
    with traces() as place:
        address = f"ipc://{place.directory}/engine"
        words = [f"{name}={_word(value)}" for name, value in spec(topology, **arguments).arguments.items()]
        command = [sys.executable, "-m", "anyengine.engine.attach", PATH, *words, "--connect", address]
        environ = os.environ | environment(topology)
        with (place.directory / "log").open("w") as log:
            engine = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            yield address
        finally:
            engine.terminate()
            try:
                engine.wait(timeout=20)
            except subprocess.TimeoutExpired:
                engine.kill()
                engine.wait()


def _word(value: object) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
