"""Private directories for the files of ipc sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

_PREFIX = "anyengine-"
_LONGEST_BASE = 64
"""Bytes that a base directory's path may have: a socket's path has to fit 107 bytes, whatever TMPDIR is."""


class SocketDirectory:
    """A directory that only this user can enter (0700), under a short path, gone when closed.

    A lock that lives as long as this process tells later clients whether they may sweep a directory away that a
    killed process left behind.
    """

    def __init__(self) -> None:
        base = _base_directory()
        # Under another name until it is locked, so that nobody sweeps it in between.
        fresh = tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base)
        self._lock = os.open(os.path.join(fresh, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path: Path = base / (_PREFIX + secrets.token_hex(6))
        os.rename(fresh, self.path)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _base_directory() -> Path:
    for candidate in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108 - mkdtemp makes what is used
        if len(os.fsencode(candidate)) <= _LONGEST_BASE and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise OSError(
        f"no directory for sockets: TMPDIR ({tempfile.gettempdir()}) must be writable and at most "
        f"{_LONGEST_BASE} bytes long, or /tmp, /var/tmp or /dev/shm writable"
    )


def sweep_directories() -> None:
    """Remove the directories that killed clients left behind; blocking, for a worker thread.

    Another user's directories cannot be opened, and those of living clients are locked.
    """
    for directory in _base_directory().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
