"""Stop strings, found in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from anyengine.brief import brief
from anyengine.errors import RequestRefusedError


def check_stop(stop: object) -> tuple[str, ...]:
    """The stop strings, of which one may stand alone.

    :raises TypeError: if ``stop`` is neither a string nor a sequence of strings
    :raises RequestRefusedError: if a stop string is empty
    """
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Sequence) or isinstance(stop, bytes | bytearray):
        raise TypeError(f"stop={brief(stop)} ({type(stop).__name__}): expected a string or a list of strings")
    strings = tuple(cast("Sequence[Any]", stop))
    for index, string in enumerate(strings):
        if not isinstance(string, str):
            raise TypeError(f"stop[{index}]={brief(string)} ({type(string).__name__}): expected a string")
        if not string:
            raise RequestRefusedError(f"stop[{index}]='': expected at least one character")
    return strings


class StopMatcher:
    """Passes text on up to the first stop string. What may yet become one stays back until that is decided.

    The match that is complete first wins, and of those that end with the same character the longest. So the result is
    the same however the text is cut into pieces.

    :param include: whether the stop string belongs to the text; then nothing has to stay back
    """

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self.matched: str | None = None
        self._stop = stop
        self._include = include
        self._beginning = re.compile(f"[{''.join(re.escape(string[0]) for string in stop)}]")
        self._tail = ""  # of the text so far, what may be the beginning of a stop string

    def feed(self, piece: str, *, counts: bool = True) -> str:
        """The text that this piece decides on. After ``matched`` is set there is no more.

        :param counts: whether a stop string that ends in this piece is one
        """
        text = self._tail + piece
        if self._beginning.search(text) is None:  # as most text is: nothing in it begins a stop string
            return text
        passed = len(self._tail) if self._include else 0
        if counts and piece and (found := self._find(text)) is not None:
            start, end = found
            self.matched = text[start:end]
            self._tail = ""
            return text[passed : end if self._include else start]
        undecided = max((_overlap(text, string) for string in self._stop), default=0)
        decided = len(text) - undecided
        self._tail = text[decided:]
        return text[passed:] if self._include else text[:decided]

    def finish(self) -> str:
        """What stayed back: the text has ended, so it is no stop string."""
        rest, self._tail = self._tail, ""
        return "" if self._include else rest

    def _find(self, text: str) -> tuple[int, int] | None:
        """Start and end of the match that wins, among those that end after the tail."""
        best: tuple[int, int] | None = None
        for string in self._stop:
            start = text.find(string, max(0, len(self._tail) + 1 - len(string)))
            end = start + len(string)
            if start >= 0 and (best is None or (end, start) < (best[1], best[0])):
                best = start, end
        return best


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``string``, but not all of it."""
    start = max(0, len(text) + 1 - len(string))
    while (start := text.find(string[0], start)) >= 0:
        if string.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
