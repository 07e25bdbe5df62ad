"""What is said of an exception, whatever its class does: an error in a report must not become another error."""

from __future__ import annotations

import traceback

from anyengine.excerpts import MESSAGE_LIMIT, NAME_LIMIT, excerpt, text_of, trace_excerpt, type_name
from anyengine.protocol import cbor


def describe_failure(error: BaseException) -> tuple[str, str, str]:
    """Type, message and traceback of ``error``, as text that can travel; of long ones the beginning and the end."""
    return name_of(error), message_of(error), _traceback_of(error)


def name_of(error: BaseException) -> str:
    """The name of its type."""
    return excerpt(cbor.printable(type_name(error)), NAME_LIMIT)


def message_of(error: BaseException) -> str:
    """``str(error)`` as text that can travel, or what went wrong with it."""
    text = text_of(lambda: str(error), lambda second: f"<its message cannot be shown: {name_of(second)}>")
    return excerpt(cbor.printable(text), MESSAGE_LIMIT)


def _traceback_of(error: BaseException) -> str:
    text = text_of(
        lambda: "".join(traceback.format_exception(error)),
        lambda second: (
            f"{''.join(traceback.format_tb(error.__traceback__))}{name_of(error)}: {message_of(error)}\n"
            f"<the rest of the traceback cannot be shown: {name_of(second)}>\n"
        ),
    )
    return trace_excerpt(cbor.printable(text))
