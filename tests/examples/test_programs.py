"""The examples run, on both backends, and show what their docstrings promise."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest
from tests.cli.programs import ROOT, Sandbox, default_model_converted, sandbox
from tests.examples.running import run

__all__ = ["default_model_converted", "sandbox"]


def test_streaming(sandbox: Sandbox) -> None:
    for shown in run(sandbox, "streaming"):
        assert re.search(r"\[scripted, pid \d+\]", shown)
        assert "village by the sea, a scripted engine recites" in shown
        assert shown.endswith("\n[finished: length]\n")


@pytest.mark.engines
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("default_model_converted")
def test_streaming_with_the_real_model(sandbox: Sandbox) -> None:
    (shown,) = run(sandbox, "streaming", backends=["asyncio"], engine="default")
    assert "[loading weights: done]" in shown
    assert "village by the sea, there was a" in shown
    assert shown.endswith("\n[finished: length]\n")


def test_chat(sandbox: Sandbox) -> None:
    answer = " a scripted engine recites this sentence to everybody\n[finished: stop, ',']\n"
    for shown in run(sandbox, "chat"):
        assert (
            f"> What is the capital of France?\n{answer}> And of Italy?\n{answer}[the engine runs 0 requests]\n"
            in shown
        )


@pytest.mark.engines
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("default_model_converted")
def test_chat_with_the_real_model(sandbox: Sandbox) -> None:
    (shown,) = run(sandbox, "chat", backends=["trio"], engine="default")
    assert re.search(r"France\?\n.*Paris\n\[finished: stop, '\.'\]\n> And of Italy\?\n.*Rome", shown)


def test_deadlines(sandbox: Sandbox) -> None:
    for shown in run(sandbox, "deadlines"):
        states = {int(characters): state for state, characters in re.findall(r"s  (\w+) +(\d+) characters", shown)}
        ends = re.findall(r"s  (deadline|finished) ", shown)
        assert len(ends) == 12
        # The first had half a second for what takes more than one, the last had six.
        assert ends[0] == "deadline"
        assert ends[-1] == "finished"
        assert states[60] == "finished"
        assert "live_requests=0, aborting_requests=0" in shown
        assert "engine={'running': 0, 'waiting': 0}" in shown


def test_cancel(sandbox: Sandbox) -> None:
    for shown in run(sandbox, "cancel"):
        assert "waited for 1.5 s, without a token" in shown
        assert "before: the client has 2 live requests; the engine says: running 1, waiting 1" in shown
        freed = re.search(r"came (\d+) ms after the cancellation", shown)
        assert freed is not None
        assert int(freed[1]) < 1000
        assert "after: the client has 0 live requests; the engine says: running 0, waiting 0" in shown


def test_crash(sandbox: Sandbox) -> None:
    for shown in run(sandbox, "crash"):
        deaths = re.findall(r"(Engine\w+Error): engine 0 \(pid \d+\) died while it was (\w+): (.*)", shown)
        assert deaths == [
            ("EngineDeadError", "serving", "signal SIGSEGV (11)"),
            ("EngineDeadError", "serving", "signal SIGKILL (9)"),
            ("EngineDeadError", "serving", "exit code 1"),
            ("EngineStartError", "loading", "exit code 1"),
        ]
        assert "Fatal Python error: Segmentation fault" in shown
        assert "out-of-memory killer" in shown
        assert "RuntimeError: the KV cache is full of sand" in shown
        assert "RuntimeError: loading failed, as it was told to" in shown
        assert shown.count("health: dead, 0 live requests") == 3


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("name", ["streaming", "chat", "sync_generate"])
def test_ctrl_c_ends_them_quietly(sandbox: Sandbox, name: str, backend: str) -> None:
    options = ["--engine", "scripted", "--backend", backend, *(["--stop", "~"] if name == "chat" else [])]
    process = sandbox.start([sys.executable, f"examples/{name}.py", *options])
    assert process.stdout is not None
    shown = ""
    while "a scripted" not in shown:
        piece = os.read(process.stdout.fileno(), 4096).decode()
        assert piece, shown
        shown += piece
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")


def test_an_engine_that_there_is_not_is_refused(sandbox: Sandbox) -> None:
    result = sandbox.run(["env", "ANYENGINE_EXAMPLE_ENGINE=foo", sys.executable, "examples/streaming.py"], 20)
    assert result.returncode == 2
    assert "ANYENGINE_EXAMPLE_ENGINE='foo': expected default or scripted" in result.stderr


def test_every_example_tells_how_it_is_run() -> None:
    programs = {path for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()}
    assert len(programs) == 13
    for path in programs:
        assert re.search(rf"python examples/{path.name} ([A-Z]+ )*\[--", path.read_text().split('"""')[1])
