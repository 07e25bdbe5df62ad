"""Opens clients while the system refuses more and more threads and processes. Run by test_few_threads.py.

For each kind of client and each number of threads that may still be started, it prints what became of the client, and
what it left behind.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio

from anyengine import EngineStartError, SamplingParams, ShutdownPolicy, open_engine_client, open_sync_engine_client
from anyengine.testing import scripted_spec

GROUP = Path(sys.argv[1])
BACKEND = sys.argv[2]
PARAMS = SamplingParams(max_tokens=3)


@contextlib.contextmanager
def at_most(more: int | None) -> Iterator[None]:
    """Up to ``more`` threads and processes than there are now; None: not one, even when others have ended."""
    now = int((GROUP / "pids.current").read_text())
    (GROUP / "pids.max").write_text(str(0 if more is None else now + more))
    try:
        yield
    finally:
        (GROUP / "pids.max").write_text("max")


def state() -> tuple[int, int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir(tempfile.gettempdir()))


async def in_process() -> str:
    async with open_engine_client(scripted_spec()) as client:
        return str(len((await client.generate([1], PARAMS)).token_ids))


async def in_thread() -> str:
    async with open_engine_client(scripted_spec(), placement="thread") as client:
        return str(len((await client.generate([1], PARAMS)).token_ids))


def blocking() -> str:
    with open_sync_engine_client(scripted_spec(), backend=BACKEND) as client:  # type: ignore[arg-type]
        return str(len(client.generate([1], PARAMS).token_ids))


async def while_open() -> str:
    """A large frame, and an engine that must be killed: neither needs a thread that was not there before."""
    shutdown = ShutdownPolicy(grace=0.1, terminate=0.1)
    with contextlib.ExitStack() as limited:
        async with open_engine_client(scripted_spec(), shutdown=shutdown) as client:
            limited.enter_context(at_most(None))
            completion = await client.generate(array("I", range(30_000)), PARAMS)
            os.kill(client.health().pid or 0, signal.SIGSTOP)
    return str(len(completion.token_ids))


def report(kind: str, more: int, open_client: Callable[[], str]) -> None:
    before = state()
    try:
        with at_most(more):
            outcome = open_client()
    except (OSError, EngineStartError) as error:
        outcome = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        assert "pids.max of its cgroup is" in str(error), error
    after = state()
    print(kind, more, "clean" if before == after else f"left {before} {after}", outcome, sep=" | ", flush=True)


def main() -> None:
    report("warm", 50, lambda: anyio.run(in_process, backend=BACKEND))
    for more in range(7):
        report("process", more, lambda: anyio.run(in_process, backend=BACKEND))
    for more in range(6):
        report("thread", more, lambda: anyio.run(in_thread, backend=BACKEND))
    for more in range(7):
        report("blocking", more, blocking)
    report("open", 50, lambda: anyio.run(while_open, backend=BACKEND))


main()
