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
import threading

TAIL_BYTES = 16 * 1024
TAIL_LINES = 40
KEPT_BYTES = 1024 * 1024
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
    """The output of one child: :meth:`read_new` for whoever shows it, :meth:`tail` for the crash report.

    Its methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._file = AnonymousFile("anyengine-output")
        # Incremental, since a read may end in the middle of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._lock = threading.Lock()
        self._read = 0
        self._freed = 0
        self._closed = False

    def open_for_append(self, owner: contextlib.ExitStack) -> int:
        """The descriptor that becomes the child's stdout and stderr; ``owner`` closes it."""
        return self._file.open_for_append(owner)

    def unread(self) -> int:
        """How many bytes :meth:`read_new` has not returned yet; 0 once it is closed."""
        with self._lock:
            return 0 if self._closed else self._size() - self._read

    def read_new(self) -> str:
        """What was printed since the last call, at most a mebibyte. Memory far behind it is given back."""
        with self._lock:
            if self._closed:
                return ""
            data = self._file.read_from(self._read)
            self._read += len(data)
            self._free()
            return self._decoder.decode(data)

    def drop(self, keep: int) -> int:
        """Forget what is unread but for the newest ``keep`` bytes, and give its memory back.

        :returns: the number of bytes that were forgotten
        """
        with self._lock:
            dropped = 0 if self._closed else self._size() - self._read - keep
            if dropped <= 0:
                return 0
            self._read += dropped
            self._decoder.reset()
            self._free()
            return dropped

    def tail(self) -> str:
        """The last lines."""
        size = self._size()
        data = self._file.read_from(max(0, size - TAIL_BYTES))
        return "\n".join(data.decode(errors="replace").splitlines()[-TAIL_LINES:])

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._closed = True
            self._file.close()

    def _size(self) -> int:
        return os.fstat(self._file.fd).st_size

    def _free(self) -> None:
        """Give back what was read, except for what the crash report may need."""
        end = self._read - KEPT_BYTES
        if end - self._freed < KEPT_BYTES:
            return
        if sys.platform == "linux":
            length = ctypes.c_longlong(end - self._freed)
            ctypes.CDLL(None).fallocate(self._file.fd, _PUNCH_HOLE, ctypes.c_longlong(self._freed), length)
        self._freed = end
