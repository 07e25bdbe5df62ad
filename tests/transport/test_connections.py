"""The end of a connection counts for the life of the engine that it belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import zmq

from anyengine.transport.connections import Connections

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:*"


class Peers:
    """A socket, and what connects to it."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.pull = self.context.socket(zmq.PULL)
        self.connections = Connections(self.pull)
        self.pull.bind(address)

    def connect(self) -> Any:
        """A peer of which a message has come."""
        push = self.context.socket(zmq.PUSH)
        push.connect(self.pull.getsockopt_string(zmq.LAST_ENDPOINT))
        push.send(b"x")
        assert self.pull.poll(10_000)
        self.pull.recv()
        return push

    def close(self) -> None:
        self.connections.close()
        self.context.destroy(linger=0)


@pytest.fixture
def peers(address: str) -> Any:
    peers = Peers(address)
    yield peers
    peers.close()


async def ends(connections: Connections) -> bool:
    """Whether it has ended, or does in a moment."""
    with anyio.move_on_after(0.2) as scope:
        await connections.end()
    return not scope.cancelled_caught


async def test_the_end_of_the_only_connection_is_the_end(peers: Peers) -> None:
    assert not await ends(peers.connections)
    push = peers.connect()
    assert not await ends(peers.connections)
    push.close(linger=0)
    with anyio.fail_after(10):
        await peers.connections.end()


async def test_the_late_end_of_an_earlier_life_is_not_the_end_of_this_one(peers: Peers) -> None:
    earlier = peers.connect()
    peers.connections.forget()
    assert not await ends(peers.connections)
    push = peers.connect()
    earlier.close(linger=0)
    assert not await ends(peers.connections)
    push.close(linger=0)
    with anyio.fail_after(10):
        await peers.connections.end()


async def test_a_stranger_that_comes_and_goes_is_not_the_end(peers: Peers) -> None:
    push = peers.connect()
    peers.connect().close(linger=0)
    assert not await ends(peers.connections)
    push.close(linger=0)
    with anyio.fail_after(10):
        await peers.connections.end()
