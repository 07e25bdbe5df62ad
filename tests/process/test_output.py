"""What a child prints: nothing is lost, characters stay whole, and memory is given back."""

from __future__ import annotations

import contextlib
import os

from anyengine.process.output import TAIL_LINES, ChildOutput


def test_characters_stay_whole_however_they_are_cut() -> None:
    output = ChildOutput()
    owner = contextlib.ExitStack()
    fd = output.open_for_append(owner)
    shown = ""
    for byte in "日本 ü\n".encode():
        os.write(fd, bytes([byte]))
        shown += output.read_new()
    assert shown == "日本 ü\n"
    owner.close()
    output.close()


def test_the_tail_is_the_last_lines() -> None:
    output = ChildOutput()
    owner = contextlib.ExitStack()
    fd = output.open_for_append(owner)
    os.write(fd, b"".join(b"line %d\n" % number for number in range(1000)))
    assert output.tail().splitlines() == [f"line {number}" for number in range(1000 - TAIL_LINES, 1000)]
    owner.close()
    output.close()


def test_memory_of_what_was_shown_is_given_back() -> None:
    output = ChildOutput()
    owner = contextlib.ExitStack()
    fd = output.open_for_append(owner)
    for _ in range(64):
        os.write(fd, b"x" * 1024 * 1024)
        assert len(output.read_new()) == 1024 * 1024
    status = os.fstat(output._file.fd)
    assert status.st_size == 64 * 1024 * 1024
    assert status.st_blocks * 512 <= 4 * 1024 * 1024
    os.write(fd, b"\nlast line\n")
    assert output.tail().endswith("last line")
    owner.close()
    output.close()
