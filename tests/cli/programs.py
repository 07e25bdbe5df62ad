"""Programs under test, each in a sandbox that knows what it leaves behind: processes, and files for temporary use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import is_running, until_sync

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-c", "from anyengine.cli import main; main()"]
"""The command line, by the function that the ``anyengine`` script calls."""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Sandbox:
    """Starts programs with a mark in their environment, which everything that they start inherits."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ae", dir="/tmp"))  # short: sockets are made below it
        self._mark = f"ANYENGINE_TEST_MARK={uuid.uuid4().hex}".encode()
        name, _, value = self._mark.decode().partition("=")
        self.environment = {
            **{key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "COLUMNS")},
            name: value,
            "TMPDIR": str(self.directory),
            "TERM": "xterm-256color",
            # Threads of torch that wait for each other by spinning are ten times slower beside a busy process.
            "OMP_WAIT_POLICY": "passive",
        }
        self._started: list[subprocess.Popen[str]] = []

    def processes(self) -> set[int]:
        """All living processes with the mark."""
        found: set[int] = set()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark in (path / "environ").read_bytes().split(b"\0") and is_running(int(path.name)):
                    found.add(int(path.name))
        return found

    def engine(self, process: subprocess.Popen[Any]) -> int:
        """The pid of the engine that ``process`` has started, once there is one."""
        until_sync(lambda: self.processes() - {process.pid}, 30)
        return min(self.processes() - {process.pid})

    def start(self, arguments: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program with pipes for its output."""
        defaults = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            arguments,
            **{**defaults, **options},
            text=True,
            env=self.environment,
            cwd=ROOT,
            preexec_fn=_default_signals,
        )
        self._started.append(process)
        return process

    def run(self, arguments: list[str], timeout: float = 90, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        process = self.start(arguments, **options)
        stdout, stderr = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def close(self) -> None:
        """Fail if anything is left, but take it away first."""
        leaked = self.processes()
        deadline = time.monotonic() + 3
        while leaked and time.monotonic() < deadline:
            time.sleep(0.01)
            leaked = self.processes()
        for pid in leaked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait(10)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        files = os.listdir(self.directory)
        shutil.rmtree(self.directory)
        assert not leaked, f"processes are left: {leaked}"
        files = [name for name in files if not name.startswith("torchinductor_")]  # torch's own cache
        assert not files, f"files are left: {files}"


def _default_signals() -> None:
    # If this suite runs in a shell's background, children would inherit that SIGINT is ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox()
    try:
        yield box
    finally:
        box.close()


class Terminal:
    """A program on a terminal of its own: what it shows, and keys to press."""

    def __init__(self, sandbox: Sandbox, arguments: list[str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            _default_signals()

        self.process = subprocess.Popen(
            arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=sandbox.environment,
            cwd=ROOT,
            preexec_fn=own_terminal,
        )
        os.close(slave)
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def expect(self, pattern: str, timeout: float = 60) -> None:
        """Read until ``pattern`` was shown."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.shown):
            if not self._read(deadline):
                pytest.fail(f"{pattern!r} did not come; shown was {self.shown!r}")

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    @property
    def text(self) -> str:
        """What was shown, without colours and cursor movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown)

    def wait(self, timeout: float) -> int:
        """Read to the end of the program; its exit code."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        return self.process.wait(max(0.0, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        readable, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._master, 65536) if readable else b""
        except OSError:  # EIO: nobody has the terminal open any more
            data = b""
        self.shown += data.decode(errors="replace")
        return bool(data)


@pytest.fixture(scope="session")
def default_model_converted() -> None:
    """Convert the default model, if nobody has done it before, in a process that may import torch."""
    code = "from anyengine.engines.transformers import default_model; default_model(lambda *_: None)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
