"""Of several errors that end a client's block, one comes out bare, and none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import anyio

from anyengine.engine.failures import describe_failure
from anyengine.notices import log_error


def one_error(group: BaseExceptionGroup[BaseException], bodys_own: BaseException | None) -> BaseException:
    """The error that is to be raised in place of ``group``; each other one is a note of it and a line in the log.

    :param bodys_own: the error of the block's body, which comes first if there is one
    :returns: it; else what no ``except Exception`` may swallow (KeyboardInterrupt); else the first that was raised. A
        cancellation is no error, as in a task group
    """
    cancelled = anyio.get_cancelled_exc_class()
    errors = [error for error in _flat(group) if not isinstance(error, cancelled)]
    if not errors:
        return group
    chosen = bodys_own or next((error for error in errors if not isinstance(error, Exception)), errors[0])
    for error in errors:
        if error is not chosen:
            kind, message, traceback = describe_failure(error)
            chosen.add_note(f"the client also failed of {kind}: {message}")
            log_error("a service of the client failed as well:\n%s", traceback)
    return chosen


def _flat(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _flat(inner)
    else:
        yield error
