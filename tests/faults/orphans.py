"""An application that becomes the parent of what its engines had started. Run by test_refused_by_system.py.

It prints which zombies are its children in the end; one of them, whose status it has not taken yet, is its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import anyio

from anyengine import EngineDeadError, EngineSpec, RestartPolicy, open_engine_client

SPEC = EngineSpec("tests.faults.orphans_engine:OrphansEngine")
HOW, BACKEND = sys.argv[1:]
_PR_SET_CHILD_SUBREAPER = 36


def children(state: str) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            this, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and (this == "Z") == (state == "zombie"):
                found.append(int(stat.parent.name))
    return found


async def until_alone(own: list[int]) -> None:
    with anyio.fail_after(30):
        while children("zombie") != own or children("living"):
            await anyio.sleep(0.01)


async def main(own: list[int]) -> None:
    restart = RestartPolicy(limit=100, window=600, backoff=0)
    async with open_engine_client(SPEC, restart=restart) as client:
        await client.call_utility("start")
        with contextlib.suppress(EngineDeadError):
            await client.call_utility("kill", 9)
        await client.call_utility("start")  # in the next life, which ends in good order
    await until_alone(own)
    async with open_engine_client(SPEC) as client:  # dies, and its block stays open
        await client.call_utility("start")
        with contextlib.suppress(EngineDeadError):
            await client.call_utility("kill", 9)
        await until_alone(own)


if HOW == "subreaper":
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
with subprocess.Popen(["true"]) as child:
    anyio.run(main, [child.pid], backend=BACKEND)
    assert children("zombie") == [child.pid], children("zombie")
    assert child.wait() == 0
print("first" if os.getpid() == 1 else "not first")
