"""An application that a signal ends in the middle: its interpreter ends too, and the engine with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest
from tests.helpers import children_of, is_running, kill, until_sync

PROGRAM = """
import signal, sys
import anyio
from anyengine import ShutdownPolicy, open_engine_client
from anyengine.testing import scripted_spec

def leave(number, frame):
    raise SystemExit(7)

def say(*words):
    print(words[0], flush=True)

async def main():
    spec = scripted_spec(load_seconds=0.1, load_fault="hang" if sys.argv[2] == "loading" else None)
    shutdown = ShutdownPolicy(grace=30, terminate=30)
    async with open_engine_client(spec, on_progress=lambda *_: say("loading"), shutdown=shutdown):
        say("serving")
        if sys.argv[2] == "serving":
            await anyio.sleep_forever()
        await anyio.wait_readable(sys.stdin)
        say("closing")

signal.signal(signal.SIGTERM, leave)
anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("pause", [0.003, 0.05], ids=["3ms", "50ms"])
@pytest.mark.parametrize("moment", ["loading", "serving", "closing"])
def test_two_signals_end_the_interpreter_and_the_engine(anyio_backend: Any, moment: str, pause: float) -> None:
    """The second one comes while the client, which the first one ends, waits for an engine that does not move.

    The first one comes while the loop waits. One that comes in a task's own code is raised there, and the loop ends in
    good order, worker threads and all.
    """
    command = [sys.executable, "-c", PROGRAM, anyio_backend[0], moment]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        assert program.stdin is not None and program.stdout is not None
        engine = 0
        try:
            await_line(program.stdout, "loading" if moment == "loading" else "serving")
            (engine,) = children_of(program.pid)
            kill(engine, signal.SIGSTOP)
            if moment == "closing":
                program.stdin.write(b"x")
                program.stdin.flush()
                await_line(program.stdout, "closing")
            until_sync(lambda: is_waiting(program.pid))
            program.send_signal(signal.SIGTERM)
            time.sleep(pause)
            program.send_signal(signal.SIGTERM)
            program.wait(timeout=20)
            until_sync(lambda: not is_running(engine))
        finally:
            program.kill()
            if engine:
                with contextlib.suppress(ProcessLookupError):
                    kill(engine, signal.SIGKILL)


def is_waiting(pid: int) -> bool:
    """Whether the main thread of a process sleeps in a system call."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"S"


def await_line(output: IO[bytes], line: str) -> None:
    while (found := output.readline()) != f"{line}\n".encode():
        assert found, f"the program ended before it said {line!r}"
