"""Where a client's sockets are bound, and the ZeroMQ context that they are in."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from typing import Literal

import zmq

from anyengine import frames
from anyengine.addresses import outputs_address
from anyengine.brief import brief
from anyengine.directories import PrivateDirectory
from anyengine.errors import AddressError
from anyengine.keys import ConnectionKeys
from anyengine.protocol.bootstrap import CurveKeys
from anyengine.system_calls import check_calls_of_zmq, check_tcp_of_zmq
from anyengine.thread_limits import ZMQ_THREADS, check_threads
from anyengine.transport import collector
from anyengine.transport.connections import Connections
from anyengine.transport.sockets import Socket

TransportName = Literal["ipc", "tcp", "inproc"]

DESCRIPTORS = 16
"""Descriptors that two sockets and their context take, about."""

TERM_LIMIT = 0.1
"""Seconds that the end of the context may take."""


class Endpoints:
    """A client's two sockets, bound: requests go out on ``router``, outputs come in on ``pull``, one for each life.

    For an engine that the client starts, the addresses are private: ``"ipc"`` means files in a
    :class:`PrivateDirectory`, ``"tcp"`` loopback with CURVE keys, ``"inproc"`` sockets of the same ``context`` in a
    thread. For one that somebody else starts, ``address`` is where it comes to, and ``connections`` tells of every
    connection to the router socket.

    :raises AddressError: if ``address`` cannot be bound
    :raises OSError: if the process may not open as many descriptors as that takes, or start as many threads
    """

    def __init__(
        self, transport: TransportName, *, address: str | None = None, keys: ConnectionKeys | None = None
    ) -> None:
        _check_descriptors()
        check_calls_of_zmq()
        check_threads(ZMQ_THREADS)
        self.input_address: str
        self.output_address: str
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.keys: CurveKeys | None = None
        self.connections: Socket | None = None
        self._attached = address is not None
        self._lives = 0
        self._transport: TransportName = transport
        self._directory: PrivateDirectory | None = None
        if transport == "tcp" and keys is None:
            keys = ConnectionKeys.generate()
        self._server_secret = None if keys is None else keys.server_secret
        if keys is not None:
            self.keys = keys.for_engine
        if transport == "ipc" and address is None:
            _check_unix_sockets()
            self._directory = PrivateDirectory()
        try:
            router, self.input_address = self._bind(zmq.ROUTER, address or self._private_address("in"))
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._open_outputs(outputs_address(self.input_address) if self._attached else self._private_address("out"))
            if self._attached:
                self.connections = Socket(router.get_monitor_socket(frames.CONNECTION_EVENTS))
        except BaseException:
            self.context.destroy(linger=0)
            if self._directory is not None:
                self._directory.close()
            raise
        collector.acquire()
        self.router: Socket = Socket(router, routed=True)

    def _open_outputs(self, address: str) -> None:
        pull, bound = self._bind(zmq.PULL, address)
        try:
            connections = Connections(pull)
        except BaseException:
            pull.close(linger=0)
            raise
        self.output_address = bound
        self.pull: Socket = Socket(pull)
        # The end of the engine's connection says that all it sent has arrived.
        self.output_connections: Connections = connections

    def begin_life(self) -> None:
        """Have a new life of the engine send its outputs to a socket of its own, from the second one on.

        Nothing of an earlier life, be it a message or the end of a connection, is taken for one of this. An engine that
        somebody else starts knows one address; its connections are told apart by :meth:`Connections.forget`.

        :raises OSError: if the process may not open as many descriptors as that takes
        """
        self._lives += 1
        if self._lives == 1 or self._attached:
            return
        _check_descriptors()
        pull, connections, address = self.pull, self.output_connections, self.output_address
        self._open_outputs(self._private_address(f"out{self._lives}"))
        connections.close()
        pull.close()
        self._unlink(address)

    def _private_address(self, name: str) -> str:
        if self._directory is not None:
            return f"ipc://{self._directory.path}/{name}"
        return f"inproc://{name}" if self._transport == "inproc" else "tcp://127.0.0.1:*"

    def _bind(self, kind: int, address: str) -> tuple[zmq.Socket[bytes], str]:
        if self._transport == "tcp":
            check_tcp_of_zmq()
        raw = self.context.socket(kind)
        # No limits: the engine must never block in a send, and calls of the client never do. What bounds memory is the
        # number of tokens that live requests may still get.
        raw.setsockopt(zmq.SNDHWM, 0)
        raw.setsockopt(zmq.RCVHWM, 0)
        raw.setsockopt(zmq.LINGER, 0)
        if self._server_secret is not None:
            raw.setsockopt(zmq.CURVE_SERVER, 1)
            raw.setsockopt_string(zmq.CURVE_SECRETKEY, self._server_secret)
        if self._attached and self._transport == "tcp":
            raw.setsockopt(zmq.IPV6, 1)
            frames.notice_silence(raw)
        if self._attached and address.startswith("ipc:") and _somebody_listens(address.removeprefix("ipc://")):
            raise AddressError(f"address={brief(address)} is in use: somebody listens there")
        try:
            raw.bind(address)
        except zmq.ZMQError as error:
            raw.close(linger=0)
            raise AddressError(f"address={brief(address)} cannot be bound on this machine: {error.strerror}") from error
        return raw, raw.getsockopt_string(zmq.LAST_ENDPOINT)

    def close_sockets(self) -> None:
        """Close the sockets at once; tasks that wait on them get ClosedResourceError."""
        if self._attached:
            # While they are still bound: a moment later somebody else's could be there. ZeroMQ leaves these files.
            for address in (self.input_address, self.output_address):
                self._unlink(address)
        if self.connections is not None:
            self.connections.close()
        self.output_connections.close()
        self.pull.close()
        self.router.close()

    def _end_context_with_engine(self) -> None:
        ending = threading.Thread(target=self.context.term, name="anyengine-context", daemon=True)
        try:
            ending.start()
        except RuntimeError:  # no thread to be had: this one waits, for as long as the engine's step takes
            self.context.term()
        else:
            ending.join(TERM_LIMIT)

    def _unlink(self, address: str) -> None:
        if address.startswith("ipc://"):
            with contextlib.suppress(OSError):
                os.unlink(address.removeprefix("ipc://"))

    def close(self) -> None:
        """End the context and remove the directory, after :meth:`close_sockets`; blocks for a millisecond or so.

        The end of the context interrupts an engine in a thread that waits for messages. One that does something else
        is not waited for longer than :data:`TERM_LIMIT`; the context then ends when that thread comes back to it.
        """
        if self._transport == "inproc":
            self._end_context_with_engine()
        else:
            self.context.term()
        collector.release()
        if self._directory is not None:
            self._directory.close()


def _somebody_listens(path: str) -> bool:
    """Whether a Unix socket is served. ZeroMQ would take its path over without asking."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _check_unix_sockets() -> None:
    try:
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise OSError(
            error.errno,
            f"Unix sockets are refused, perhaps by a sandbox: {error.strerror}; open it with transport='tcp'",
        ) from error


def _check_descriptors() -> None:
    # ZeroMQ ends the whole process if it gets none for its threads.
    with contextlib.ExitStack() as opened:
        for _ in range(DESCRIPTORS):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
