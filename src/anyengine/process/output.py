"""What a child prints: it lands in a file without a name, which the parent follows.

A pipe would block the child as soon as it is full and the application's loop busy; a file never does.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import os
import sys
import tempfile

TAIL_BYTES = 16 * 1024
TAIL_LINES = 40
_KEEP_BYTES = 1024 * 1024
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, <linux/falloc.h>


class AnonymousFile:
    """A file that no path leads to: memory on Linux, an unlinked temporary file elsewhere."""

    def __init__(self, name: str) -> None:
        self.fd: int
        if sys.platform == "linux":
            self.fd = os.memfd_create(name)
        else:
            self.fd, path = tempfile.mkstemp(prefix=name)
            self._path = path

    def open_for_append(self, owner: contextlib.ExitStack) -> int:
        """Another descriptor, with which every write lands at the end; ``owner`` closes it."""
        path = f"/proc/self/fd/{self.fd}" if sys.platform == "linux" else self._path
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        owner.callback(os.close, fd)
        if sys.platform != "linux":
            os.unlink(self._path)
        return fd

    def read_from(self, offset: int, limit: int = 1024 * 1024) -> bytes:
        """At most ``limit`` bytes from ``offset`` on."""
        return os.pread(self.fd, limit, offset)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


class ChildOutput:
    """The output of one child: :meth:`read_new` for whoever shows it, :meth:`tail` for the crash report."""

    def __init__(self) -> None:
        self._file = AnonymousFile("anyengine-output")
        # Incremental, since a read may end in the middle of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown = 0
        self._freed = 0

    def open_for_append(self, owner: contextlib.ExitStack) -> int:
        """The descriptor that becomes the child's stdout and stderr; ``owner`` closes it."""
        return self._file.open_for_append(owner)

    def read_new(self) -> str:
        """What was printed since the last call, at most a mebibyte. Memory far behind it is given back."""
        data = self._file.read_from(self._shown)
        self._shown += len(data)
        if self._shown - self._freed > 2 * _KEEP_BYTES:
            self._free(self._shown - _KEEP_BYTES)
        return self._decoder.decode(data)

    def tail(self) -> str:
        """The last lines."""
        size = os.fstat(self._file.fd).st_size
        data = self._file.read_from(max(0, size - TAIL_BYTES))
        return "\n".join(data.decode(errors="replace").splitlines()[-TAIL_LINES:])

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _free(self, end: int) -> None:
        if sys.platform == "linux":
            length = ctypes.c_longlong(end - self._freed)
            ctypes.CDLL(None).fallocate(self._file.fd, _PUNCH_HOLE, ctypes.c_longlong(self._freed), length)
        self._freed = end
