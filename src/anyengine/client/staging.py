"""Large arrays of a call are copied into shared memory before the call is sent, off the event loop.

So the caller may change them as soon as the call returns, and sending is synchronous and takes no time. A tensor that
torch has in shared memory already is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import anyio
from anyio import from_thread, to_thread

from anyengine.memory import owner_of
from anyengine.process.blocks import Lease, SharedFile
from anyengine.process.lane import Lane
from anyengine.process.shared_storage import open_shared_storage
from anyengine.protocol import arrays
from anyengine.protocol.arrays import WireArray
from anyengine.protocol.cbor import MAX_DEPTH

LANE_LIMIT = 2**20
"""Bytes from which on an array goes by the lane. Below, a frame is as fast, and takes no descriptor."""

AT_ONCE = 2 * 2**20
"""Bytes that are copied without a thread, for which they would have to wait longer than the copy takes."""

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))


async def stage(value: Any, lane: Lane, limiter: anyio.CapacityLimiter) -> Any:
    """``value`` with its large arrays in shared memory; without any, ``value`` itself, without a checkpoint.

    What cannot be staged is left as it is: then it travels as a frame, or is refused where it is encoded.
    """
    try:
        size = _large_bytes(value)
    except Exception:
        return value  # code of the value's own class raised
    if not size:
        return value
    if size <= AT_ONCE:
        return _staged(value, lane, _do_nothing)
    return await to_thread.run_sync(_stage_in_thread, value, lane, limiter=limiter)


def _do_nothing() -> None:
    pass


def _stage_in_thread(value: Any, lane: Lane) -> Any:
    lane.pool.trim()
    return _staged(value, lane, from_thread.check_cancelled)


def _staged(value: Any, lane: Lane, check: Callable[[], None]) -> Any:
    if not _large_bytes(value):
        return value
    if isinstance(value, list | tuple):
        return [_staged(item, lane, check) for item in cast("Sequence[Any]", value)]
    if isinstance(value, Mapping):
        return {key: _staged(item, lane, check) for key, item in cast("Mapping[Any, Any]", value).items()}
    check()
    try:
        array = arrays.from_value(value)
        if array is None:
            return value
        data = open_shared_storage(value)
        if data is None:
            data = lane.pool.take(array.data.nbytes).fill(array.data, check)
    except (OSError, TypeError):
        return value
    return WireArray(array.library, array.dtype, array.shape, data)


def _large_bytes(value: Any, depth: int = 0) -> int:
    """The bytes of all arrays in ``value`` that are to go by the lane."""
    if type(value) in _ATOMS or depth > MAX_DEPTH:
        return 0
    if arrays.is_array(value):
        return _size(value)
    if isinstance(value, Mapping):
        items = list(cast("Mapping[Any, Any]", value).values())
    elif isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
    else:
        return 0
    if _ATOMS.issuperset(map(type, items)):
        return 0
    return sum(_large_bytes(item, depth + 1) for item in items)


def _size(array: Any) -> int:
    if isinstance(array, WireArray):
        size = 0 if isinstance(owner_of(array.data), Lease | SharedFile) else array.data.nbytes
    else:
        # The copy from another device has to follow what is queued on the caller's own stream there, in its own thread.
        size = array.nbytes if getattr(array, "is_cpu", True) else 0
    return 0 if size < LANE_LIMIT else int(size)
