"""What ZeroMQ and asyncio take by themselves: frames of a step's size, taken off a socket and handed to a task.

Nothing is decoded, checked or looked up, so no client that reads a ZeroMQ socket on asyncio can take less.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import zmq

from benchmarks.stamps import age, stamp, wait_until
from benchmarks.worker import answer, next_command

_HEADER = 25
"""Bytes before the tokens of a step, as in anyengine's messages."""

_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)


class BareReader:
    """One task reads frames that the loop's callback has taken off a PULL socket."""

    def __init__(self, pull: zmq.Socket[bytes]) -> None:
        self._pull = pull
        self._frames: collections.deque[bytes] = collections.deque()
        self._arrival: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pull.getsockopt(zmq.FD), self._take)
        self._take()

    async def get(self) -> bytes:
        """The next frame."""
        while not self._frames:
            self._arrival = self._loop.create_future()
            await self._arrival
        return self._frames.popleft()

    def _take(self) -> None:
        while zmq.zmq_poll([(self._pull, _POLLIN)], 0):
            self._frames.append(self._pull.recv(_NOBLOCK))
        if self._frames and self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


async def serve() -> None:
    """Run ``paced``, the only command, until there are no more."""
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context:
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket, name in ((pull, "steps"), (push, "orders")):
            socket.bind(f"ipc://{directory}/{name}")
        with subprocess.Popen([sys.executable, "-m", "benchmarks.vllm.bare", directory]) as sender:
            reader = BareReader(pull)
            gc.freeze()
            answer([os.getpid(), sender.pid])
            while (command := await next_command()) is not None:
                answer(await _paced(reader, push, **command[1]))
            push.send_json(None)
        pull.close(linger=0)
        push.close(linger=0)


async def _paced(reader: BareReader, push: zmq.Socket[bytes], rows: int, rate: float, steps: int) -> dict[str, Any]:
    """As :func:`benchmarks.vllm.client_layer.paced`."""
    delays: list[float] = []
    gc.collect()
    cpu = time.process_time()
    push.send_json([_HEADER + 4 * rows, 1 / rate, steps])
    for _ in range(steps):
        frame = await reader.get()
        delays.append(age(int.from_bytes(frame[:4], "little")))
        if len(frame) != _HEADER + 4 * rows:
            raise AssertionError(f"a frame of {len(frame)} bytes came for {rows} rows")
    cpu = time.process_time() - cpu
    return {"delays": delays, "cpu_us": cpu / steps * 1e6}


def send(directory: str) -> None:
    """The other process: frames at the pace that is ordered."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.connect(f"ipc://{directory}/steps")
    pull.connect(f"ipc://{directory}/orders")
    while (order := pull.recv_json()) is not None:
        size, interval, steps = order
        rest = bytes(size - 4)
        due = time.monotonic()
        for _ in range(steps):
            due += interval
            wait_until(due)
            push.send(stamp().to_bytes(4, "little") + rest)


if __name__ == "__main__":
    send(sys.argv[1])
