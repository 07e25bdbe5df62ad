"""Fixtures of all tiers: the backends, a scripted engine, and the check that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401 - loaded later, it would look for referrers that are frozen by then
import pytest
import uvloop

# uvloop makes one pipe for the whole process with its first loop; that is not a leak of the test that happens to be it.
uvloop.new_event_loop().close()

# Engines are started a thousand times here. Where no bytecode is written, each would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """Keep what is loaded by now, torch and transformers above all, out of every later collection of garbage.

    ``leaves_nothing`` makes one after most tests. It takes 0.2 s with these, and a few milliseconds without.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(
    params=[pytest.param(("asyncio", {}), id="asyncio"), pytest.param(("trio", {}), id="trio")],
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def _descriptors() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _threads() -> set[str]:
    # AnyIO and trio keep idle worker threads for a while, by design.
    return {
        thread.name
        for thread in threading.enumerate()
        if "worker thread" not in thread.name and "Trio" not in thread.name
    }


@pytest.fixture
def leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the test if it leaves a process, thread, descriptor or socket directory behind."""
    tmp_path_factory.getbasetemp()  # pytest's own directory must not be made in the one that is looked at
    before = _descriptors(), _children(), _threads()
    directory = tempfile.mkdtemp(prefix="ae", dir="/tmp")
    previous, tempfile.tempdir = tempfile.tempdir, directory
    try:
        yield
    finally:
        tempfile.tempdir = previous
        files = os.listdir(directory)
        shutil.rmtree(directory)
    deadline = time.monotonic() + 3
    while leaked := (
        {fd: what for fd, what in _descriptors().items() if before[0].get(fd) != what},
        _children() - before[1],
        _threads() - before[2],
        files,
    ):
        if not any(leaked):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: descriptors, children, threads, files: {leaked}")
        # What the loop itself holds, it lets go of when it is collected.
        gc.collect()
        time.sleep(0.01)
