"""``anyengine generate``: text, figures, and every way in which it can end.

With the real model where that matters, and with an engine that recites where the command line alone is in question.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.cli import reciting_engine
from tests.cli.programs import CLI, CONTROLS, Sandbox, Terminal, default_model_converted, sandbox

from anyengine.engines.transformers.checkpoint import NAME, cache_directory

__all__ = ["default_model_converted", "sandbox"]

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180), pytest.mark.usefixtures("default_model_converted")]

STORY = "Once upon a time, in a village by the sea,"
ENDS_WITHIN = 5.0
"""Seconds that an interrupted program may take on a busy machine; on a quiet one it is a fraction of one."""

RECITING = reciting_engine.CLI
PROGRAMS = pytest.mark.parametrize(
    ("program", "backend"), [(CLI, "trio"), (RECITING, "asyncio"), (RECITING, "trio")], ids=["real", "asyncio", "trio"]
)

FIGURES = r"\d+ tokens in \d+\.\d\d s, \d+\.\d tokens/s, first token after \d+\.\d\d s"


def read_first(process: subprocess.Popen[str]) -> str:
    """The first characters of a program's stdout."""
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 4096).decode()


@PROGRAMS
def test_text_goes_to_stdout_and_the_rest_to_stderr(sandbox: Sandbox, program: list[str], backend: str) -> None:
    # "default" may be left out, and greedy decoding says the same each time.
    model = ["default"] if backend == "trio" else []
    result = sandbox.run(
        [*program, "generate", *model, "The capital of France is", "--max-tokens", "6", "--backend", backend]
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" Paris.")
    assert result.stdout.endswith("\n")
    assert not CONTROLS.search(result.stdout + result.stderr)
    assert re.search(rf"^{FIGURES}, finished: length$", result.stderr, re.MULTILINE)
    assert ("loading weights ..." if program is CLI else "loading ...") in result.stderr


def test_stop_strings_and_threads(sandbox: Sandbox) -> None:
    options = ["--stop", "London", "--stop", ".", "--threads", "3"]
    result = sandbox.run([*RECITING, "generate", "The capital of France is", "--max-tokens", "6", *options])
    assert result.stdout == " Paris\n"
    assert "3 threads\n" in result.stderr
    assert re.search(rf"^{FIGURES}, finished: stop$", result.stderr, re.MULTILINE)


def test_a_long_prompt_on_stdin_leaves_room_for_fewer_tokens(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("the " * 8181 + "sea\n")  # a token for each word, of 8192 that the engine takes
    command = [*RECITING, "generate", "default", "-"]
    with open(tmp_path / "prompt") as prompt:
        result = sandbox.run(command, stdin=prompt)
    assert re.search(r"^10 tokens in .*, finished: length$", result.stderr, re.MULTILINE), result.stderr
    with open(tmp_path / "prompt") as prompt:
        result = sandbox.run([*command, "--max-tokens", "11"], stdin=prompt)
    assert result.returncode == 1
    assert "max_tokens=11: expected at most 10" in result.stderr


def test_chat_on_a_terminal(sandbox: Sandbox) -> None:
    command = [*CLI, "generate", "default", "What is the capital of France?", "--chat", "--backend", "trio"]
    with Terminal(sandbox, command) as terminal:
        terminal.expect("loading weights")
        terminal.expect("Paris")
        assert terminal.wait(60) == 0
    # Once the bar is gone nothing but text and the line of figures follows.
    text = terminal.shown[terminal.shown.rindex("\x1b[?25h") :]
    assert re.search(r"Paris[^\x1b]*\n.*tokens in .* finished: stop", text, re.DOTALL)
    assert "<|im_" not in text


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ctrl_c_while_it_loads(sandbox: Sandbox, backend: str) -> None:
    with Terminal(sandbox, [*CLI, "generate", STORY, "--backend", backend]) as terminal:
        terminal.expect("importing torch")
        terminal.press("\x03")
        assert terminal.wait(ENDS_WITHIN) == 130
        assert not sandbox.processes()
    assert "interrupted by SIGINT before the request was sent" in terminal.shown
    assert "Traceback" not in terminal.shown
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")


@PROGRAMS
def test_ctrl_c_while_it_generates(sandbox: Sandbox, program: list[str], backend: str) -> None:
    with Terminal(sandbox, [*program, "generate", STORY, "--max-tokens", "4000", "--backend", backend]) as terminal:
        terminal.expect("there was a")
        terminal.press("\x03")
        assert terminal.wait(ENDS_WITHIN) == 130
        assert not sandbox.processes()
    # The note stands on a line of its own, below what was generated.
    assert re.search(
        rf"there was a.*\ninterrupted by SIGINT: request aborted, {FIGURES}\r\n$", terminal.text, re.DOTALL
    )
    assert "Traceback" not in terminal.shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals(sandbox: Sandbox, number: signal.Signals, code: int) -> None:
    process = sandbox.start([*RECITING, "generate", STORY, "--max-tokens", "4000"])
    assert read_first(process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=ENDS_WITHIN)
    assert process.returncode == code
    assert f"interrupted by {number.name}: request aborted" in stderr
    assert not sandbox.processes()


def test_a_reader_that_has_seen_enough(sandbox: Sandbox) -> None:
    command = 'set -o pipefail; "$@" | head -c 5; echo " $?"'
    result = sandbox.run(["bash", "-c", command, "bash", *RECITING, "generate", STORY, "--max-tokens", "4000"], 90)
    assert result.stdout == " Pari 141\n"
    # Nothing but the stages of loading.
    assert [line for line in result.stderr.splitlines() if not line.endswith(" ...")] == []


def test_the_engine_dies_while_it_generates(sandbox: Sandbox) -> None:
    process = sandbox.start([*RECITING, "generate", STORY, "--max-tokens", "4000"])
    assert read_first(process)
    os.kill(sandbox.engine(process), signal.SIGKILL)
    killed_at = time.monotonic()
    stdout, stderr = process.communicate(timeout=ENDS_WITHIN)
    assert time.monotonic() - killed_at < ENDS_WITHIN
    assert process.returncode == 1
    assert stdout.endswith("\n")
    assert "anyengine: EngineDeadError: engine 0" in stderr
    assert "died while it was serving: signal SIGKILL (9)" in stderr
    assert "Traceback" not in stderr


def test_a_model_that_does_not_load(sandbox: Sandbox, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(cache_directory() / NAME / name, tmp_path)
    result = sandbox.run([*CLI, "generate", str(tmp_path), "Hello"])
    assert result.returncode == 1
    assert result.stdout == ""
    message = result.stderr[result.stderr.index("anyengine: EngineStartError: engine 0") :]
    assert "died while it was loading" in message
    assert "no file named model.safetensors" in message
    assert "anyengine/cli" not in result.stderr


def test_a_prompt_that_is_too_long(sandbox: Sandbox) -> None:
    result = sandbox.run([*RECITING, "generate", "word " * 9000])
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.search(r"^anyengine: RequestRefusedError: the prompt has 900\d tokens", result.stderr, re.MULTILINE)
    assert "Traceback" not in result.stderr
