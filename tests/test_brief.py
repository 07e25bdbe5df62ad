"""Values in errors: their beginning, quickly, whatever they are."""

from __future__ import annotations

import time
from typing import Any

import numpy
import pytest
import torch

from anyengine.brief import brief


class Unshowable:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


class Quitting:
    """Its repr ends the process."""

    def __repr__(self) -> str:
        raise SystemExit("no")


class Numeric:
    """Its repr is no string."""

    def __repr__(self) -> str:
        return 7  # type: ignore[return-value]


def over_and_over() -> list[Any]:
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        2.5,
        "text",
        b"bytes",
        ["a", 1],
        {"a": [1]},
        int,
        "x" * 200,
        numpy.float32(0.5),
        numpy.int64(5),
        torch.tensor(3),
        {3},
        set(),
        frozenset({3}),
        {},
        {"a": {"b": {}}},
    ],
)
def test_what_is_small_is_shown_whole(value: object) -> None:
    assert brief(value) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**8,
        b"x" * 10**8,
        [10**50] * 10**6,
        dict.fromkeys(range(10**6), "x" * 1000),
        set(map(str, range(10**6))),
        frozenset(map(str, range(10**6))),
        dict.fromkeys(map(str, range(10**6))),
        over_and_over(),
        numpy.zeros(10**6),
        torch.zeros(10**6),
        10**5000,
        Unshowable(),
        {"a": Unshowable()},
        Quitting(),
        [Quitting()],
        Numeric(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_large_or_odd_is_shown_by_its_beginning(value: object) -> None:
    started = time.thread_time()
    shown = brief(value)
    assert time.thread_time() - started < 0.5
    assert 0 < len(shown) < 220


def test_what_was_cut_says_so() -> None:
    assert brief("x" * 201) == repr("x" * 200) + "..."
    assert brief(b"x" * 201) == repr(b"x" * 200) + "..."
    assert brief(list(range(100))) == "[0, 1, 2, 3, 4, 5, ...]"
