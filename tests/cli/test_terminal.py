"""What is written where: stdout that stalls or ends, and the progress bar beside the engine's own lines."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.cli.programs import Sandbox, Terminal, sandbox

from anyengine.cli.terminal import Figures, TextOutput

__all__ = ["sandbox"]


class Pipe:
    """A pipe whose writing end is ``sys.stdout``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reader, writer = os.pipe()
        self.writer = os.fdopen(writer, "w", encoding="utf-8")
        monkeypatch.setattr(sys, "stdout", self.writer)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.writer.close()
        self.close_reader()

    def close_reader(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1


@pytest.mark.anyio
async def test_a_stalled_reader_can_be_waited_for_and_given_up(
    anyio_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pipe(monkeypatch) as pipe:
        output = TextOutput()
        with anyio.move_on_after(0.2) as scope:
            while True:  # until the pipe is full
                await output.write("x" * 5000)
        assert scope.cancelled_caught
        received = b""
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(output.write, "the end")
                while not received.endswith(b"the end"):
                    await anyio.wait_readable(pipe.reader)
                    received += os.read(pipe.reader, 65536)
        assert len(received) > 30_000


@pytest.mark.anyio
async def test_a_reader_that_is_gone(anyio_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipe(monkeypatch) as pipe:
        output = TextOutput()
        await output.write("some text")
        pipe.close_reader()
        with pytest.raises(BrokenPipeError):
            await output.write("more")
        output.end_line()  # says nothing


@pytest.mark.anyio
async def test_a_file_is_written_as_it_is(anyio_backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        output = TextOutput()
        await output.write("日本\x1b[31m" + "y" * 10_000)
        output.end_line()
        output.end_line()
    assert path.read_text() == "日本\x1b[31m" + "y" * 10_000 + "\n"


def test_figures() -> None:
    figures = Figures()
    assert figures.describe() == "0 tokens"
    figures.send()
    figures.count(0)
    assert figures.describe() == "0 tokens"
    figures.count(1)
    figures.finish_reason = "stop"
    assert re.fullmatch(
        r"1 token in \d\.\d\d s, \d+\.\d tokens/s, first token after \d\.\d\d s, finished: stop", figures.describe()
    )


LOADING = """
import sys, threading, time
from anyengine.cli.terminal import LoadingBar, Terminal

def engine():
    for number in range(20):
        sys.stderr.write(f"line {number} of the engine [not markup]\\n")
        sys.stderr.flush()
        time.sleep(0.02)

with LoadingBar(Terminal()) as bar:
    printing = threading.Thread(target=engine)
    printing.start()
    for step in range(41):
        bar.update("stage one" if step < 20 else "stage two", step % 20 / 20)
        time.sleep(0.01)
    printing.join()
sys.stderr.write("after the bar\\n")
"""


def test_the_bar_and_the_engines_lines_stay_apart(sandbox: Sandbox) -> None:
    with Terminal(sandbox, [sys.executable, "-c", LOADING]) as terminal:
        assert terminal.wait(30) == 0
    shown = terminal.shown
    assert "stage one" in shown
    assert "stage two" in shown
    assert "%" in shown
    # Every line of the engine starts at the first column of a cleared line and is whole.
    pattern = r"(?:\r|\n|\x1b\[2K|\x1b\[1A)line {} of the engine \[not markup\]\r?\n"
    for number in range(20):
        assert re.search(pattern.format(number), shown), shown
    assert shown.rstrip().endswith("after the bar")
    # The bar is taken away and the cursor is back.
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_without_a_terminal_each_stage_is_a_line(sandbox: Sandbox) -> None:
    result = sandbox.run([sys.executable, "-c", LOADING])
    assert result.returncode == 0
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("stage")] == ["stage one ...", "stage two ..."]
    assert "\x1b" not in result.stderr
