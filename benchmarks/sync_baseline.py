"""The rival of the sync client: a plain client in the shape of vLLM's ``SyncMPClient``.

A ROUTER for requests that the caller's thread writes to, and a daemon thread that receives from a PULL, puts steps into
a ``queue.Queue`` and resolves the futures of utility calls. No checks, no death detection, no bounds.
"""

from __future__ import annotations

import itertools
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from typing import Any, Self

import msgspec
import zmq

from benchmarks.baseline_wire import ADD, UTILITY, EngineCoreOutputs, EngineCoreRequest, RequestEncoder, Sampling


class SyncBaselineClient:
    """One engine in a child process; use it as a context manager, in one thread."""

    def __enter__(self) -> Self:
        """Start the engine and wait until it is ready."""
        self._directory = tempfile.mkdtemp(prefix="baseline-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input = self._context.socket(zmq.ROUTER)
        self._output = self._context.socket(zmq.PULL)
        addresses = [f"ipc://{self._directory}/in", f"ipc://{self._directory}/out"]
        for socket, address in zip((self._input, self._output), addresses, strict=True):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(address)
        self.process = subprocess.Popen([sys.executable, "-m", "benchmarks.baseline_engine", *addresses])
        self._identity, _ = self._input.recv_multipart()
        self._encoder = RequestEncoder()
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._outputs: queue.Queue[EngineCoreOutputs] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        self._input.close(linger=0)
        self._context.term()  # which ends the reader
        self._reader.join()
        shutil.rmtree(self._directory)

    def _read(self) -> None:
        receive, put = self._output.recv_multipart, self._outputs.put_nowait
        decode = msgspec.msgpack.Decoder(EngineCoreOutputs).decode
        try:
            while True:
                message = decode(receive(copy=False)[0].buffer)
                answer = message.utility_output
                if answer is None:
                    put(message)
                elif answer.failure_message is None:
                    self._calls.pop(answer.call_id).set_result(answer.result)
                else:
                    self._calls.pop(answer.call_id).set_exception(RuntimeError(answer.failure_message))
        except zmq.ContextTerminated:
            self._output.close(linger=0)

    def add_request(self, request_id: str, prompt_token_ids: list[int], max_tokens: int) -> None:
        """Send a request; its outputs come from :meth:`get_output`."""
        sampling = Sampling(max_tokens=max_tokens)
        request = EngineCoreRequest(request_id, prompt_token_ids, sampling, time.monotonic())
        self._input.send_multipart([self._identity, ADD, *self._encoder.encode(request)], copy=False)

    def get_output(self) -> EngineCoreOutputs:
        """The next step."""
        return self._outputs.get()

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        call_id = next(self._call_ids)
        future = self._calls[call_id] = Future()
        body = self._encoder.encode((call_id, method, args))
        self._input.send_multipart([self._identity, UTILITY, *body], copy=False)
        return future.result()
