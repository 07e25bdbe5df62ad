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
import tempfile
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


def example(name: str, *options: str, engine: str = "scripted") -> list[str]:
    return [sys.executable, f"examples/{name}.py", "--engine", engine, *options]


class Running:
    """An example that runs, and what it has shown so far."""

    def __init__(self, sandbox: Sandbox, command: list[str]) -> None:
        self.shown = ""
        descriptor, path = tempfile.mkstemp(prefix="shown-", dir=sandbox.directory)
        self._log = Path(path)
        with open(descriptor, "w") as log:
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
        assert self.process.wait(20) == 128 + number
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


@contextmanager
def running_on_both(sandbox: Sandbox, command: list[str]) -> Generator[list[Running]]:
    """On each backend, at the same time: most of that is waiting."""
    with (
        running(sandbox, [*command, "--backend", "asyncio"]) as on_asyncio,
        running(sandbox, [*command, "--backend", "trio"]) as on_trio,
    ):
        yield [on_asyncio, on_trio]


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


def test_two_frontends_share_one_engine(sandbox: Sandbox) -> None:
    commands = [example("shared_engine", "--backend", backend) for backend in ("asyncio", "trio")]
    for process in [sandbox.start(command) for command in commands]:
        shown, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert_shared(shown)
        for name in ("first ", "second"):
            text = "".join(re.findall(rf"^{name} \|(.*)$", shown, re.MULTILINE))
            assert (SENTENCE * 10).startswith(text), f"a hole in what {name} got"


@pytest.mark.engines
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("default_model_converted")
def test_two_frontends_share_the_real_model(sandbox: Sandbox) -> None:
    result = sandbox.run(example("shared_engine", engine="default"), 150)
    assert (result.returncode, result.stderr) == (0, "")
    assert_shared(result.stdout)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_engine_and_both_frontends(sandbox: Sandbox, number: signal.Signals) -> None:
    with running_on_both(sandbox, example("shared_engine")) as programs:
        for program in programs:
            program.expect(r"second \|")
        for left, program in zip((6, 3), programs, strict=True):
            assert len(sandbox.processes()) == left
            program.end(number)
        assert not sandbox.processes()


def test_when_the_engine_dies_both_frontends_say_so_and_end(sandbox: Sandbox) -> None:
    with running(sandbox, example("shared_engine")) as program:
        program.expect(r"second \|")
        (engine,) = (
            pid for pid in sandbox.processes() if b"anyengine.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(engine, signal.SIGKILL)
        assert program.process.wait(20) == 1
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


def test_the_demonstration_plays_the_other_terminal(sandbox: Sandbox) -> None:
    """On each backend, and over TCP; all at once, for most of it is waiting."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    ways = ([], ["--backend", "trio"], ["--address", address])
    started = [sandbox.start(example("attached_engine", "--demo", *options)) for options in ways]
    for process, options in zip(started, ways, strict=True):
        shown, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        assert_attached(shown)
        assert shown.count(f"Once upon a time{REFRAIN} [finished: stop]\n") == 2
        assert "Traceback" not in errors
        assert (f"--connect {address} --keys" in shown) == ("--address" in options)


@pytest.mark.engines
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("default_model_converted")
def test_the_real_model_started_by_hand(sandbox: Sandbox) -> None:
    with running(sandbox, example("attached_engine", engine="default")) as program:
        started = start_quietly(sandbox, make_keys(sandbox, program))
        program.expect(rf"(?s)pid {started.pid}\] Once upon a time.+\[finished: \w+\]", 120)
        program.end(signal.SIGINT)
        started.terminate()
        assert started.wait(20) == 0


def make_keys(sandbox: Sandbox, program: Running) -> list[str]:
    """Type the first of the commands that are shown; returns the second, which starts an engine."""
    shown = program.expect(r"\n    anyengine (keys .*)\n    anyengine (engine .*)\n")
    keys, engine = ([*CLI, *shlex.split(words)] for words in shown.groups())
    assert sandbox.run(keys, 30).returncode == 0
    return engine


def start_quietly(sandbox: Sandbox, command: list[str]) -> subprocess.Popen[str]:
    return sandbox.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_person_types_the_commands(sandbox: Sandbox) -> None:
    """Character by character those that are shown, and the engine then ends as engines do."""
    with running(sandbox, example("attached_engine", "--backend", "trio")) as program:
        engine = make_keys(sandbox, program)
        for number, word in ((signal.SIGINT, "it said goodbye"), (signal.SIGKILL, "its connection was lost")):
            started = start_quietly(sandbox, engine)
            program.expect(rf"pid {started.pid}\] Once upon a time, and")
            started.send_signal(number)
            program.expect(rf"\[engine {started.pid} is gone: {word}\]\n.*waits for it to come back")
            started.wait()
        started = start_quietly(sandbox, engine)
        program.expect(rf"pid {started.pid}\] Once upon a time, and")
        program.end(signal.SIGINT)
        assert is_running(started.pid), "it is not the example's to end"
        started.terminate()
        assert started.wait(20) == 0
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
        engine = start_quietly(sandbox, words)
        program.expect(rf"pid {engine.pid}\] Once upon a time, and")
        anyio.run(have_it_raise)
        program.expect(rf"\[engine {engine.pid} is gone: it died: RuntimeError: the KV cache is full of sand\]\n")
        assert engine.wait(20) == 1
        program.end(signal.SIGTERM)


@pytest.mark.parametrize("moment", ["before the keys", "before the engine", "streaming"])
def test_ctrl_c_at_any_moment(sandbox: Sandbox, moment: str) -> None:
    options = ["--demo"] if moment == "streaming" else []
    with running_on_both(sandbox, example("attached_engine", *options)) as programs:
        for program in programs:
            shown = program.expect(r"\n    anyengine keys (.*)\n    anyengine engine .*\n")
            if moment == "streaming":
                program.expect("Once upon a time, and")
            if moment == "before the engine":
                make_keys(sandbox, program)
                until_sync(Path(shown[1]).with_name("engine").exists, 30)
        for program in programs:
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
