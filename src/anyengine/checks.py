"""Checks of values that callers pass: the error names the value, what is wrong with it, and what would be right.

Imports only the standard library, since both processes use it.
"""

from __future__ import annotations

from typing import Any

from anyengine.brief import brief
from anyengine.errors import RequestRefusedError


def require(fits: bool, where: str, value: object, expected: str) -> None:
    """:raises TypeError: if the type of ``value`` does not fit"""
    if not fits:
        raise TypeError(f"{where}={brief(value)} ({type(value).__name__}): expected {expected}")


def require_integer(where: str, value: Any, low: int, high: int) -> None:
    """Check an integer of a request.

    :raises TypeError: if ``value`` is no integer
    :raises RequestRefusedError: if it is not ``low`` to ``high``
    """
    require(isinstance(value, int) and not isinstance(value, bool), where, value, "an integer")
    if not low <= value <= high:
        raise RequestRefusedError(f"{where}={brief(value)}: expected {low} to {high}")
