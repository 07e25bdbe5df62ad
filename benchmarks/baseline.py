"""The rival: a plain, lean asyncio client in the shape of vLLM's ``AsyncMPClient``, to measure anyengine against.

A ``zmq.asyncio`` ROUTER for requests and a PULL for outputs; a background task receives, puts steps into an
``asyncio.Queue`` and resolves the futures of utility calls; another one deals rows out to the requests' collectors. No
checks, no death detection, no bounds: as fast as this shape gets.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Self

import msgspec
import numpy
import zmq
import zmq.asyncio

from benchmarks.baseline_wire import (
    ABORT,
    ADD,
    UTILITY,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Frame,
    RequestEncoder,
    Sampling,
)

_COPIED = 64 * 1024
"""Bytes of a frame from which sending it without a copy pays."""


class Collector:
    """The outputs of one request that its reader has not taken yet."""

    __slots__ = ("_ready", "outputs")

    def __init__(self) -> None:
        self.outputs: list[EngineCoreOutput] = []
        self._ready = asyncio.Event()

    def put(self, output: EngineCoreOutput) -> None:
        """One more row."""
        self.outputs.append(output)
        self._ready.set()

    async def get(self) -> list[EngineCoreOutput]:
        """All rows that came since the last call."""
        while not self.outputs:
            await self._ready.wait()
        self._ready.clear()
        outputs, self.outputs = self.outputs, []
        return outputs


class BaselineClient:
    """One engine in a child process; use it as an async context manager."""

    async def __aenter__(self) -> Self:
        """Start the engine and wait until it is ready."""
        self._directory = tempfile.mkdtemp(prefix="baseline-")
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.ROUTER)
        self._output = self._context.socket(zmq.PULL)
        addresses = [f"ipc://{self._directory}/in", f"ipc://{self._directory}/out"]
        for socket, address in zip((self._input, self._output), addresses, strict=True):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(address)
        self.process = subprocess.Popen([sys.executable, "-m", "benchmarks.baseline_engine", *addresses])
        self._identity, _ = await self._input.recv_multipart()
        self._encoder = RequestEncoder()
        self._decode = msgspec.msgpack.Decoder(EngineCoreOutputs).decode
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._collectors: dict[str, Collector] = {}
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())
        self._dispatcher: asyncio.Task[None] | None = None
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._reader.cancel()
        if self._dispatcher is not None:
            self._dispatcher.cancel()
        self.process.kill()
        self.process.wait()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory)

    async def _read(self) -> None:
        receive, decode, calls, put = self._output.recv, self._decode, self._calls, self._outputs.put_nowait
        while True:
            message = decode(await receive())
            answer = message.utility_output
            if answer is None:
                put(message)
            else:
                future = calls.pop(answer.call_id)
                if not future.done():
                    if answer.failure_message is None:
                        future.set_result(answer.result)
                    else:
                        future.set_exception(RuntimeError(answer.failure_message))

    async def _send(self, kind: bytes, message: object) -> None:
        frames: list[Frame] = [self._identity, kind, *self._encoder.encode(message)]
        if len(frames) == 3 and len(frames[2]) < _COPIED:
            await self._input.send_multipart(frames)
        else:
            tracker = await self._input.send_multipart(frames, copy=False, track=True)
            self._pending = (tracker, frames)  # the memory must live until ZeroMQ has read it

    # ---- whole steps ----

    async def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        max_tokens: int,
        prompt_embeds: numpy.ndarray[Any, Any] | None = None,
    ) -> None:
        """Send a request; its outputs come from :meth:`get_output`."""
        sampling = Sampling(max_tokens=max_tokens)
        await self._send(
            ADD, EngineCoreRequest(request_id, prompt_token_ids, sampling, time.monotonic(), prompt_embeds)
        )

    async def abort_requests(self, request_ids: list[str]) -> None:
        """End requests."""
        await self._send(ABORT, request_ids)

    async def get_output(self) -> EngineCoreOutputs:
        """The next step."""
        return await self._outputs.get()

    # ---- streams ----

    async def open_stream(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        max_tokens: int,
        prompt_embeds: numpy.ndarray[Any, Any] | None = None,
    ) -> Collector:
        """Send a request; from then on :meth:`get_output` must not be used."""
        if self._dispatcher is None:
            self._dispatcher = asyncio.create_task(self._dispatch())
        collector = self._collectors[request_id] = Collector()
        await self.add_request(request_id, prompt_token_ids, max_tokens, prompt_embeds)
        return collector

    async def close_dispatcher(self) -> None:
        """Let :meth:`get_output` be used again."""
        if self._dispatcher is not None:
            self._dispatcher.cancel()
            self._dispatcher = None
            await asyncio.sleep(0)

    async def _dispatch(self) -> None:
        collectors = self._collectors
        while True:
            for output in (await self._outputs.get()).outputs:
                collectors[output.request_id].put(output)
                if output.finish_reason is not None:
                    del collectors[output.request_id]

    # ---- utilities ----

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        await self._send(UTILITY, (call_id, method, args))
        return await future
