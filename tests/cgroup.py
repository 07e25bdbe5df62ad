"""A control group in which a test's program may start no more than so many threads and processes."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOTS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))


@contextlib.contextmanager
def pids_cgroup() -> Iterator[Path]:
    """A new group, to whose ``cgroup.procs`` a program writes itself; where none can be made the test skips."""
    for root in _ROOTS:
        directory = root / f"anyengine-{uuid.uuid4().hex[:8]}"
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            if (directory / "pids.max").exists() and os.access(directory / "pids.max", os.W_OK):
                yield directory
                return
        finally:
            directory.rmdir()
    pytest.skip("no control group with pids.max can be made here")
