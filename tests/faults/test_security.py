"""What strangers can do: nothing. And what they can see: nothing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import zmq
from tests.helpers import until

from anyengine import EngineClient, RequestFailedError, SamplingParams, UtilityError, open_engine_client
from anyengine.protocol.handshake import Hello
from anyengine.protocol.outputs import from_rows
from anyengine.protocol.replies import Outputs, Pong, UtilityResult
from anyengine.testing import scripted_spec

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]


def garbage() -> list[list[bytes]]:
    return [
        [b""],
        [b"", b""],
        [b"\x30"],
        [b"\x30", b"\xff" * 100],
        [b"\x30", b"\x9f"],
        [b"nonsense", b"\x80"],
        [b"\x31", b"\x85\x00\x00\x00\xf6\xf6"],
        [b"ENGINE_CORE_DEAD", b"\x80"],
        [b"x" * 100_000] * 3,
        list(map(bytes, Outputs(1, 0, 1, from_rows([(0, [666], None)])).encode())),
        list(map(bytes, UtilityResult(1, 0, 0, None, "forged").encode())),
        list(map(bytes, Pong(1, 0, 10**6).encode())),
        list(map(bytes, Hello(1, b"guessed", os.getpid(), 0).encode())),
    ]


def addresses(client: EngineClient) -> tuple[str, str]:
    endpoints = client._session.endpoints
    return endpoints.input_address, endpoints.output_address


async def test_garbage_on_either_socket_disturbs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
        context: zmq.Context[Any] = zmq.Context()
        try:
            push, dealer, twin = context.socket(zmq.PUSH), context.socket(zmq.DEALER), context.socket(zmq.DEALER)
            twin.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
            push.connect(addresses(client)[1])
            dealer.connect(addresses(client)[0])
            twin.connect(addresses(client)[0])
            async with client.open_request([0], SamplingParams(max_tokens=300)) as request:
                await anext(request)
                for message in garbage():
                    for stranger in (push, dealer, twin):
                        stranger.send_multipart(message)
                    await anyio.sleep(0.005)
                tokens = [token async for output in request for token in output.token_ids]
            assert tokens[-1] == 300
            assert 666 not in tokens
            assert await client.call_utility("echo", "mine") == "mine"
            await until(lambda: "message ignored" in caplog.text)
            assert client.health()
        finally:
            context.destroy(linger=0)


async def test_a_flood_of_garbage_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with open_engine_client(scripted_spec()) as client:
        context: zmq.Context[Any] = zmq.Context()
        try:
            push = context.socket(zmq.PUSH)
            push.setsockopt(zmq.SNDHWM, 0)
            push.connect(addresses(client)[1])
            for _ in range(5000):
                push.send_multipart([b"junk", b"junk"])
            await until(lambda: client._session.refused_messages >= 5000)
            assert len(caplog.records) < 20
            assert await client.call_utility("echo", 1) == 1
        finally:
            context.destroy(linger=0)


async def test_garbage_to_the_engine_is_ignored_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    async with open_engine_client(scripted_spec()) as client:
        session = client._session
        for message in ([b"\xee", b"\x80"], [b"\x00", b"\xff"], [b"\x03"], [b"\x10", b"\x80"]):
            session.endpoints.router.send([session.link.identity, *message])
        assert await client.call_utility("echo", "still here") == "still here"
    assert capfd.readouterr().err.count("ignored a message") == 4


async def test_a_malformed_request_or_call_fails_alone() -> None:
    """The array in it disagrees with its bytes: the engine can tell which request or call it was."""
    import numpy

    async with open_engine_client(scripted_spec(step_delay=0.001)) as client:
        session = client._session
        send, send_copied = session.endpoints.router.send, session.endpoints.router.send_copied

        def cut_buffers(message: list[Any]) -> list[Any]:
            return send([frame if len(frame) < 100_000 else memoryview(frame)[:-3] for frame in message])

        async with client.open_request([0], SamplingParams(max_tokens=200)) as other:
            session.endpoints.router.send = session.endpoints.router.send_copied = cut_buffers  # type: ignore
            with pytest.raises(UtilityError, match=r"ProtocolError: array of numpy dtype <i8 .* takes 800000 bytes"):
                await client.call_utility("echo", numpy.zeros(100_000, dtype=numpy.int64))
            with pytest.raises(RequestFailedError, match=r"prompt_token_ids .*cut in the middle of a number"):
                await client.generate([1] * 100_000)
            session.endpoints.router.send = send  # type: ignore[method-assign]
            session.endpoints.router.send_copied = send_copied  # type: ignore[method-assign]
            tokens = [token async for output in other for token in output.token_ids]
        assert tokens == list(range(1, 201))
        assert client.statistics().live_requests == 0


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_secrets_are_neither_in_arguments_nor_environment(transport: Any) -> None:
    async with open_engine_client(scripted_spec(), transport=transport) as client:
        process = psutil.Process(client.health().pid)
        session = client._session
        visible = " ".join(process.cmdline()) + repr(process.environ())
        assert session.link.token.hex() not in visible
        assert repr(session.link.token) not in visible
        for key in session.endpoints.keys or ():
            assert key not in visible
        assert await client.call_utility("echo", 1) == 1


async def test_sockets_listen_in_a_private_directory_or_on_loopback() -> None:
    async with open_engine_client(scripted_spec()) as client:
        for address in addresses(client):
            directory = Path(address.removeprefix("ipc://")).parent
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        listening = [
            connection
            for process in (psutil.Process(), psutil.Process(client.health().pid))
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == []
    async with open_engine_client(scripted_spec(), transport="tcp") as client:
        listening = [
            connection.laddr.ip
            for connection in psutil.Process().net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"] * 2
        with anyio.fail_after(20):
            assert (await client.generate([1], SamplingParams(max_tokens=2))).token_ids == [2, 3]


def test_nothing_on_the_way_unpickles(anyio_backend: Any) -> None:
    """Both processes run with pickle broken; everything works all the same."""
    code = f"""
        import pickle, _pickle
        def refuse(*args, **kwargs):
            raise AssertionError("pickle was used")
        for module in (pickle, _pickle):
            for name in ("loads", "load", "dumps", "dump", "Unpickler", "Pickler"):
                setattr(module, name, refuse)
        import anyio
        from anyengine import EngineSpec, open_engine_client
        from anyengine.testing import scripted_spec
        async def main():
            async with open_engine_client(scripted_spec()) as client:
                assert await client.call_utility("echo", [1, {{"a": b"b"}}]) == [1, {{"a": b"b"}}]
                assert (await client.generate([1])).finish_reason == "length"
        anyio.run(main, backend={anyio_backend[0]!r})
    """
    result = subprocess.run(
        [sys.executable, "-O", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
