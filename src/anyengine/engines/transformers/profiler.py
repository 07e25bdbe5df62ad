"""Profiles of the engine by torch's profiler, each written as one trace file."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile, supported_activities

from anyengine.brief import brief

_SUFFIX = ".pt.trace.json.gz"


class Profiler:
    """Records what torch does on the engine's thread and on the GPU; one profile at a time.

    The files go into what ``directory`` returns, which is asked for and made when it is needed. What was recorded is in
    memory until the end.
    """

    def __init__(self, directory: Callable[[], Path]) -> None:
        self._directory = directory
        self._profile: profile | None = None
        self._prefix: str | None = None

    def start(self, prefix: str | None) -> None:
        """Begin to record.

        :raises RuntimeError: if a profile is under way
        :raises TypeError, ValueError: if ``prefix`` cannot begin a file's name
        :raises OSError: if the directory cannot be made
        """
        if self._profile is not None:
            raise RuntimeError("profile(is_start=True): a profile is under way; end it with is_start=False first")
        _check_prefix(prefix)
        directory = self._directory()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{directory} cannot be made for profiles: {error.strerror}; give the engine another profile_dir, or "
                "set ANYENGINE_CACHE to a directory that can be written",
            ) from error
        recording = profile(activities=supported_activities())
        recording.start()
        self._profile, self._prefix = recording, prefix

    def stop(self, prefix: str | None) -> Path:
        """Write the trace, for Perfetto or chrome://tracing. ``prefix`` replaces the one that was given at the start.

        :raises RuntimeError: if no profile is under way
        :raises TypeError, ValueError: if ``prefix`` cannot begin a file's name; then the profile goes on
        :raises OSError: if the trace cannot be written; then it is lost
        """
        if self._profile is None:
            raise RuntimeError("profile(is_start=False): no profile is under way; start one with is_start=True first")
        _check_prefix(prefix)
        path = self._free_path(prefix or self._prefix)
        recording, self._profile = self._profile, None
        recording.stop()
        recording.export_chrome_trace(str(path))
        return path

    def close(self) -> None:
        """End a profile that is under way, without a trace."""
        if self._profile is not None:
            recording, self._profile = self._profile, None
            recording.stop()

    def _free_path(self, prefix: str | None) -> Path:
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        if prefix:
            stem = f"{prefix}-{stem}"
        directory = self._directory()
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        return next(path for name in names if not (path := directory / f"{name}{_SUFFIX}").exists())


def _check_prefix(prefix: str | None) -> None:
    if prefix is None:
        return
    if not isinstance(prefix, str):
        raise TypeError(f"profile_prefix={brief(prefix)} ({type(prefix).__name__}): expected a string, or None")
    if "/" in prefix or "\0" in prefix:
        raise ValueError(f"profile_prefix={brief(prefix)}: expected the beginning of a file's name, not a path")
