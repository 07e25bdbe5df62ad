"""What sleeps of an engine, and how deep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from anyengine.brief import brief
from anyengine.engine.core import EngineCore
from anyengine.engine.failures import message_of, name_of

PARTS = ("weights", "kv_cache")
"""What sleeps, in the order in which it is brought back."""

TAGS = (*PARTS, "scheduling")
"""What ``wake_up`` can be asked for."""


class Sleep:
    """The sleep of one engine: its parts that sleep, of which there may be none, and the level of their sleep."""

    def __init__(self, core: EngineCore) -> None:
        self.asleep: Sequence[str] = ()
        self._core = core
        self._level = 0

    def check_level(self, level: object) -> int:
        """``level`` itself, if the engine can be put to sleep at it now; level 0, which only pauses, always fits.

        :raises TypeError: if it is not an integer
        :raises ValueError: if there is no such level, or the engine sleeps at another one, or in part
        """
        if not isinstance(level, int) or isinstance(level, bool):
            raise TypeError(f"level={brief(level)} ({type(level).__name__}): expected 0, 1 or 2")
        if not 0 <= level <= 2:
            raise ValueError(f"level={level}: expected 0, 1 or 2")
        if level and self.asleep:
            if level != self._level:
                raise ValueError(f"level={level}: the engine sleeps at level {self._level} already; wake it up first")
            if len(self.asleep) < len(PARTS):
                raise ValueError(f"level={level}: only {self.asleep[0]} sleeps now; wake up the rest first")
        return level

    def fall_asleep(self, level: int) -> None:
        """Put the engine to sleep; nothing happens if it is asleep at this level.

        :raises ValueError: if it sleeps at another level, or in part
        :raises RuntimeError: if the engine failed to
        """
        if not self.check_level(level) or self.asleep:
            return
        # Whatever comes of it: an engine that fails here may be half asleep, and must make no step like that.
        self.asleep = PARTS
        self._level = level
        try:
            self._core.sleep(level)
        except Exception as error:
            raise RuntimeError(
                "the scheduler is paused, but the engine failed to fall asleep "
                f"({name_of(error)}: {message_of(error)}); wake_up() brings back what sleeps and resumes"
            ) from error

    def wake_up(self, tags: object) -> None:
        """Bring back what sleeps of ``tags``, all of it if None.

        :raises TypeError: if ``tags`` is not a list, or None
        :raises ValueError: if it is empty or holds an unknown tag, or ``"scheduling"`` while something would sleep on
        :raises Exception: what the engine raised; what it was to bring back counts as asleep
        """
        wanted = TAGS if tags is None else _check_tags(tags)
        parts = [part for part in self.asleep if part in wanted]
        left = [part for part in self.asleep if part not in wanted]
        if left and "scheduling" in wanted:
            raise ValueError(f"tags={brief(tags)}: no steps can be made while {' and '.join(left)} would sleep on")
        if parts:
            self._core.wake_up(parts)
        self.asleep = left


def _check_tags(tags: object) -> Sequence[str]:
    expected = f"expected a list of {', '.join(map(repr, TAGS))}, or None for everything"
    if not isinstance(tags, list | tuple):
        raise TypeError(f"tags={brief(tags)} ({type(tags).__name__}): {expected}")
    listed = cast("Sequence[str]", tags)
    for tag in listed:
        if tag not in TAGS:
            raise ValueError(f"tags={brief(listed)}: there is no {tag!r}; {expected}")
    if not listed:
        raise ValueError(f"tags={brief(listed)}: {expected}")
    return listed
