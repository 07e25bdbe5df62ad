"""Large arrays of a call are copied into shared memory before the call is sent, off the event loop.

So the caller may change them as soon as the call returns, and sending is synchronous and takes no time. A tensor that
torch has in shared memory already is not copied.

The blocks of a call that is not sent after all, because it was cancelled or refused, are released by name. What was
staged is still in frames then, and an exception keeps those for as long as its caller, or a cycle, keeps the exception.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import anyio

from anyengine.memory import owner_of
from anyengine.multimodal import MultiModalFeature
from anyengine.process.blocks import Lease, SharedFile
from anyengine.process.lane import Lane
from anyengine.process.shared_storage import open_shared_storage
from anyengine.process.threads import ThreadCall
from anyengine.protocol import arrays
from anyengine.protocol.arrays import WireArray
from anyengine.protocol.packing import DEEPEST, MAX_CONTAINERS

LANE_LIMIT = 2**20
"""Bytes from which on an array goes by the lane. Below, a frame is as fast, and takes no descriptor."""

AT_ONCE = 2 * 2**20
"""Bytes that are copied without a thread, for which they would have to wait longer than the copy takes."""

ARRAYS_AT_ONCE = 256
"""Arrays of one value that are staged. Each takes a descriptor until it is handed over, of which a process has some
thousand; the rest are frames."""

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))


class _Work(NamedTuple):
    """What it takes to stage a value: bytes to copy, and containers and items to visit, on every path to them."""

    size: int
    visits: int


_NONE = _Work(0, 1)
"""Nothing in it is to go by the lane: it stays as it is."""


class _Staged(NamedTuple):
    """A value whose large arrays are in shared memory, and the leases of the blocks that were filled."""

    value: Any
    leases: list[Lease]


_Seen = dict[int, tuple[Any, _Work]]
"""Containers that were looked into, by their id, and what :func:`_work` said of them."""


def size_to_stage(value: Any) -> int:
    """Bytes of ``value`` that belong into shared memory.

    They are 0 for a value that cannot be looked into (too deep, a cycle, its own code raised), or that is the same few
    containers over and over: it is left as it is, for the call that encodes it to refuse.
    """
    try:
        return _work(value, 0, {}).size
    except Exception:
        return 0


async def stage(value: Any, size: int, lane: Lane, limiter: anyio.CapacityLimiter, leases: list[Lease]) -> Any:
    """``value`` with its large arrays, which have ``size`` bytes, in shared memory.

    The leases of the blocks that were filled are added to ``leases``, for the caller to :func:`release` if the call
    does not go through. If this raises, none are.

    An array that cannot be staged travels as a frame.
    """
    if size <= AT_ONCE:
        staged = _stage_now(value, lane, _do_nothing)
    else:
        async with limiter:
            staged = await _stage_in_thread(value, lane)
    leases += staged.leases
    return staged.value


def release(leases: list[Lease]) -> None:
    """Give the blocks back that have not been handed over, and forget all."""
    for lease in leases:
        lease.release()
    leases.clear()


async def stage_features(
    features: Sequence[MultiModalFeature], stage: Callable[[Any], Awaitable[Any]]
) -> Sequence[MultiModalFeature]:
    """``features`` with what ``stage`` makes of the arguments of their encoder."""
    data = [{name: field.data for name, field in feature.fields.items()} for feature in features]
    staged = await stage(data)
    if staged is data:
        return features
    return tuple(_with_data(feature, values) for feature, values in zip(features, staged, strict=True))


def _with_data(feature: MultiModalFeature, data: Mapping[str, Any]) -> MultiModalFeature:
    fields = {name: dataclasses.replace(field, data=data[name]) for name, field in feature.fields.items()}
    return dataclasses.replace(feature, fields=fields)


def _do_nothing() -> None:
    pass


async def _stage_in_thread(value: Any, lane: Lane) -> _Staged:
    """What :func:`_stage_now` makes, in a thread, which a cancellation ends soon and waits for."""
    abandoned = threading.Event()
    try:
        call = ThreadCall(_stage_unless, abandoned, value, lane, name="stage")
    except OSError:  # no thread to be had: they are frames
        return _Staged(value, [])
    try:
        await call.wait()
    except BaseException:
        abandoned.set()
        with anyio.CancelScope(shield=True):
            await call.wait()
        if (staged := call.result()) is not None:
            release(staged.leases)
        raise
    staged = call.result()
    assert staged is not None
    return staged


def _stage_unless(abandoned: threading.Event, value: Any, lane: Lane) -> _Staged | None:
    """What :func:`_stage_now` makes, or None if it was abandoned meanwhile."""

    def check() -> None:
        if abandoned.is_set():
            raise _Abandoned

    lane.pool.trim()
    try:
        return _stage_now(value, lane, check)
    except _Abandoned:
        # The caller raises its own. This one would take the frames that have the block to it, where they would stay.
        return None


class _Abandoned(BaseException):
    """Nobody wants the value any more; no Exception, which would say that it cannot be staged."""


def _stage_now(value: Any, lane: Lane, check: Callable[[], None]) -> _Staged:
    stager = _Stager(lane, check)
    try:
        return _Staged(stager.stage(value, 0), stager.leases)
    except Exception:  # cancellation is none
        release(stager.leases)
        return _Staged(value, [])
    except BaseException:
        release(stager.leases)
        raise


class _Stager:
    """Stages one value. ``leases`` are of the blocks that it fills; ``check`` is called now and then and may raise."""

    def __init__(self, lane: Lane, check: Callable[[], None]) -> None:
        self.leases: list[Lease] = []
        self._lane = lane
        self._check = check
        self._arrays = 0
        self._seen: _Seen = {}

    def stage(self, value: Any, depth: int) -> Any:
        """What ``value`` becomes."""
        if not _work(value, depth, self._seen).size:
            return value
        if isinstance(value, list | tuple):
            return [self.stage(item, depth + 1) for item in cast("Sequence[Any]", value)]
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {key: self.stage(item, depth + 1) for key, item in items}
        return value if self._arrays == ARRAYS_AT_ONCE else self._stage_array(value)

    def _stage_array(self, value: Any) -> Any:
        self._check()
        try:
            array = arrays.from_value(value)
            if array is None:
                return value
            data = open_shared_storage(value)
            if data is None:
                lease = self._lane.pool.take(array.data.nbytes)
                data = lease.fill(array.data, self._check)
                self.leases.append(lease)
        except (OSError, TypeError):
            return value
        self._arrays += 1
        return WireArray(array.library, array.dtype, array.shape, data)


def _work(value: Any, depth: int, seen: _Seen) -> _Work:
    """What it takes to stage ``value``.

    Each container is looked into once, on however many paths it is reached, and kept alive in ``seen`` because of its
    id.

    :raises ValueError: if ``value`` is nested deeper than encoding allows, as a cycle is, or has too many paths
    """
    if type(value) in _ATOMS:
        return _NONE
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} levels, or a cycle")
    if arrays.is_array(value):
        return _Work(_size_of_array(value), 1)
    key = id(value)
    known = seen.get(key)
    if known is not None:
        return known[1]
    if isinstance(value, Mapping):
        items = list(cast("Mapping[Any, Any]", value).values())
    elif isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
    else:
        return _NONE
    size, visits = 0, 1
    if not _ATOMS.issuperset(map(type, items)):
        for item in items:
            more = _work(item, depth + 1, seen)
            size, visits = size + more.size, visits + more.visits
            if size and visits > MAX_CONTAINERS:
                raise ValueError("the same few containers over and over, or too many items beside a large array")
    if len(seen) == MAX_CONTAINERS:
        raise ValueError("more containers than encoding allows")
    work = _Work(size, visits) if size else _NONE
    seen[key] = value, work
    return work


def _size_of_array(array: Any) -> int:
    """Bytes to copy; 0 if it is not to go by the lane."""
    if isinstance(array, WireArray):
        size = 0 if isinstance(owner_of(array.data), Lease | SharedFile) else array.data.nbytes
    else:
        # The copy from another device has to follow what is queued on the caller's own stream there, in its own thread.
        size = array.nbytes if getattr(array, "is_cpu", True) else 0
    if size < LANE_LIMIT:
        return 0
    if not isinstance(array, WireArray) and hasattr(array, "is_shared") and array.is_shared():
        return max(size, AT_ONCE + 1)  # nothing to copy, but a search in /proc, which takes as long
    return int(size)
