"""Where a client's sockets are bound: ipc files in a private directory, or loopback TCP with CURVE keys."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Literal

import zmq

from anyengine.protocol.bootstrap import CurveKeys
from anyengine.transport import collector
from anyengine.transport.sockets import Socket

TransportName = Literal["ipc", "tcp", "inproc"]

TERM_LIMIT = 0.1
"""Seconds that the end of the context may take."""

_PREFIX = "anyengine-"
_LONGEST_BASE = 64
"""Bytes that a base directory's path may have: a socket's path has to fit 107 bytes, whatever TMPDIR is."""


class SocketDirectory:
    """A directory that only this user can enter (0700), under a short path, gone when closed.

    A lock that lives as long as this process tells later clients whether they may sweep a directory away that a
    killed process left behind.
    """

    def __init__(self) -> None:
        base = _base_directory()
        # Under another name until it is locked, so that nobody sweeps it in between.
        fresh = tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base)
        self._lock = os.open(os.path.join(fresh, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path: Path = base / (_PREFIX + secrets.token_hex(6))
        os.rename(fresh, self.path)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _base_directory() -> Path:
    for candidate in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108 - mkdtemp makes what is used
        if len(os.fsencode(candidate)) <= _LONGEST_BASE and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise OSError(
        f"no directory for sockets: TMPDIR ({tempfile.gettempdir()}) must be writable and at most "
        f"{_LONGEST_BASE} bytes long, or /tmp, /var/tmp or /dev/shm writable"
    )


def sweep_directories() -> None:
    """Remove the directories that killed clients left behind; blocking, for a worker thread.

    Another user's directories cannot be opened, and those of living clients are locked.
    """
    for directory in _base_directory().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


class Endpoints:
    """A client's two sockets, bound: requests go out on ``router``, outputs come in on ``pull``.

    :param transport: ``"ipc"`` for files in a :class:`SocketDirectory`, ``"tcp"`` for loopback with CURVE keys,
        ``"inproc"`` for an engine in a thread, whose sockets are of the same ``context``
    """

    def __init__(self, transport: TransportName) -> None:
        self.input_address: str
        self.output_address: str
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._transport: TransportName = transport
        self._directory: SocketDirectory | None = None
        self.keys: CurveKeys | None = None
        server_secret: str | None = None
        if transport == "ipc":
            self._directory = SocketDirectory()
        elif transport == "tcp":
            server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
            public, secret = (key.decode() for key in zmq.curve_keypair())
            self.keys = CurveKeys(server_public, public, secret)
        try:
            router, self.input_address = self._bind(zmq.ROUTER, "in", server_secret)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            pull, self.output_address = self._bind(zmq.PULL, "out", server_secret)
            # The end of the engine's connection on this socket says that all it sent has arrived.
            monitor: zmq.Socket[bytes] = pull.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except BaseException:
            self.context.destroy(linger=0)
            if self._directory is not None:
                self._directory.close()
            raise
        collector.acquire()
        self.router: Socket = Socket(router, routed=True)
        self.pull: Socket = Socket(pull)
        self.disconnections: Socket = Socket(monitor)

    def _bind(self, kind: int, name: str, server_secret: str | None) -> tuple[zmq.Socket[bytes], str]:
        socket = self.context.socket(kind)
        # No limits: the engine must never block in a send, and calls of the client never do. What bounds memory is the
        # number of tokens that live requests may still get.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        if server_secret is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, server_secret)
        socket.bind(self._address(name))
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _address(self, name: str) -> str:
        if self._directory is not None:
            return f"ipc://{self._directory.path}/{name}"
        return f"inproc://{name}" if self._transport == "inproc" else "tcp://127.0.0.1:*"

    def close_sockets(self) -> None:
        """Close the sockets at once; tasks that wait on them get ClosedResourceError."""
        self.disconnections.close()
        self.pull.close()
        self.router.close()

    def close(self) -> None:
        """End the context and remove the directory, after :meth:`close_sockets`; blocks for a millisecond or so.

        The end of the context interrupts an engine in a thread that waits for messages. One that does something else
        is not waited for longer than :data:`TERM_LIMIT`; the context then ends when that thread comes back to it.
        """
        ending = threading.Thread(target=self.context.term, name="anyengine-context", daemon=True)
        ending.start()
        ending.join(TERM_LIMIT)
        collector.release()
        if self._directory is not None:
            self._directory.close()
