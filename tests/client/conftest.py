"""Every test of this tier also checks its real traffic, in both directions, against ``schema.cddl``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from tests.protocol.cddl import Direction, validate_message

import anyengine.frames

MESSAGES_PER_KIND = 12
"""How many messages of each kind and direction are checked per test; the validator takes milliseconds for each."""


@pytest.fixture(autouse=True)
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Direction, list[bytes]]]]:
    recorded: list[tuple[Direction, list[bytes]]] = []
    seen: dict[tuple[Direction, bytes], int] = {}
    receive = anyengine.frames.receive_nowait

    def record(direction: Direction, message: list[Any]) -> None:
        kind = direction, bytes(message[0])
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= MESSAGES_PER_KIND:
            recorded.append((direction, [bytes(frame) for frame in message]))

    def recording_receive(socket: Any, routed: bool = False) -> Any:
        message = receive(socket, routed)
        if socket.type != zmq.PAIR:  # events of the socket monitor are messages as well, but not of this protocol
            record("to_client", message[1:] if routed else message)
        return message

    def recording(send: Any) -> Any:
        def recording_send(socket: Any, message: Any) -> Any:
            if socket.type == zmq.ROUTER:  # an engine in a thread sends by the same functions
                record("to_engine", message[1:])
            return send(socket, message)

        return recording_send

    monkeypatch.setattr(anyengine.frames, "receive_nowait", recording_receive)
    for name in ("send_copied", "send_tracked"):
        monkeypatch.setattr(anyengine.frames, name, recording(getattr(anyengine.frames, name)))
    yield recorded
    for direction, message in recorded:
        validate_message(message, direction)
