"""Values on their way to CBOR: what an application passes and an engine returns becomes plain types and buffers.

Whatever decoding would refuse (:mod:`anyengine.protocol.cbor`) is refused here first, with its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import cbor2

from anyengine.brief import brief
from anyengine.errors import UnencodableError
from anyengine.protocol import arrays
from anyengine.protocol.cbor import ARRAY_TAG, MAX_DEPTH, Buffer, encode_plain

DEEPEST = MAX_DEPTH - 8
"""Nesting that one value may have; the rest is for the message around it and the array tags within. A cycle ends here
as well."""

MAX_CONTAINERS = 2**18
"""Lists and maps that one value may hold. Encoding writes one that is there on several paths once for each, so some
fifty lists that hold each other twice would never end."""

MAX_ITEMS = 2**22
"""Items that they may hold together, counted on every path as well. More belong into an array."""

_AS_IS = frozenset((type(None), bool, float, bytes))
_SCALARS = _AS_IS | {int, str}
_SEQUENCES = (list, tuple)


def encode(value: object, buffers: list[Buffer], *, path: str) -> bytes:
    """Encode a value that came from outside; the bytes of large arrays are appended to ``buffers``.

    :raises UnencodableError: if something in ``value`` cannot travel; it names the place, starting with ``path``
    """
    return encode_plain(pack(value, buffers, path=path))


def pack(value: object, buffers: list[Buffer], *, path: str) -> Any:
    """Turn ``value`` into plain types that :func:`encode_plain` takes, moving large arrays to ``buffers``.

    :raises UnencodableError: if something in ``value`` cannot travel; it names the place, starting with ``path``
    """
    packing = _Packing(len(buffers))
    result = _pack(value, packing, path, 0)
    buffers += packing.buffers  # only now: a refused value leaves the caller's message as it was
    return result


class _Packing:
    """What one value takes: its buffers, of which the first has the number ``first``, and how much it holds."""

    __slots__ = ("buffers", "containers", "first", "items")

    def __init__(self, first: int) -> None:
        self.first = first
        self.buffers: list[Buffer] = []
        self.containers = 0
        self.items = 0


def _pack(value: object, packing: _Packing, path: str, depth: int) -> Any:
    if type(value) in _AS_IS:
        return value
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            # Very large ones have no decimal form: Python limits the conversion.
            what = f"the integer {value}" if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"
            raise UnencodableError(path, f"{what} does not fit 64 bits")
        return value
    if type(value) is str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise UnencodableError(path, f"the string holds a lone surrogate: {error.reason}") from None
        return value
    if depth > DEEPEST:
        raise UnencodableError(path, f"nested deeper than {DEEPEST} levels, or a cycle")
    try:
        return _pack_object(value, packing, path, depth)
    except UnencodableError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        # Code of the value's own class raised (a mapping's items(), a tensor's data); that is the value's fault.
        problem = f"looking into this {_name(value)} raised {type(error).__name__}: {brief(error)}"
        raise UnencodableError(path, problem) from error


def _pack_object(value: object, packing: _Packing, path: str, depth: int) -> Any:
    if isinstance(value, _SEQUENCES):
        items = cast("Sequence[object]", value)
        _count(packing, len(items), path)
        if _are_scalars(items):
            return list(items)
        return [_pack(item, packing, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)]
    plain = _plain(value)
    if plain is not None:
        return _pack(plain, packing, path, depth)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        _count(packing, len(mapping), path)
        packed: dict[Any, Any] = {}
        for key, item in mapping.items():
            name = key if type(key) is str or type(key) is int else _plain(key)
            if (type(name) is not str and type(name) is not int) or isinstance(key, bool):
                raise UnencodableError(path, f"the key {brief(key)} ({_name(key)}) is neither a string nor an integer")
            shown = repr(name) if type(name) is int else brief(name)
            if name in packed:
                raise UnencodableError(path, f"two of its keys are {shown} when they arrive")
            _pack(name, packing, f"{path} key {shown}", depth)
            packed[name] = _pack(item, packing, f"{path}[{shown}]", depth + 1)
        return packed
    if isinstance(value, bytearray | memoryview):
        return bytes(cast("Buffer", value))
    try:
        array = arrays.from_value(value)
    except TypeError as error:
        raise UnencodableError(path, str(error)) from None
    if array is None:
        raise UnencodableError(path, f"{brief(value)} of type {_name(value)} cannot travel{_hint(value)}")
    data: object
    if array.data.nbytes <= arrays.INLINE_LIMIT:
        data = bytes(array.data)
    else:
        data = packing.first + len(packing.buffers)
        packing.buffers.append(array.data)
    return cbor2.CBORTag(ARRAY_TAG, [array.library, array.dtype, list(array.shape), data])


def _are_scalars(items: Sequence[object]) -> bool:
    """Whether these can travel as they are, seen without a look at each in Python; many may come, on an event loop."""
    kinds = set(map(type, items))
    if kinds == {int}:
        numbers = cast("Sequence[int]", items)
        return min(numbers) >= -(2**63) and max(numbers) < 2**64
    if kinds == {str}:
        return all(map(str.isascii, cast("Sequence[str]", items)))
    return kinds <= _AS_IS


def _count(packing: _Packing, items: int, path: str) -> None:
    packing.containers += 1
    packing.items += items
    if packing.containers > MAX_CONTAINERS:
        excess = f"{MAX_CONTAINERS} lists and maps"
    elif packing.items > MAX_ITEMS:
        excess = f"{MAX_ITEMS} items (send many numbers as an array)"
    else:
        return
    problem = f"the value holds more than {excess}; a list or map that is there on several paths travels once for each"
    raise UnencodableError(path, problem)


def _plain(value: object) -> int | float | str | bytes | None:
    """The scalar that ``value`` is a subclass of: signal.SIGKILL and members of a StrEnum arrive as what they equal.

    By the methods of the base class, since those of the subclass may give anything: ``str()`` of an Enum its name.
    """
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes.__bytes__(value)
    return None


def _name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _hint(value: object) -> str:
    if hasattr(type(value), "item") and hasattr(type(value), "dtype"):
        return "; use .item()"
    if isinstance(value, set | frozenset):
        return "; send a list"
    return ""
