"""How many CPU cores this process may use, and how many of them are free for it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_NO_QUOTA = math.inf


def usable_cores(root: Path = _ROOT) -> int:
    """Return the number of cores that the process's CPU affinity and the quotas of its cgroups allow, at least 1.

    A quota is rounded down: threads that wait for each other must not use it up while one of them has work left.

    :param root: the directory that has ``proc``
    """
    return max(1, int(min(len(_allowed()), cpu_quota(root))))


def cpu_quota(root: Path = _ROOT) -> float:
    """Return the CPU quota of this process in cores, infinite if there is none: the least of all its cgroups.

    Both versions of cgroups count, and so do the cgroups around the process's own, as far as they can be seen.

    :param root: the directory that has ``proc``
    """
    try:
        return min(_quotas(root), default=_NO_QUOTA)
    except (OSError, ValueError):  # no Linux, or a sandbox with files of its own
        return _NO_QUOTA


class FreeCores:
    """Measures how many cores were free for this process since the last look: used by it, or idle.

    :param root: the directory that has ``proc``
    :param clock: seconds of wall time
    :param cpu_time: seconds of CPU time that this process has used
    """

    def __init__(
        self,
        root: Path = _ROOT,
        clock: Callable[[], float] = time.monotonic,
        cpu_time: Callable[[], float] = time.process_time,
    ) -> None:
        self._stat = root / "proc/stat"
        self._clock = clock
        self._cpu_time = cpu_time
        self._last = self._read()

    def look(self) -> float | None:
        """Return the cores that were free since the last look, or None if the system does not tell."""
        last, self._last = self._last, self._read()
        if last is None or self._last is None or self._last[0] <= last[0]:
            return None
        wall, free = (now - then for now, then in zip(self._last, last, strict=True))
        return free / wall

    def _read(self) -> tuple[float, float] | None:
        idle = _idle_seconds(self._stat, _allowed())
        return None if idle is None else (self._clock(), idle + self._cpu_time())


def _allowed() -> set[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _idle_seconds(stat: Path, cores: set[int]) -> float | None:
    """The seconds for which these cores have been idle, together; None if the system does not tell."""
    names = {f"cpu{number}" for number in cores}
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        # name, user, nice, system, idle, iowait, ... in ticks
        idle = [int(fields[4]) + int(fields[5]) for fields in lines if fields and fields[0] in names]
    except (OSError, ValueError, IndexError):
        return None
    # A sandbox may show other numbers of cores than those of the affinity, or zeros.
    if len(idle) < len(names) or not any(idle):
        return None
    return sum(idle) / os.sysconf("SC_CLK_TCK")


def _quotas(root: Path) -> Iterator[float]:
    """The quotas of the cgroups of this process, wherever their hierarchies are mounted."""
    # Each line is number:controllers:path; that of version 2 has no controllers.
    cgroups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    paths = {name: path for _, controllers, path in cgroups for name in controllers.split(",")}
    for mount in (root / "proc/self/mountinfo").read_text().splitlines():
        before, after = mount.split(" - ")
        kind, _, options = after.split(" ", 2)
        mounted, mount_point = before.split(" ")[3:5]
        if kind == "cgroup2" and "" in paths:
            path, read = paths[""], _quota_of_version_2
        elif kind == "cgroup" and "cpu" in options.split(",") and "cpu" in paths:
            path, read = paths["cpu"], _quota_of_version_1
        else:
            continue
        top = root / mount_point.replace(r"\040", " ").lstrip("/")
        yield from map(read, _around(top, mounted, path))


def _around(top: Path, mounted: str, path: str) -> Iterator[Path]:
    """The directories of a cgroup and of all around it, under a mount that shows the hierarchy from ``mounted`` on.

    A container may have a path that only its host can see: then those of them that are there are the last.
    """
    cgroup = PurePosixPath(path)
    below = cgroup.relative_to(mounted if cgroup.is_relative_to(mounted) else "/")
    yield from (top / parent for parent in (below, *below.parents))


def _quota_of_version_2(cgroup: Path) -> float:
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no file in the topmost one, and "max" for no quota
        return _NO_QUOTA


def _quota_of_version_1(cgroup: Path) -> float:
    try:
        quota, period = (int((cgroup / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return _NO_QUOTA
    return quota / period if quota > 0 and period > 0 else _NO_QUOTA
