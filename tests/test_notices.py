"""Warnings reach every handler that takes them, and one that nobody reads holds up neither caller nor interpreter."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anyengine import notices

PROGRAM = """
import logging, sys, time
from anyengine import notices, streams
size = 19_000
if sys.argv[2] == "no way":
    size = 1000
    def refuse(stream):
        raise OSError("there is no /proc")
    streams.UnblockedEnd = refuse
notices.ROOM_LIMIT = 0.05
for handler in (logging.StreamHandler(), logging.FileHandler(sys.argv[1])):
    logging.getLogger().addHandler(handler)
for number in range(100):
    notices.log_error("%s", str(number % 10) * size)
while notices.are_pending():
    time.sleep(0.01)
print("done", flush=True)
"""


@contextlib.contextmanager
def unread(kind: str) -> Iterator[int]:
    """The descriptor of a stream that nobody reads."""
    if kind == "socket":
        ends = socket.socketpair()
        with ends[0], ends[1]:
            yield ends[1].fileno()
        return
    reader, writer = pty.openpty() if kind == "terminal" else os.pipe()
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket", "no way"])
def test_long_records_that_nobody_reads_hold_up_no_exit_and_no_other_handler(kind: str, tmp_path: Path) -> None:
    """Where a pipe cannot be opened anew, there is room for short ones until it is full."""
    with unread(kind) as stderr:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log"), kind]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, b"done\n")
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "were not logged" not in line]
    assert [line[0] for line in lines] == [str(n % 10) for n in range(100)]


def test_a_reader_that_comes_late_is_told_what_it_has_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "ROOM_LIMIT", 0.05)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as received, os.fdopen(writer, "w") as stream:
        os.set_blocking(reader, False)
        handler = logging.StreamHandler(stream)
        notices.logger.addHandler(handler)
        monkeypatch.setattr(notices.logger, "propagate", False)
        try:
            for number in range(10):
                notices.warn("%s", str(number) * 19_000)
            await_all()
            received.read()
            notices.warn("at last")
            await_all()
            assert b"warnings before this one were not logged: nobody read them]\nat last\n" in received.read()
        finally:
            notices.logger.removeHandler(handler)


def test_without_a_thread_a_warning_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with unread("pipe") as writer, os.fdopen(os.dup(writer), "w") as stream:
        handler = logging.StreamHandler(stream)
        notices.logger.addHandler(handler)
        monkeypatch.setattr(notices.logger, "propagate", False)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                started = time.monotonic()
                for _ in range(10):
                    notices.warn("%s", "x" * 19_000)
            assert time.monotonic() - started < notices.ROOM_LIMIT / 2
        finally:
            notices.logger.removeHandler(handler)


def await_all() -> None:
    deadline = time.monotonic() + 30
    while notices.are_pending():
        assert time.monotonic() < deadline
        time.sleep(0.005)
