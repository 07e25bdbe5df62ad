"""The examples of several processes: two frontends that share an engine, and an engine that is started by hand."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from tests.cli.programs import CLI, Sandbox, Terminal, default_model_converted, sandbox
from tests.helpers import is_running, until_sync

from anyengine import ConnectionKeys, EngineDeadError, open_engine_client

__all__ = ["default_model_converted", "sandbox"]

SENTENCE = " a scripted engine recites this sentence to everybody, one byte at a time, again and again,"
REFRAIN = ", and on it goes, and on, and on"

backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def example(name: str, *options: str, engine: str = "scripted") -> list[str]:
    return [sys.executable, f"examples/{name}.py", "--engine", engine, *options]


class Running:
    """An example that runs, and what it has shown so far."""

    def __init__(self, sandbox: Sandbox, command: list[str]) -> None:
        self.shown = ""
        self._log = sandbox.directory / "shown"
        with self._log.open("w") as log:
            self.process = sandbox.start(command, stdout=log, stderr=log)

    def expect(self, pattern: str, timeout: float = 30) -> re.Match[str]:
        """Wait until ``pattern`` is shown."""

        def found() -> re.Match[str] | None:
            self.shown = self._log.read_text()
            return re.search(pattern, self.shown)

        until_sync(found, timeout)
        match = found()
        assert match is not None
        return match

    def end(self, number: signal.Signals) -> None:
        """Send it a signal, which must end it in good order."""
        self.process.send_signal(number)
        assert self.process.wait(10) == 128 + number
        assert "Traceback" not in self._log.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.unlink()


@contextmanager
def running(sandbox: Sandbox, command: list[str]) -> Generator[Running]:
    program = Running(sandbox, command)
    try:
        yield program
    finally:
        program.close()


# ---- two frontends, one engine ----


def assert_shared(shown: str) -> None:
    """The lines of both frontends, and what the engine said of their requests before and after the kill."""
    figures = re.findall(r"\[the engine says: running (\d), waiting 0", shown)
    assert figures == ["1", "2", "1"]
    while_both, _, after = shown.partition("[killing the second frontend, pid ")
    assert "\nfirst  |" in while_both
    assert "\nsecond |" in while_both
    assert "\nfirst  |" in after
    last = after.splitlines()[-1]
    found = re.fullmatch(
        r"\[the first one's stream: (\d+) tokens in the ([\d.]+) s since then, and never more than \d+ ms without one]",
        last,
    )
    assert found is not None, last
    assert int(found[1]) > 0
    assert float(found[2]) >= 1


@backends
def test_two_frontends_share_one_engine(sandbox: Sandbox, backend: str) -> None:
    result = sandbox.run(example("shared_engine", "--backend", backend), 50)
    assert (result.returncode, result.stderr) == (0, "")
    assert_shared(result.stdout)
    for name in ("first ", "second"):
        text = "".join(re.findall(rf"^{name} \|(.*)$", result.stdout, re.MULTILINE))
        assert (SENTENCE * 10).startswith(text), f"a hole in what {name} got"


@pytest.mark.engines
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("default_model_converted")
def test_two_frontends_share_the_real_model(sandbox: Sandbox) -> None:
    result = sandbox.run(example("shared_engine", engine="default"), 150)
    assert (result.returncode, result.stderr) == (0, "")
    assert_shared(result.stdout)


@backends
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_engine_and_both_frontends(sandbox: Sandbox, backend: str, number: signal.Signals) -> None:
    with running(sandbox, example("shared_engine", "--backend", backend)) as program:
        program.expect(r"second \|")
        assert len(sandbox.processes()) == 3
        program.end(number)
        assert not sandbox.processes()


def test_when_the_engine_dies_both_frontends_say_so_and_end(sandbox: Sandbox) -> None:
    with running(sandbox, example("shared_engine")) as program:
        program.expect(r"second \|")
        (engine,) = (
            pid for pid in sandbox.processes() if b"anyengine.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(engine, signal.SIGKILL)
        assert program.process.wait(10) == 1
        program.expect(rf"first: engine 0 \(pid {engine}\) died while it was serving: signal SIGKILL")
        assert "Traceback" not in program.shown


def test_when_the_first_frontend_is_killed_nothing_stays(sandbox: Sandbox) -> None:
    with running(sandbox, example("shared_engine")) as program:
        program.expect(r"second \|")
        program.process.kill()
        until_sync(lambda: not sandbox.processes() - {program.process.pid})
        program.expect("second: attached engine 0 .* is gone: its connection was lost")
        for directory in sandbox.directory.glob("anyengine*/"):
            shutil.rmtree(directory)  # who is killed cannot clear away


# ---- an engine that is started by hand ----


def assert_attached(shown: str) -> None:
    """Three engines one after the other, each of which ended in another way, and the streams that they served."""
    pids = re.findall(r"^\[[\w.]+, pid (\d+)\] Once upon a time", shown, re.MULTILINE)
    assert len(pids) == 4
    assert len(set(pids[:3])) == 3
    assert pids[2] == pids[3]
    assert re.findall(r"\[\$ kill -(\w+) (\d+)\]", shown) == [("KILL", pids[0]), ("TERM", pids[1])]
    assert re.findall(r"\[engine (\d+) is gone: (.*)\]", shown) == [
        (pids[0], "its connection was lost"),
        (pids[1], "it said goodbye"),
    ]
    assert len(re.findall(r"\[finished: \w+\]", shown)) == 2


@backends
def test_the_demonstration_plays_the_other_terminal(sandbox: Sandbox, backend: str) -> None:
    result = sandbox.run(example("attached_engine", "--demo", "--backend", backend), 60)
    assert result.returncode == 0, result.stderr
    assert_attached(result.stdout)
    assert result.stdout.count(f"Once upon a time{REFRAIN} [finished: stop]\n") == 2
    assert "Traceback" not in result.stderr


def test_the_demonstration_over_tcp(sandbox: Sandbox) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    result = sandbox.run(example("attached_engine", "--demo", "--address", address), 60)
    assert result.returncode == 0, result.stderr
    assert f"--connect {address} --keys" in result.stdout
    assert_attached(result.stdout)


@pytest.mark.engines
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("default_model_converted")
def test_the_demonstration_with_the_real_model(sandbox: Sandbox) -> None:
    result = sandbox.run(example("attached_engine", "--demo", engine="default"), 200)
    assert result.returncode == 0, result.stderr
    assert_attached(result.stdout)


@backends
def test_a_person_types_the_commands(sandbox: Sandbox, backend: str) -> None:
    """Character by character those that are shown, and the engine then ends as engines do."""
    with running(sandbox, example("attached_engine", "--backend", backend)) as program:
        shown = program.expect(r"\n    anyengine (keys .*)\n    anyengine (engine .*)\n")
        keys, engine = ([*CLI, *shlex.split(words)] for words in shown.groups())
        assert sandbox.run(keys, 20).returncode == 0
        for number, word in ((signal.SIGINT, "it said goodbye"), (signal.SIGKILL, "its connection was lost")):
            started = sandbox.start(engine, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            program.expect(rf"pid {started.pid}\] Once upon a time, and")
            started.send_signal(number)
            program.expect(rf"\[engine {started.pid} is gone: {word}\]\n.*waits for it to come back")
            started.wait()
        started = sandbox.start(engine, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        program.expect(rf"pid {started.pid}\] Once upon a time, and")
        program.end(signal.SIGINT)
        assert is_running(started.pid), "it is not the example's to end"
        started.terminate()
        assert started.wait(5) == 0
        assert not list(sandbox.directory.glob("anyengine-*"))


def test_an_exception_in_the_engine_is_told_with_its_message(sandbox: Sandbox, tmp_path: Path) -> None:
    other_address, keys_file = f"ipc://{tmp_path}/other", tmp_path / "keys"

    async def have_it_raise() -> None:
        async with open_engine_client(address=other_address, keys=keys_file) as client:
            await client.call_utility("raise_in_step", "the KV cache is full of sand")
            with pytest.raises(EngineDeadError):
                await client.wait_dead()

    with running(sandbox, example("attached_engine")) as program:
        shown = program.expect(r"\n    anyengine keys (.*)\n    anyengine (engine .*)\n")
        keys = ConnectionKeys.generate()
        for path in (keys_file, shown[1]):
            keys.save(path)
        words = [*CLI, *shlex.split(shown[2]), "--connect", other_address]
        engine = sandbox.start(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        program.expect(rf"pid {engine.pid}\] Once upon a time, and")
        anyio.run(have_it_raise)
        program.expect(rf"\[engine {engine.pid} is gone: it died: RuntimeError: the KV cache is full of sand\]\n")
        assert engine.wait(5) == 1
        program.end(signal.SIGTERM)


@backends
@pytest.mark.parametrize("moment", ["before the keys", "before the engine", "streaming"])
def test_ctrl_c_at_any_moment(sandbox: Sandbox, backend: str, moment: str) -> None:
    options = ["--demo"] if moment == "streaming" else []
    with running(sandbox, example("attached_engine", *options, "--backend", backend)) as program:
        shown = program.expect(r"\n    anyengine (keys .*)\n    anyengine engine .*\n")
        if moment == "streaming":
            program.expect("Once upon a time, and")
        if moment == "before the engine":
            assert sandbox.run([*CLI, *shlex.split(shown[1])], 20).returncode == 0
            socket_file = Path(shlex.split(shown[1])[1]).with_name("engine")
            until_sync(socket_file.exists, 10)
        program.end(signal.SIGINT)
        assert not sandbox.processes()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://127.0.0.1:0", "AddressError: address='tcp://127.0.0.1:0': expected tcp://HOST:PORT with a port"),
        ("ipc:///no/such/directory/x", "AddressError: address='ipc:///no/such/directory/x' cannot be bound"),
    ],
)
def test_an_address_that_cannot_be(sandbox: Sandbox, address: str, message: str) -> None:
    result = sandbox.run(example("attached_engine", "--demo", "--address", address), 30)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


# ---- both on a terminal ----


@pytest.mark.parametrize(
    ("command", "shown"),
    [(example("shared_engine"), r"second \|"), (example("attached_engine", "--demo"), "Once upon a time, and")],
    ids=["shared", "attached"],
)
def test_ctrl_c_in_a_terminal(sandbox: Sandbox, command: list[str], shown: str) -> None:
    with Terminal(sandbox, command) as terminal:
        terminal.expect(shown)
        terminal.press("\x03")
        assert terminal.wait(20) == 130
        assert not sandbox.processes()
    assert "Traceback" not in terminal.text
    assert "Error" not in terminal.text
