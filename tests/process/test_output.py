"""What a child prints: nothing is lost, characters stay whole, and memory is given back."""

from __future__ import annotations

import contextlib
import os

from anyengine.process.output import TAIL_BYTES, TAIL_LINES, ChildOutput


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


def test_of_a_line_without_end_the_end_is_shown() -> None:
    output = ChildOutput()
    owner = contextlib.ExitStack()
    fd = output.open_for_append(owner)
    os.write(fd, b"begin" + b"x" * 10_000_000 + b"end")
    tail = output.tail()
    assert tail.startswith("... xxx") and tail.endswith("xxxend") and len(tail) == TAIL_BYTES + 4
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


def test_what_nobody_reads_is_dropped_and_counted_and_the_newest_stays() -> None:
    output = ChildOutput()
    owner = contextlib.ExitStack()
    fd = output.open_for_append(owner)
    mebibyte = b"x" * (1024 * 1024 - 1) + b"\n"
    for _ in range(40):
        os.write(fd, mebibyte)
    assert output.drop(64 * 1024 * 1024) == 0
    assert output.drop(1024 * 1024) == 39 * 1024 * 1024
    assert output.unread() == 1024 * 1024
    assert os.fstat(output._file.fd).st_blocks * 512 <= 4 * 1024 * 1024
    os.write(fd, "ü\n".encode())
    assert output.read_new() == mebibyte.decode()
    os.write(fd, "日本\n".encode())
    assert output.drop(5) == 5  # in the middle of a character
    assert output.read_new().endswith("\n")
    assert output.tail().splitlines()[-2:] == ["ü", "日本"]
    owner.close()
    output.close()
    assert (output.unread(), output.read_new(), output.drop(0)) == (0, "", 0)
