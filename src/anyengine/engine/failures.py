"""What is said of an exception, whatever its class does: an error in a report must not become another error."""

from __future__ import annotations

import traceback

from anyengine.protocol import cbor


def describe_failure(error: BaseException) -> tuple[str, str, str]:
    """Type, message and traceback of ``error``, as text that can travel. Never raises."""
    return type(error).__name__, cbor.printable(message_of(error)), cbor.printable(_traceback_of(error))


def message_of(error: BaseException) -> str:
    """``str(error)``, or what went wrong with it."""
    try:
        return str(error)
    except Exception as second:
        return f"<its message cannot be shown: {type(second).__name__}>"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as second:
        return f"<the traceback cannot be shown: {type(second).__name__}>"
