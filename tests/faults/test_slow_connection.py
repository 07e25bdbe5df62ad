"""What an engine sent comes late, as on a machine whose processors are all busy: nothing of it is lost by that."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import anyio
import pytest
from tests.helpers import until

import anyengine.client.opening
from anyengine import EngineClient, SamplingParams, ShutdownPolicy, open_engine_client
from anyengine.testing import scripted_spec
from anyengine.transport.endpoints import Endpoints

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

DELAY = 0.1
"""Seconds by which the engine's outputs are late. Its process is gone by then."""


class Detour:
    """Passes on what comes to ``address``, and its end, with a delay."""

    def __init__(self, destination: str) -> None:
        self._destination = destination
        self._listener = socket.socket(socket.AF_UNIX)
        self.address = f"{destination}.detour"
        self._listener.bind(self.address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, name="detour")
        self._thread.start()

    def _run(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            source, _ = self._listener.accept()
            with source, socket.socket(socket.AF_UNIX) as onward:
                onward.connect(self._destination)
                back = threading.Thread(target=self._pass_on, args=(onward, source, 0.0), name="detour back")
                back.start()
                self._pass_on(source, onward, DELAY)
                onward.shutdown(socket.SHUT_RDWR)
                back.join()

    def _pass_on(self, source: socket.socket, onward: socket.socket, delay: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**20):
                time.sleep(delay)
                onward.sendall(data)
            time.sleep(delay)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # should nobody have come
        self._thread.join()


@pytest.fixture
def detours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines send their outputs by a detour."""
    made: list[Detour] = []

    class SlowEndpoints(Endpoints):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(Detour(self.output_address.removeprefix("ipc://")))
            self.output_address = f"ipc://{made[-1].address}"

    monkeypatch.setattr(anyengine.client.opening, "Endpoints", SlowEndpoints)
    yield
    for detour in made:
        detour.close()


@pytest.mark.parametrize("mode", ["drain", "abort"])
async def test_closing_waits_for_last_outputs_that_come_late(mode: Literal["drain", "abort"], detours: None) -> None:
    ends: list[tuple[int, str | None]] = []

    async def run(client: EngineClient) -> None:
        completion = await client.generate([0], SamplingParams(max_tokens=100 if mode == "drain" else 10**6))
        ends.append((len(completion.token_ids), completion.finish_reason))

    async with anyio.create_task_group() as group:
        async with open_engine_client(scripted_spec(step_delay=0.001), shutdown=ShutdownPolicy(mode=mode)) as client:
            for _ in range(3):
                group.start_soon(run, client)
            await until(lambda: client.statistics().live_requests == 3, 30)
    if mode == "drain":
        assert ends == [(100, "length")] * 3
    else:
        assert [reason for _, reason in ends] == ["abort"] * 3
