"""What a container refuses: engines run without it, or one error names it; the first process keeps no zombies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import sandbox
from tests.helpers import is_running, until_sync

ROOT = Path(__file__).parents[2]

filtered = pytest.mark.skipif(not sandbox.SUPPORTED, reason=sandbox.REASON)
own_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="namespaces need root and unshare"
)


def run(*command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command; its temporary files are in ``directory``."""
    environment = {**os.environ, "TMPDIR": str(directory)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


# ---- system calls ----


@filtered
@pytest.mark.parametrize(
    "rules",
    [
        ["pidfd_open:EPERM"],
        ["pidfd_open:ENOSYS", "waitid:EPERM", "memfd_create:EACCES", "sched_yield:EPERM"],
        [
            "pidfd_open:EMFILE",
            "fcntl=10:EPERM",
            "socketpair=5:EPERM",
            "sigaltstack:EPERM",
            "chmod:EPERM",
            "prctl:EPERM",
        ],
    ],
    ids="+".join,
)
def test_an_engine_needs_none_of_these_system_calls(rules: list[str], anyio_backend: Any, tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "tests.faults.sandboxed", anyio_backend[0], "ipc", *rules, directory=tmp_path)
    assert done.returncode == 7, done.stderr
    *lines, engine = done.stdout.splitlines()
    assert lines == ["[2, 3]", "5000000", "9 at once", "[2, 3]"], done.stderr
    until_sync(lambda: not is_running(int(engine)), 5)


@filtered
@pytest.mark.parametrize(
    ("transport", "rule", "error"),
    [
        ("ipc", "eventfd2:EPERM", "ZeroMQ needs eventfd2, refused perhaps by a sandbox: Operation not permitted"),
        ("ipc", "sched_setscheduler:EPERM", "ZeroMQ needs sched_getscheduler and sched_setscheduler, refused perhaps"),
        ("tcp", "socket=16:EAFNOSUPPORT", "ZeroMQ needs socket(AF_NETLINK) for TCP, refused perhaps by a sandbox"),
        ("ipc", "clone3:EPERM", "this process needs a thread named anyengine-sweep: clone3 is refused with EPERM"),
        ("ipc", "flock:ENOSYS", "flock failed, perhaps by a sandbox: Function not implemented"),
        ("ipc", "socket=1:EAFNOSUPPORT", "Unix sockets are refused, perhaps by a sandbox: Address family not supp"),
        ("ipc", "lseek:EPERM", "PermissionError: [Errno 1] lseek failed, perhaps by a sandbox: Operation not"),
    ],
)
def test_what_there_is_no_going_on_without_is_named(transport: str, rule: str, error: str, tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "tests.faults.sandboxed", "asyncio", transport, rule, directory=tmp_path)
    assert done.returncode == 1, done  # and not SIGABRT, by which libzmq ends a process
    assert error in done.stderr


# ---- the first process of a container ----


@own_namespaces
def test_the_first_process_of_a_container_keeps_no_zombies_of_engines(anyio_backend: Any, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.faults.orphans", "first", anyio_backend[0]]
    done = run("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *program, directory=tmp_path)
    assert done.stdout == "first\n", done.stderr


WITHOUT_PROC = """
import os, sys, anyio
from anyengine import EngineSpec, open_engine_client

async def main():
    async with open_engine_client(EngineSpec("tests.faults.orphans_engine:OrphansEngine")) as client:
        await client.call_utility("start_in_group")
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        print("no children", os.getpid())

assert not os.path.exists("/proc/self")
anyio.run(main, backend=sys.argv[1])
"""


@own_namespaces
def test_it_keeps_no_zombies_where_proc_is_not_mounted(anyio_backend: Any, tmp_path: Path) -> None:
    program = [sys.executable, "-c", WITHOUT_PROC, anyio_backend[0]]
    hide = ["sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    done = run("unshare", "--pid", "--fork", "--mount", "--kill-child", *hide, *program, directory=tmp_path)
    assert (done.stdout, done.stderr) == ("no children 1\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_a_subreaper_keeps_no_zombies_of_engines(anyio_backend: Any, tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "tests.faults.orphans", "subreaper", anyio_backend[0], directory=tmp_path)
    assert done.stdout == "not first\n", done.stderr
