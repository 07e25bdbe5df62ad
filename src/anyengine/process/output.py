"""What a child prints: it lands in a file without a name, which the parent follows.

A pipe would block the child as soon as it is full and the application's loop busy; a file never does.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import os
import sys
import threading

from anyengine.directories import open_nameless_file
from anyengine.system_calls import naming

TAIL_BYTES = 16 * 1024
TAIL_LINES = 40
KEPT_BYTES = 1024 * 1024
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, <linux/falloc.h>


class AnonymousFile:
    """A file that no path leads to: memory where the system gives it, an unlinked temporary file elsewhere.

    Whoever writes to it, in either process, writes at its end.

    :raises OSError: if the system gives neither
    """

    def __init__(self, name: str) -> None:
        self.fd: int = _open_nameless(name)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)

    def write(self, data: bytes) -> None:
        """Add ``data``."""
        while data:
            data = data[os.write(self.fd, data) :]
        with naming("lseek"):
            os.lseek(self.fd, 0, os.SEEK_SET)  # a child that inherits it reads from where this process is in it

    def open_for_append(self, owner: contextlib.ExitStack) -> int:
        """Another descriptor, for a child to inherit; ``owner`` closes it."""
        return inheritable(self.fd, owner)

    def read_from(self, offset: int, limit: int = 1024 * 1024) -> bytes:
        """At most ``limit`` bytes from ``offset`` on."""
        return os.pread(self.fd, limit, offset)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


def _open_nameless(name: str) -> int:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an old kernel, or a container that refuses it
            return os.memfd_create(name)
    return open_nameless_file(f"{name}-")


def inheritable(fd: int, owner: contextlib.ExitStack) -> int:
    """A copy of ``fd`` for a child to inherit, which ``owner`` closes.

    Its number is none of the three that a child's stdin, stdout and stderr get; ``fd`` itself may have one of them, in
    a process that was started without them.
    """
    with naming("fcntl(F_DUPFD_CLOEXEC)"):
        copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    owner.callback(os.close, copy)
    return copy


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
        """The last lines, of one that is too long its end."""
        start = max(0, self._size() - TAIL_BYTES)
        lines = self._file.read_from(start).decode(errors="replace").splitlines()
        if start and len(lines) <= TAIL_LINES:
            lines[0] = f"... {lines[0]}"
        return "\n".join(lines[-TAIL_LINES:])

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
