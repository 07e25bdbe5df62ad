"""What a person sees: progress, figures and errors on stderr, text on stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import stat
import sys
import time
from types import TracebackType
from typing import Self

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from anyengine.errors import EngineDeadError

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclasses.dataclass(slots=True)
class Figures:
    """How a request went: its tokens, and when it was sent, gave its first token, and ended (seconds)."""

    tokens: int = 0
    sent_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    finish_reason: str | None = None

    def send(self) -> None:
        """The request is about to be sent."""
        self.sent_at = time.perf_counter()

    def count(self, tokens: int) -> None:
        """So many tokens have come."""
        self.ended_at = time.perf_counter()
        if tokens and self.first_token_at is None:
            self.first_token_at = self.ended_at
        self.tokens += tokens

    def describe(self) -> str:
        """One line."""
        parts = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.sent_at is not None and self.ended_at is not None and self.first_token_at is not None:
            seconds = self.ended_at - self.sent_at
            parts[0] += f" in {seconds:.2f} s"
            parts.append(f"{self.tokens / seconds:.1f} tokens/s")
            parts.append(f"first token after {self.first_token_at - self.sent_at:.2f} s")
        if self.finish_reason is not None:
            parts.append(f"finished: {self.finish_reason}")
        return ", ".join(parts)


class Terminal:
    """The program's stderr."""

    def __init__(self) -> None:
        self.console: Console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.interactive: bool = sys.stderr.isatty() and not self.console.is_dumb_terminal

    def note(self, text: str) -> None:
        """One line beside the matter."""
        self.console.print(Text(text, style="dim"), soft_wrap=True)

    def error(self, error: BaseException) -> None:
        """One block that says what went wrong."""
        title, text = type(error).__name__, _describe(error)
        if self.interactive:
            self.console.rule(title, align="left", style="red")
        else:
            text = f"anyengine: {title}: {text}"
        # Lines stay whole, for whoever copies a traceback or searches a log.
        self.console.print(Text(text), soft_wrap=True)
        if self.interactive:
            self.console.rule(style="red")


def _describe(error: BaseException) -> str:
    if isinstance(error, EngineDeadError):
        # What the engine printed has just been shown, as it came.
        return dataclasses.replace(error.report, stderr_tail="").describe()
    return str(error).rstrip() or repr(error)


class LoadingBar:
    """A progress bar for the stages of loading; where nobody watches, one line for each stage.

    While the bar is there, rich takes over ``sys.stderr``, through which the engine's own lines come: they appear above
    the bar.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stage = ""
        self._progress: Progress | None = None
        if terminal.interactive:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
            )
            self._progress = Progress(*columns, console=terminal.console, transient=True)
            self._task = self._progress.add_task("starting the engine", total=None)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def update(self, stage: str, fraction: float | None) -> None:
        """Loading is in ``stage``, and ``fraction`` of it is done (None if nobody knows)."""
        if self._progress is not None:
            # Never quite 1.0: for rich the task would end with the first stage, and its clock would stop.
            done, total = (0.0, None) if fraction is None else (min(fraction, 0.999), 1.0)
            self._progress.update(self._task, description=stage, total=total, completed=done)
        elif stage != self._stage:
            self._terminal.note(f"{stage} ...")
        self._stage = stage

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()


class TextOutput:
    """Stdout, for text in pieces. A reader that stalls never blocks the event loop, so that Ctrl-C always works."""

    def __init__(self) -> None:
        self._fd = sys.stdout.fileno()
        self._encoding = sys.stdout.encoding
        self._is_terminal = os.isatty(self._fd)
        mode = os.fstat(self._fd).st_mode
        self._may_block = self._is_terminal or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        self._at_line_start = True

    async def write(self, text: str) -> None:
        """Write a piece of text.

        :raises BrokenPipeError: if nobody reads any more
        """
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        if self._is_terminal:
            # A model may say anything; a terminal must not obey it.
            text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
        data = memoryview(text.encode(self._encoding, "replace"))
        while data:
            if self._may_block:
                await anyio.wait_writable(self._fd)
            # So much never blocks where a pipe says that it can be written to.
            data = data[os.write(self._fd, data[: select.PIPE_BUF]) :]

    def end_line(self, *, echoed: bool = False) -> None:
        """End the line unless it is empty, so that what follows stands on its own; ignores a reader that is gone.

        :param echoed: the terminal has perhaps written ``^C`` there
        """
        if not self._at_line_start or (echoed and self._is_terminal):
            self._at_line_start = True
            with contextlib.suppress(OSError):  # whoever read it has all of the text
                os.write(self._fd, b"\n")
