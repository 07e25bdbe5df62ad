"""An engine that somebody else started: it comes to an address, is served, and its end is told apart from silence."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import zmq
from tests.attached.hand import SCRIPTED, Hand
from tests.helpers import is_running, until, until_sync

from anyengine import (
    AddressError,
    ConnectionKeys,
    EngineDeadError,
    EngineStartError,
    KeysError,
    ProcessLauncher,
    RestartPolicy,
    SamplingParams,
    ShutdownPolicy,
    StartLimits,
    open_engine_client,
)
from anyengine.testing import scripted_spec

TRANSFORMERS = "anyengine.engines.transformers:TransformersEngine"

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("leaves_nothing")]

FOREVER = SamplingParams(max_tokens=10_000_000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_it_serves_and_outlives_the_client(hand: Hand) -> None:
    engine = hand.start("vocab_size=1000", "step_delay=0.001")
    for start in range(3):
        async with open_engine_client(address=hand.address()) as client:
            assert client.info.vocab_size == 1000
            assert client.health().pid == engine.pid
            completion = await client.generate([start], SamplingParams(max_tokens=3))
            assert completion.token_ids == [start + 1, start + 2, start + 3]
            await client.add_request([0], FOREVER)  # left behind, and not there for the next client
            await until(lambda: client.statistics().engine.get("running", 0) <= 1)
        assert engine.poll() is None
    async with open_engine_client(address=hand.address()) as client:
        await client.generate([0], SamplingParams(max_tokens=1))
        await until(lambda: client.statistics().engine == {"running": 0, "waiting": 0})


async def test_it_may_come_first_or_last(hand: Hand) -> None:
    started: list[subprocess.Popen[str]] = []

    async def start_later() -> None:
        await until(lambda: os.path.exists(hand.directory / "engine"))
        started.append(hand.start())

    async with anyio.create_task_group() as group:
        group.start_soon(start_later)
        async with open_engine_client(address=hand.address()) as client:
            assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]
    assert len(started) == 1


async def test_leaving_removes_the_files_of_the_sockets(hand: Hand) -> None:
    before = set(os.listdir(hand.directory))
    engine = hand.start()
    async with open_engine_client(address=hand.address()):
        assert set(os.listdir(hand.directory)) > before
    engine.kill()
    engine.wait()
    assert {name for name in os.listdir(hand.directory) if not name.startswith("log-")} == before


async def test_over_tcp_with_keys(hand: Hand) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    engine = hand.start("--keys", str(hand.keys), connect=address)
    async with open_engine_client(address=address, keys=hand.keys) as client:
        assert (await client.generate([1], SamplingParams(max_tokens=2))).token_ids == [2, 3]
        keys = ConnectionKeys.load(hand.keys)
        command_line = (
            Path(f"/proc/{engine.pid}/cmdline").read_bytes() + Path(f"/proc/{engine.pid}/environ").read_bytes()
        )
        for secret in (keys.token, keys.engine_secret, keys.server_secret):
            assert secret.encode() not in command_line


async def test_who_has_other_keys_or_another_token_is_refused_and_logged(
    hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    keys = ConnectionKeys.load(hand.keys)
    other_keys, stale_token = hand.directory / "other", hand.directory / "stale"
    ConnectionKeys.generate().save(other_keys)
    ConnectionKeys(keys.server_public, keys.server_secret, keys.engine_public, keys.engine_secret, "0" * 32).save(
        stale_token
    )
    strangers = [hand.start("--keys", str(keys), connect=address) for keys in (other_keys, stale_token)]
    await until(lambda: all("serves who listens" in hand.log(stranger) for stranger in strangers))
    with pytest.raises(EngineStartError, match="no engine came"):
        async with open_engine_client(address=address, keys=hand.keys, start_limits=StartLimits(hello=1.5)):
            pass
    assert "without this engine's token was refused" in caplog.text
    assert "without the right keys was refused" in caplog.text
    hand.start("--keys", str(hand.keys), connect=address)
    async with open_engine_client(address=address, keys=hand.keys) as client:
        assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "its connection was lost"), (signal.SIGTERM, "it said goodbye")]
)
async def test_death_and_goodbye_are_told_apart_at_once(hand: Hand, number: int, words: str) -> None:
    engine = hand.start("step_delay=0.001")
    errors: list[EngineDeadError] = []

    async def wait(awaitable: Any) -> None:
        with pytest.raises(EngineDeadError) as caught:
            await awaitable
        errors.append(caught.value)

    async with open_engine_client(address=hand.address()) as client:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                for _ in range(10):
                    group.start_soon(wait, client.generate([0], FOREVER))
                group.start_soon(wait, client.wait_dead())
                await until(lambda: client.health().steps > 3)
                engine.send_signal(number)
        assert client.health().state == "dead"
    assert len({id(error) for error in errors}) == 11
    for error in errors:
        assert words in str(error)
        assert str(engine.pid) in str(error)
        assert "where it was started" in str(error)
    if number == signal.SIGTERM:
        assert engine.wait() == 0


async def test_strangers_that_come_and_go_do_not_concern_the_engine(
    hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    """A port scanner, a peer with other keys, and a second client that tries the same address."""
    address = f"tcp://127.0.0.1:{(port := free_port())}"
    other_keys = hand.directory / "other"
    ConnectionKeys.generate().save(other_keys)
    hand.start("step_delay=0.001", "--keys", str(hand.keys), connect=address)
    async with open_engine_client(address=address, keys=hand.keys) as client:
        async with client.open_request([0], FOREVER) as request:
            for _ in range(5):
                socket.create_connection(("127.0.0.1", port)).close()
            stranger = hand.start("--keys", str(other_keys), connect=address)
            await until(lambda: "without the right keys" in caplog.text, 10)
            with pytest.raises(AddressError, match="cannot be bound"):
                async with open_engine_client(address=address, keys=hand.keys):
                    pass
            stranger.kill()
            stranger.wait()
            for _ in range(20):
                await anext(request)
            assert client.health().state == "alive"


async def test_silence_is_not_death(hand: Hand) -> None:
    engine = hand.start("step_delay=0.001")
    async with open_engine_client(address=hand.address()) as client:
        async with client.open_request([0], SamplingParams(max_tokens=500)) as request:
            await anext(request)
            engine.send_signal(signal.SIGSTOP)
            await until(lambda: client.health(timeout=1).state == "unresponsive")
            engine.send_signal(signal.SIGCONT)
            await request.completion()
        await until(lambda: client.health(timeout=1).state == "alive")


async def test_an_exception_in_the_engine_comes_with_its_traceback(hand: Hand) -> None:
    engine = hand.start()
    async with open_engine_client(address=hand.address()) as client:
        await client.call_utility("raise_in_step", "boom-583")
        with pytest.raises(EngineDeadError, match=r"boom-583(.|\n)*traceback in the engine"):
            await client.generate([0])
    assert engine.wait() == 1
    assert "boom-583" in hand.log(engine)


async def test_an_engine_that_comes_back_is_a_new_one(hand: Hand, caplog: pytest.LogCaptureFixture) -> None:
    first = hand.start("step_delay=0.001")
    policy = RestartPolicy(limit=2, backoff=0)
    async with open_engine_client(address=hand.address(), restart=policy) as client:
        with pytest.raises(EngineDeadError):
            async with client.open_request([0], FOREVER) as request:
                await anext(request)
                first.kill()
                async for _ in request:
                    pass
        second = hand.start()
        assert (await client.generate([5], SamplingParams(max_tokens=1))).token_ids == [6]
        assert client.health().pid == second.pid
    assert "is gone: its connection was lost; waiting for one to come back (1 of 2)" in caplog.text
    assert "restart" not in caplog.text


async def test_one_that_comes_back_before_it_is_expected_is_not_turned_away(hand: Hand) -> None:
    first = hand.start()
    policy = RestartPolicy(limit=1, backoff=1.0)
    async with open_engine_client(address=hand.address(), restart=policy) as client:
        first.kill()
        with pytest.raises(EngineDeadError):
            await client.wait_dead()
        second = hand.start()
        await until(lambda: client._session.early_hello is not None)
        assert client.health().state == "restarting"
        with anyio.fail_after(20):
            assert (await client.generate([5], SamplingParams(max_tokens=1))).token_ids == [6]
        assert client.health().pid == second.pid


async def test_one_that_comes_back_after_the_limit_has_another_chance(hand: Hand) -> None:
    first = hand.start()
    policy, limits = RestartPolicy(limit=10, backoff=0.1), StartLimits(hello=1.0)
    async with open_engine_client(address=hand.address(), restart=policy, start_limits=limits) as client:
        first.kill()
        with pytest.raises(EngineDeadError):
            await client.wait_dead()
        await until(lambda: "no HELLO" in (getattr(client._session.last_report, "reason", None) or ""))
        second = hand.start()
        with anyio.fail_after(15):
            assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]
        assert client.health().pid == second.pid


async def test_drain_lets_the_requests_of_this_client_finish(hand: Hand) -> None:
    hand.start("step_delay=0.005")
    finished: list[int] = []

    async def generate(client: Any, start: int) -> None:
        completion = await client.generate([start], SamplingParams(max_tokens=50))
        finished.append(len(completion.token_ids))

    async with anyio.create_task_group() as group:
        async with open_engine_client(address=hand.address(), shutdown=ShutdownPolicy(mode="drain")) as client:
            for start in range(5):
                group.start_soon(generate, client, start)
            await until(lambda: client.health().steps > 2)
    assert finished == [50] * 5


async def test_an_engine_that_does_not_say_goodbye_is_left_alone(hand: Hand, caplog: pytest.LogCaptureFixture) -> None:
    engine = hand.start()
    async with open_engine_client(address=hand.address(), shutdown=ShutdownPolicy(grace=0.3)) as client:
        assert client.health()
        engine.send_signal(signal.SIGSTOP)
    assert is_running(engine.pid)
    assert "has not ended 0.3 s after SHUTDOWN" in caplog.text
    engine.send_signal(signal.SIGCONT)
    async with open_engine_client(address=hand.address()) as client:
        assert (await client.generate([1], SamplingParams(max_tokens=1))).token_ids == [2]


def test_the_engine_says_what_happens_and_ends_on_ctrl_c(hand: Hand) -> None:
    engine = hand.start()
    until_sync(lambda: "serves who listens" in hand.log(engine))
    engine.send_signal(signal.SIGINT)
    assert engine.wait(30) == 130
    assert "Traceback" not in hand.log(engine)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([SCRIPTED], 2, "--connect"),
        ([SCRIPTED, "--connect", "tcp://127.0.0.1:4000"], 2, "need keys"),
        ([SCRIPTED, "--connect", "tcp://127.0.0.1:0", "--keys", "KEYS"], 2, "port from 1 to 65535"),
        ([SCRIPTED, "--connect", "udp://127.0.0.1:4"], 2, "expected tcp://HOST:PORT or ipc:///PATH"),
        ([SCRIPTED, "--connect", "ipc:///tmp/x", "--keys", "/no/such/file"], 2, "cannot be read"),
        ([SCRIPTED, "step_delay", "--connect", "ipc:///tmp/x"], 2, "is not NAME=VALUE"),
        ([SCRIPTED, "--connect", "tcp://a b:4000", "--keys", "KEYS"], 2, "cannot be connected to"),
        (["no.such:Engine", "--connect", "ipc:///tmp/x"], 2, "No module named 'no'"),
        (["scripted", "--connect", "ipc:///tmp/x"], 2, "'scripted' does not have the form package.module:Class"),
        (
            [f"{SCRIPTED}s", "--connect", "ipc:///tmp/x"],
            2,
            "has no 'ScriptedEngines'; it has the engines ScriptedEngine",
        ),
        ([SCRIPTED, "no_such=1", "--connect", "ipc:///tmp/x"], 2, "ScriptedEngine has no argument 'no_such'; it has "),
        ([SCRIPTED, "stepdelay=1", "--connect", "ipc:///tmp/x"], 2, "did you mean 'step_delay'?"),
        ([TRANSFORMERS, "model=/nope", "--connect", "ipc:///tmp/x"], 2, "engine: FileNotFoundError: model='/nope'"),
        ([SCRIPTED, "--conect", "ipc:///tmp/x"], 2, "no option --conect; did you mean '--connect'?"),
        ([SCRIPTED, "--conn=ipc:///tmp/x"], 2, "no option --conn; did you mean '--connect'?"),
    ],
)
def test_bad_arguments_of_the_engine(hand: Hand, words: list[str], code: int, message: str) -> None:
    program = [sys.executable, "-m", "anyengine.engine.attach"]
    arguments = [str(hand.keys) if word == "KEYS" else word for word in words]
    result = subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_package_that_loading_needs_is_missing() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from anyengine.engine.attach import main; "
        f"sys.exit(main(['{TRANSFORMERS}', '--connect', 'ipc:///tmp/x']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == 1
    assert re.search(r"^anyengine engine: .*torch", result.stderr, re.MULTILINE)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"address": 5}, TypeError, "address=5"),
        ({"address": "tcp://127.0.0.1:4000"}, AddressError, "need keys"),
        ({"address": "127.0.0.1:4000"}, AddressError, "expected tcp://HOST:PORT"),
        ({"address": "tcp://127.0.0.1:0", "keys": "KEYS"}, AddressError, "port from 1 to 65535"),
        ({"address": "ipc://relative"}, AddressError, "absolute path"),
        ({"address": f"ipc:///{'x' * 120}"}, AddressError, "100 bytes at most"),
        ({"address": "ipc:///tmp/x", "placement": "thread"}, ValueError, "placement='thread'"),
        ({"address": "ipc:///tmp/x", "transport": "tcp"}, ValueError, "transport is for an engine"),
        ({"address": "ipc:///tmp/x", "launcher": ProcessLauncher()}, ValueError, "launcher is for an engine"),
        ({"address": "ipc:///tmp/x", "spec": scripted_spec()}, ValueError, "spec and address"),
        ({"keys": "KEYS", "spec": scripted_spec()}, ValueError, "there is no address"),
        ({"address": "ipc:///tmp/x", "keys": "/no/such/file"}, KeysError, "cannot be read"),
        ({}, TypeError, "expected an EngineSpec"),
    ],
)
def test_bad_arguments_of_the_client(hand: Hand, options: dict[str, Any], error: type[Exception], message: str) -> None:
    if options.get("keys") == "KEYS":
        options = {**options, "keys": hand.keys}
    with pytest.raises(error, match=message):
        open_engine_client(**options)


async def test_addresses_that_cannot_be_bound(hand: Hand) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for address in (f"tcp://127.0.0.1:{port}", "tcp://192.0.2.7:4000", "tcp://no-such-interface:4000"):
            with pytest.raises(AddressError, match=f"{address}.*cannot be bound"):
                async with open_engine_client(address=address, keys=hand.keys):
                    pass
    with pytest.raises(AddressError, match="cannot be bound"):
        async with open_engine_client(address="ipc:///no/such/directory/x"):
            pass


async def test_an_ipc_address_is_not_taken_from_who_listens_there(hand: Hand) -> None:
    context: zmq.Context[Any] = zmq.Context()
    other = context.socket(zmq.PULL)
    other.bind(hand.address())
    with pytest.raises(AddressError, match="in use"):
        async with open_engine_client(address=hand.address()):
            pass
    other.close(linger=0)
    context.term()
    hand.start()
    async with open_engine_client(address=hand.address()) as client:
        assert client.health()


def test_keys_that_others_can_read_or_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    ConnectionKeys.generate().save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert ConnectionKeys.load(path).token_bytes
    with pytest.raises(KeysError, match="File exists"):
        ConnectionKeys.generate().save(path)
    path.chmod(0o640)
    with pytest.raises(KeysError, match="chmod 600"):
        ConnectionKeys.load(path)
    mixed = ConnectionKeys.generate()
    one, other = ConnectionKeys.generate(), tmp_path / "mixed"
    ConnectionKeys(mixed.server_public, one.server_secret, one.engine_public, one.engine_secret, one.token).save(other)
    with pytest.raises(KeysError, match="do not belong together"):
        ConnectionKeys.load(other)
    for text, message in (("", "not a file of keys"), ("[]", "does not hold"), ('{"token": "1"}', "does not hold")):
        path.chmod(0o600)
        path.write_text(text)
        with pytest.raises(KeysError, match=message):
            ConnectionKeys.load(path)
    assert "secret" not in repr(ConnectionKeys.generate())
