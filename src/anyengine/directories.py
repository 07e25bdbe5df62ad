"""Private directories and nameless files, in whichever place the machine lets this process write to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from anyengine.system_calls import naming

_PREFIX = "anyengine-"
_LONGEST_BASE = 64
"""Bytes that a base directory's path may have: a socket's path has to fit 107 bytes, whatever TMPDIR is."""


class PrivateDirectory:
    """A directory for sockets that only this user can enter (0700), under a short path, gone when closed.

    A lock that lives as long as this process tells later clients whether they may sweep a directory away that a
    killed process left behind.

    :param longest_base: bytes that the path around it may have
    :raises OSError: if no place is writable that has so short a path and allows locks and sockets
    """

    def __init__(self, longest_base: int = _LONGEST_BASE) -> None:
        self.path: Path
        problems: list[str] = []
        for base in _bases():
            if len(os.fsencode(base)) > longest_base:
                problems.append(f"{base}: its path is longer than {longest_base} bytes")
                continue
            try:
                self.path, self._lock = _make_directory(base)
            except OSError as error:
                problems.append(f"{base}: {error.strerror or error}")
            else:
                return
        raise OSError(
            f"no directory for sockets ({'; '.join(problems)}): set TMPDIR to a writable directory "
            f"of at most {longest_base} bytes"
        )

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _make_directory(base: Path) -> tuple[Path, int]:
    # Under another name until it is locked, so that nobody sweeps it in between.
    fresh = tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, fresh, ignore_errors=True)
        _set_mode(fresh, 0o700)
        lock = os.open(os.path.join(fresh, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, lock)
        _set_mode(lock, 0o600)
        with naming("flock"):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Shared folders of virtual machines take files, but no sockets.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind(os.path.join(fresh, "probe"))
        os.unlink(os.path.join(fresh, "probe"))
        path = base / (_PREFIX + secrets.token_hex(6))
        with naming("rename"):
            os.rename(fresh, path)
        undo.pop_all()
    return path, lock


def _set_mode(file: str | int, mode: int) -> None:
    """Give back what the umask took away; only then, for there are sandboxes and mounts that refuse the call."""
    if stat.S_IMODE(os.stat(file).st_mode) != mode:
        with naming("chmod"):
            os.chmod(file, mode)


def open_nameless_file(prefix: str) -> int:
    """A descriptor of a file on disk that no path leads to.

    :raises OSError: if no place is writable
    """
    problems: list[str] = []
    for base in _bases():
        try:
            fd, path = tempfile.mkstemp(prefix=prefix, dir=base)
        except OSError as error:
            problems.append(f"{base}: {error.strerror or error}")
            continue
        os.unlink(path)
        return fd
    raise OSError(f"no directory for temporary files ({'; '.join(problems)}): set TMPDIR to a writable directory")


def sweep_directories() -> None:
    """Remove the directories that killed clients left behind; blocking, for a worker thread.

    Another user's directories cannot be opened, and those of living clients are locked.
    """
    for base in _bases():
        for directory in base.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
                finally:
                    os.close(lock)


def _bases() -> Iterator[Path]:
    """The places to try, in order. A path that is not UTF-8 cannot be the address of a ZeroMQ socket."""
    places = ["/tmp", "/var/tmp", "/dev/shm"]  # noqa: S108 - mkdtemp makes what is used
    with contextlib.suppress(OSError):  # it has looked at all of its own places, and could write to none
        places.insert(0, tempfile.gettempdir())
    for place in dict.fromkeys(places):
        with contextlib.suppress(UnicodeEncodeError):
            place.encode()
            yield Path(place)
