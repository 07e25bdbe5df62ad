"""Whose fault it is that a request ended for an error: a kind on the wire, a type of error on both sides of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from anyengine.errors import (
    RequestError,
    RequestFailedError,
    RequestRefusedError,
    RequestStalledError,
    TooManyRequestsError,
)

ErrorKind = Literal["refused", "failed", "too_many", "stalled"]

_TYPES: Mapping[ErrorKind, type[RequestError]] = {
    "refused": RequestRefusedError,
    "failed": RequestFailedError,
    "too_many": TooManyRequestsError,
    "stalled": RequestStalledError,
}

ERROR_KINDS: tuple[ErrorKind, ...] = tuple(_TYPES)


def request_error(kind: ErrorKind, message: str) -> RequestError:
    """The error of this kind."""
    return _TYPES[kind](message)


def kind_of(error: BaseException) -> ErrorKind:
    """What kind ``error`` is, raised for one request; ``"failed"`` for whatever says nothing of whose fault it is."""
    for kind, its_type in _TYPES.items():
        if isinstance(error, its_type):
            return kind
    return "failed"
