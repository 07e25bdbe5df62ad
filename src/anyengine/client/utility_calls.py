"""Utility calls, from what the caller wrote to what the engine answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from anyio.lowlevel import checkpoint_if_cancelled

from anyengine.brief import brief
from anyengine.client.checks import check_seconds
from anyengine.client.session import HEALTH_TIMEOUT, EngineSession
from anyengine.client.staging import release
from anyengine.client.waiters import PendingCall
from anyengine.errors import EngineError, UtilityError, UtilityTimeoutError
from anyengine.process.blocks import Lease


async def call_utility(session: EngineSession, method: str, args: Sequence[Any], timeout: float | None) -> Any:
    """Call a utility, after a restart that is under way; :meth:`EngineClient.call_utility` describes it."""
    if not isinstance(method, str):
        raise TypeError(f"method={brief(method)} ({type(method).__name__}): expected a string")
    if timeout is None:
        return await _call(session, method, args)
    check_seconds("timeout", timeout)
    started = time.monotonic()
    with session.limits.within(timeout):
        return await _call(session, method, args)
    health = session.health(HEALTH_TIMEOUT)
    raise UtilityTimeoutError(
        method,
        f"no answer within {timeout} s (waited {time.monotonic() - started:.1f} s); the engine is "
        f"{health.state}, {health.steps} steps made",
        rank=session.link.rank,
    )


async def _call(session: EngineSession, method: str, args: Sequence[Any]) -> Any:
    await checkpoint_if_cancelled()
    await session.available()
    if not session.turns.take():
        await session.turns.wait()
        await session.available()
    info = session.link.info  # of a new life, if there was a restart
    assert info is not None
    if method not in info.utilities:
        known = ", ".join(info.utilities)
        raise UtilityError(method, f"engine {info.engine!r} has no such utility; it has {known}")
    leases: list[Lease] = []
    try:
        args = await session.stage(args, leases)
        await session.available()
        return await call_now(session, method, args)
    except EngineError as error:
        raise session.told(error) from error.__cause__
    finally:
        release(leases)  # what did not go by the lane was copied


async def call_now(session: EngineSession, method: str, args: Sequence[Any]) -> Any:
    """Call a utility of the engine as it is now; returns what it returned.

    :raises EngineError: if the utility failed, or the engine died or the client was closed meanwhile
    :raises UnencodableError: if an argument cannot travel
    """
    call = PendingCall(method, session.link.rank, session.wakeup_type(), session.turns)
    machine = session.link.machine
    call_id, frames = machine.call(method, args, call)
    try:
        # Copied, because the call may end by cancellation or its timeout before ZeroMQ has read the frames.
        session.send_copied(frames)
        await call.wait()
    finally:
        machine.forget_call(call_id)
    return call.take()
