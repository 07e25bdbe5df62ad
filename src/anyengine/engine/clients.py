"""The clients of one engine: the one that launched it, if one did, and those that share it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import zmq

from anyengine.addresses import check_address
from anyengine.engine import contract
from anyengine.engine.connection import ClientConnection
from anyengine.engine.core import EngineCore
from anyengine.engine.failures import describe_failure
from anyengine.engine.sharing import split, split_outputs
from anyengine.errors import UnencodableError
from anyengine.keys import ConnectionKeys
from anyengine.notices import warn
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.protocol.error_kinds import ErrorKind
from anyengine.protocol.outputs import StepOutputs

LEAVE_LIMIT = 0.5
"""Seconds after which a client that was told goodbye, and did not go, is greeted anew."""


class Clients:
    """The connections to all clients of an engine.

    :param owner: how the client is reached that launched the engine, if one did
    :param context: the ZeroMQ context to use; it stays open
    :param rank: the engine's number, where nobody launched it
    """

    def __init__(self, owner: Bootstrap | None, context: zmq.Context[zmq.Socket[bytes]], rank: int) -> None:
        self.rank: int = rank if owner is None else owner.rank
        self.owner: ClientConnection | None = None
        self.connections: list[ClientConnection] = []
        self._context = context
        if owner is not None:
            self.owner = ClientConnection(owner, context, slot=0, lasting=False)
            self.connections.append(self.owner)

    # ---- coming and going ----

    def connect(self, address: str, keys: str | None = None) -> None:
        """Let the client share this engine that listens at ``address``, now or whenever there is one.

        Nothing happens if that was said before.

        :param keys: the file of keys that it has too
        :raises AddressError: if the address is malformed, or is TCP without keys
        :raises KeysError: if the keys cannot be used
        """
        loaded = None if keys is None else ConnectionKeys.load(keys)
        check_address(address, keys=loaded is not None)
        if any(connection.lasting and connection.address == address for connection in self.connections):
            return
        slots = {connection.slot for connection in self.connections}
        slot = next((slot for slot in range(256) if slot not in slots), None)
        if slot is None:
            raise RuntimeError("an engine can have 256 clients, and has them")
        bootstrap = Bootstrap(
            address,
            self.rank,
            b"" if loaded is None else loaded.token_bytes,
            None if loaded is None else loaded.for_engine,
        )
        connection = ClientConnection(bootstrap, self._context, slot=slot, lasting=True)
        connection.greet()
        self.connections.append(connection)

    def announce_death(self, error: BaseException) -> None:
        """Tell all of what this engine dies, if they can be told, and close."""
        for connection in self.connections:
            connection.say_dead(*describe_failure(error))
        self.close()

    def say_goodbye(self) -> None:
        """Leave all but the owner, which has told the engine to end if it ends in good order."""
        for connection in self.connections:
            if connection is not self.owner:
                connection.say_goodbye()

    def close(self) -> None:
        """Close the sockets, giving messages already handed over a moment to leave."""
        for connection in self.connections:
            connection.close()

    # ---- messages ----

    def await_input(
        self, stay_awake: float, limit: float | None, failure_fd: int | None
    ) -> Literal["input", "failure"] | None:
        """Wait until a message may have come or ``failure_fd`` is readable; None if neither was so.

        :param stay_awake: seconds to look for messages before sleeping
        :param limit: seconds to sleep at most
        """
        connections = self.connections
        sleep_at = time.perf_counter() + stay_awake
        while True:
            for connection in connections:
                if connection.has_input():
                    return "input"
            if time.perf_counter() >= sleep_at:
                break
            try:
                os.sched_yield()  # the client may need this processor to ask
            except OSError:  # a sandbox refuses it
                break
        if limit is None and any(connection.lasting for connection in connections):
            limit = LEAVE_LIMIT
        awaited: list[tuple[Any, int]] = [
            (socket, zmq.POLLIN) for connection in connections for socket in connection.sockets
        ]
        if failure_fd is not None:
            awaited.append((failure_fd, zmq.POLLIN))
        ready: list[tuple[Any, int]] = zmq.zmq_poll(awaited, -1 if limit is None else int(limit * 1000))
        if any(socket == failure_fd for socket, _ in ready):
            return "failure"
        return "input" if ready else None

    def send_step(self, step: int, outputs: StepOutputs, core: EngineCore) -> None:
        """Send each client its rows of one step of ``core``; requests of which something cannot travel fail.

        :raises EngineContractError: if it cannot be told which requests these are
        """
        if len(self.connections) == 1:
            self.connections[0].send_step(step, outputs, core)
            return
        try:
            parts = split_outputs(self.connections, outputs)
        except contract.UNSOUND:
            parts = split_outputs(self.connections, contract.sound(core, outputs))
        for connection, own in parts:
            connection.send_step(step, own, core)

    def release(self, step: int, handles: Sequence[int]) -> None:
        """Send the last rows of requests that were aborted."""
        for connection, own in split(self.connections, handles):
            if connection.is_served:
                connection.send(connection.machine.release(step, own))

    def fail(self, step: int, handle: int, problem: str, kind: ErrorKind) -> None:
        """Send the last row of a request that ended for an error of its own."""
        for connection, own in split(self.connections, [handle]):
            connection.send(connection.machine.fail(step, own, problem, kind))

    def send_figures(self, figures: Mapping[str, float]) -> None:
        """Send all clients the engine's own figures; those that cannot travel are dropped."""
        for connection in self.connections:
            if connection.is_served:
                try:
                    connection.send(connection.machine.stats(figures))
                except UnencodableError as error:
                    warn("engine %d: figures that cannot travel were dropped: %s", self.rank, error)
