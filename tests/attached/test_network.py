"""A network between client and engine that swallows everything without closing anything."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

import anyio
import pytest
from tests.attached.hand import Hand
from tests.helpers import until

from anyengine import EngineDeadError, RestartPolicy, SamplingParams, frames, open_engine_client

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


class Proxy:
    """Passes bytes on between who connects to ``port`` and ``target``, or, while ``silent``, does nothing with them."""

    def __init__(self, target: int) -> None:
        self.silent = False
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._stop, self._stopped = socket.socketpair()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def _run(self) -> None:
        while True:
            watched = [self._stopped, *(() if self.silent else (self._listener, *self._peers))]
            readable, _, _ = select.select(watched, [], [], 0.05)
            if self._stopped in readable:
                return
            for ready in readable:
                if ready is self._listener:
                    self._accept()
                elif ready in self._peers:
                    self._forward(ready)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except ConnectionRefusedError:
            near.close()
            return
        self._peers[near], self._peers[far] = far, near

    def _forward(self, source: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(65536)
        other = self._peers[source]
        if data:
            with contextlib.suppress(OSError):
                other.sendall(data)
                return
        for end in (source, other):
            self._peers.pop(end, None)
            end.close()

    def close(self) -> None:
        self._stop.close()
        self._thread.join()
        for end in (self._listener, self._stopped, *self._peers):
            end.close()


@pytest.fixture
def ports() -> Iterator[tuple[int, Proxy]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    proxy = Proxy(port)
    try:
        yield port, proxy
    finally:
        proxy.close()


async def test_silence_of_the_network_is_a_loss_and_its_end_a_new_life(
    hand: Hand, ports: tuple[int, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the client's sockets only, and long enough for a busy machine.
    monkeypatch.setattr(frames, "HEARTBEAT", 200)
    monkeypatch.setattr(frames, "HEARTBEAT_LIMIT", 2000)
    port, proxy = ports
    engine = hand.start("--keys", str(hand.keys), connect=f"tcp://127.0.0.1:{proxy.port}")
    address, policy = f"tcp://127.0.0.1:{port}", RestartPolicy(limit=2, backoff=0)
    async with open_engine_client(address=address, keys=hand.keys, restart=policy) as client:
        assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]
        proxy.silent = True
        with anyio.fail_after(20), pytest.raises(EngineDeadError, match="its connection was lost"):
            await client.wait_dead()
        assert engine.poll() is None
        proxy.silent = False
        with anyio.fail_after(30):
            assert (await client.generate([5], SamplingParams(max_tokens=1))).token_ids == [6]
        await until(lambda: client.health().state == "alive")
