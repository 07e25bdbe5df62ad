"""Opens clients where the system refuses system calls. Run by test_refused_by_system.py with a backend, a transport and
the rules.

It prints what a request and a large call answer, how the engine's death is told, and the number of an engine that it
leaves to its lifeline.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from typing import Literal, cast

import anyio
import trio  # noqa: F401 - before anything is refused
from tests.sandbox import refuse

from anyengine import EngineDeadError, SamplingParams, ShutdownPolicy, open_engine_client, open_sync_engine_client
from anyengine.testing import scripted_spec

BACKEND = cast('Literal["asyncio", "trio"]', sys.argv[1])
TRANSPORT = cast('Literal["ipc", "tcp"]', sys.argv[2])
SHUTDOWN = ShutdownPolicy(grace=0.1, terminate=0.1)


def left() -> tuple[list[str], int, int]:
    gc.collect()
    return sorted(os.listdir(tempfile.gettempdir())), len(os.listdir("/proc/self/fd")), threading.active_count()


async def main() -> None:
    async with open_engine_client(scripted_spec(), transport=TRANSPORT, shutdown=SHUTDOWN) as client:
        print((await client.generate([1], SamplingParams(max_tokens=2))).token_ids)
        print(len(await client.call_utility("echo", bytes(5_000_000))))
        killed_at = time.monotonic()
        try:
            await client.call_utility("kill", 9)
        except EngineDeadError as error:
            print(error.report.signal, "at once" if time.monotonic() - killed_at < 2 else "late")
    async with open_engine_client(scripted_spec(), placement="thread") as client:
        print((await client.generate([1], SamplingParams(max_tokens=2))).token_ids)


refuse(*sys.argv[3:])
before = left()
anyio.run(main, backend=BACKEND)
deadline = time.monotonic() + 3
while left() != before:
    assert time.monotonic() < deadline, (before, left())
    time.sleep(0.01)
with open_sync_engine_client(scripted_spec(), backend=BACKEND, shutdown=SHUTDOWN) as client:
    print(client.health().pid, flush=True)
    os._exit(7)
