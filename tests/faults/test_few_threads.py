"""Where the system refuses threads and processes: a client works, or an error names the limit, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cgroup import pids_cgroup

PROGRAM = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


def test_a_client_opens_or_says_what_there_is_too_little_of(anyio_backend: Any, tmp_path: Path) -> None:
    backend = anyio_backend[0]
    with pids_cgroup() as group:
        command = [sys.executable, "-m", "tests.faults.few_threads", str(group), backend]
        done = subprocess.run(
            ["sh", "-c", PROGRAM, str(group), *command],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr  # libzmq ends a process in which it gets no threads by SIGABRT
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    outcomes = {(kind, int(more)): outcome for kind, more, _, outcome in rows}
    assert [row for row in rows if row[2] != "clean"] == []
    for kind, enough in (("process", 5), ("thread", 4), ("blocking", 6), ("open", 50)):
        assert outcomes[kind, enough] == "3", outcomes
    for kind in ("process", "thread", "blocking"):
        assert outcomes[kind, 0].startswith("BlockingIOError: "), outcomes
    assert outcomes["process", 3].startswith("EngineStartError: engine 0 was not started: "), outcomes
