"""Where sockets are bound: private, short, gone afterwards; and CURVE where asked."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
import zmq
from tests.helpers import until_sync

from anyengine.directories import PrivateDirectory, sweep_directories
from anyengine.transport.endpoints import Endpoints


def close(endpoints: Endpoints) -> None:
    endpoints.close_sockets()
    endpoints.close()


def test_the_directory_is_private_and_gone_after_close() -> None:
    directory = PrivateDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.close()
    assert not directory.path.exists()


@pytest.mark.parametrize("name", ["x" * 120, "ü" * 60, "short"])
def test_any_tmpdir_gives_a_path_that_a_socket_can_have(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / name
    base.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    endpoints = Endpoints("ipc")
    try:
        for address in (endpoints.input_address, endpoints.output_address):
            path = address.removeprefix("ipc://")
            assert len(os.fsencode(path)) <= 107
            assert stat.S_ISSOCK(os.stat(path).st_mode)
    finally:
        close(endpoints)


def test_many_clients_have_addresses_of_their_own() -> None:
    many = [Endpoints("ipc") for _ in range(8)]
    assert len({endpoints.input_address for endpoints in many}) == 8
    for endpoints in many:
        close(endpoints)


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="ae", dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        living = PrivateDirectory()
        code = (
            "import os, tempfile, sys, signal; tempfile.tempdir = sys.argv[1]\n"
            "from anyengine.transport.endpoints import Endpoints\n"
            "endpoints = Endpoints('ipc'); os.kill(os.getpid(), signal.SIGKILL)"
        )
        subprocess.run([sys.executable, "-c", code, base], check=False)
        assert len(os.listdir(base)) == 2
        sweep_directories()
        assert os.listdir(base) == [living.path.name]
        living.close()
        assert os.listdir(base) == []


def test_no_usable_directory_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", _refuse)
    with pytest.raises(OSError, match=r"no directory for sockets \(.*/tmp: Read-only file system; .*set TMPDIR"):
        PrivateDirectory()


def _refuse(**arguments: Any) -> NoReturn:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _no_temporary_directory() -> NoReturn:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_a_place_that_python_does_not_know_serves_if_its_own_places_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a container whose root is read-only.
    def make(**arguments: Any) -> str:
        if arguments["dir"] != Path("/dev/shm"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return mkdtemp(**arguments)

    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "gettempdir", _no_temporary_directory)
    monkeypatch.setattr(tempfile, "mkdtemp", make)
    sweep_directories()
    directory = PrivateDirectory()
    assert directory.path.parent == Path("/dev/shm")
    directory.close()


def test_a_place_that_allows_no_sockets_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Probe(socket.socket):
        def bind(self, address: Any) -> None:
            if address.startswith(f"{base}/"):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            super().bind(address)

    with tempfile.TemporaryDirectory(prefix="ae", dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        monkeypatch.setattr(socket, "socket", Probe)
        directory = PrivateDirectory()
        assert directory.path.parent == Path("/tmp")
        assert os.listdir(base) == []
        directory.close()


def test_a_place_whose_path_is_not_utf_8_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ae\udcff", dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        endpoints = Endpoints("ipc")
        assert endpoints.input_address.startswith("ipc:///tmp/anyengine-")
        close(endpoints)


def test_the_directory_is_private_whatever_the_umask() -> None:
    previous = os.umask(0o777)
    try:
        directory = PrivateDirectory()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory.path / "lock").stat().st_mode) == 0o600
    directory.close()


def test_tcp_is_loopback_only_and_a_peer_without_the_key_is_not_heard() -> None:
    endpoints = Endpoints("tcp")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        assert endpoints.input_address.startswith("tcp://127.0.0.1:")
        assert endpoints.output_address.startswith("tcp://127.0.0.1:")
        assert endpoints.keys is not None
        stranger = context.socket(zmq.PUSH)
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED)
        stranger.connect(endpoints.output_address)
        stranger.send(b"without a key")
        assert monitor.poll(5000), "the handshake of a peer without the key has to fail"
        friend = context.socket(zmq.PUSH)
        friend.setsockopt_string(zmq.CURVE_SERVERKEY, endpoints.keys.server_public)
        friend.setsockopt_string(zmq.CURVE_PUBLICKEY, endpoints.keys.public)
        friend.setsockopt_string(zmq.CURVE_SECRETKEY, endpoints.keys.secret)
        friend.connect(endpoints.output_address)
        friend.send_multipart([b"with", b"the key"])
        received: list[object] = []
        until_sync(lambda: received.append(endpoints.pull.receive_nowait()) or received[-1] is not None)
        assert received[-1] == [b"with", b"the key"]
        assert endpoints.pull.receive_nowait() is None
    finally:
        context.destroy(linger=0)
        close(endpoints)


def test_without_descriptors_it_is_an_error_and_not_the_end_of_the_process() -> None:
    code = """
import os, resource
from anyengine.transport.endpoints import Endpoints


def limit(descriptors):
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
Endpoints("ipc").close_sockets()
for left in range(24):
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    limit(lowest + left)
    try:
        Endpoints("ipc").close_sockets()
    except OSError as error:
        print(left, error.strerror)
    limit(soft)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr
    shown = result.stdout.splitlines()
    assert shown[:10] == [f"{left} Too many open files" for left in range(10)]
