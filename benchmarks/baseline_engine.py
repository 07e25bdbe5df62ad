"""The rival's child process: a plain loop over synchronous sockets that counts up from each prompt.

It does no more work for a step than it must: one struct per request is kept and gets its next token, and the message
is encoded into one buffer that is used again and again.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
import zmq

from benchmarks.baseline_wire import (
    ABORT,
    ADD,
    LENGTH_REACHED,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityOutput,
    array_from,
)
from benchmarks.stamps import wait_until


class BaselineEngine:
    """Serves one client until it is told to exit.

    :param input_address: where the client's ROUTER is bound
    :param output_address: where the client's PULL is bound
    """

    def __init__(self, input_address: str, output_address: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = context.socket(zmq.DEALER)
        self._push = context.socket(zmq.PUSH)
        for socket, address in ((self._dealer, input_address), (self._push, output_address)):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            if socket is self._dealer:
                socket.setsockopt(zmq.IDENTITY, b"\x00\x00")
            socket.connect(address)
        self._running: dict[str, EngineCoreOutput] = {}
        self._left: dict[str, int] = {}
        self._plain_steps = 0
        self._held = False
        self._interval = 0.0
        self._due = 0.0
        self._decode_request = msgspec.msgpack.Decoder(EngineCoreRequest).decode
        self._decode_call = msgspec.msgpack.Decoder(tuple[int, str, list[Any]]).decode
        self._decode_ids = msgspec.msgpack.Decoder(list[str]).decode
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._buffer = bytearray(1024)

    def run(self) -> None:
        """Serve."""
        self._dealer.send(b"READY")
        get_option, events, readable = self._dealer.getsockopt, zmq.EVENTS, zmq.POLLIN
        while True:
            working = bool(self._running) and not self._held
            if not working:
                self._dealer.poll()
            while get_option(events) & readable:
                self._receive()
            if self._running and not self._held:
                self._step()

    def _receive(self) -> None:
        frames = self._dealer.recv_multipart(copy=False)
        kind = frames[0].bytes
        if kind == ADD:
            request = self._decode_request(frames[1].buffer)
            if request.prompt_embeds is not None:
                embeds = array_from(request.prompt_embeds, [frame.buffer for frame in frames[1:]])
                last = int(embeds[-1, -1])
            else:
                assert request.prompt_token_ids
                last = request.prompt_token_ids[-1]
            self._settle()
            self._running[request.request_id] = EngineCoreOutput(request.request_id, [last])
            self._left[request.request_id] = request.sampling_params.max_tokens
        elif kind == ABORT:
            self._settle()
            for request_id in self._decode_ids(frames[1].buffer):
                self._running.pop(request_id, None)
                self._left.pop(request_id, None)
        else:
            call_id, method, args = self._decode_call(frames[1].buffer)
            result = getattr(self, f"utility_{method}")(*args)
            self._send(EngineCoreOutputs(utility_output=UtilityOutput(call_id, None, result)))

    def _step(self) -> None:
        if self._interval:
            wait_until(self._due)
            self._due += self._interval
        outputs = list(self._running.values())
        for output in outputs:
            output.new_token_ids[0] += 1
        if self._plain_steps == 0:
            self._plain_steps = min(self._left.values())
            self._made = 0
        self._made += 1
        if self._made == self._plain_steps:
            for request_id in [name for name, left in self._left.items() if left == self._made]:
                self._running.pop(request_id).finish_reason = LENGTH_REACHED
                del self._left[request_id]
            self._settle()
        self._send(EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic()))

    def _settle(self) -> None:
        """Write down how far the requests have come; in between, one counter does for all."""
        if self._plain_steps:
            self._left = {request_id: left - self._made for request_id, left in self._left.items()}
            self._plain_steps = 0

    def _send(self, message: EngineCoreOutputs) -> None:
        self._encode_into(message, self._buffer)
        self._push.send(self._buffer)

    # ---- utilities ----

    def utility_echo(self, value: Any) -> Any:
        """``value`` itself."""
        return value

    def utility_hold(self) -> None:
        """Make no steps for now."""
        self._held = True

    def utility_release(self, interval: float = 0.0, stamped: bool = False) -> None:
        """Make steps again, one every ``interval`` seconds, or as fast as they come; never stamped."""
        self._held = False
        self._interval = interval
        self._due = time.monotonic() + interval

    def utility_exit(self) -> None:
        """End the process."""
        raise SystemExit


if __name__ == "__main__":
    BaselineEngine(*sys.argv[1:]).run()
