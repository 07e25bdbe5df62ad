"""What cannot travel is named with its type and place, and the message that was being made stays as it was."""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import signal
import time
import uuid
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol import strategies
from tests.protocol.strategies import canonical

from anyengine.errors import UnencodableError
from anyengine.protocol import cbor, packing
from anyengine.protocol.arrays import WireArray


@dataclasses.dataclass
class Record:
    """Somebody's own class."""

    field: Any = 1


class Color(enum.Enum):
    """An enumeration."""

    RED = 1


class BadRepr:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class BadAttributes:
    """An object whose attributes raise."""

    @property
    def item(self) -> None:
        raise RuntimeError("no item")

    dtype = item


class BadClass:
    """A proxy whose target is gone."""

    @property
    def __class__(self) -> type:
        raise ReferenceError("the target is gone")


class BadMapping(Mapping[str, int]):
    """A mapping whose content cannot be read."""

    def __getitem__(self, key: str) -> int:
        raise OSError("no such row")

    def __iter__(self) -> Iterator[str]:
        return iter(["row"])

    def __len__(self) -> int:
        return 1


class BadList(list[int]):
    """A list that raises when it is read."""

    def __iter__(self) -> Iterator[int]:
        raise OSError("disk gone")


class BadError(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no str")

    __repr__ = __str__


class RaisesBadError(dict[str, int]):
    """A mapping whose reading raises what cannot be shown."""

    def items(self) -> Any:
        raise BadError


def released() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


def quantized() -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested_tensor() -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def masked() -> Any:
    return numpy.ma.masked_array([1, 2], mask=[True, False])


class _Pointer(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p),)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: print, "builtin_function_or_method"),
    "lambda": (lambda: lambda: None, "function"),
    "class": (lambda: Record, "type"),
    "module": (lambda: datetime, "module"),
    "object": (object, "object"),
    "numpy.int64": (lambda: numpy.int64(3), r"numpy\.int64.*use \.item\(\)"),
    "numpy.float32": (lambda: numpy.float32(3), r"numpy\.float32.*use \.item\(\)"),
    "numpy.bool": (lambda: numpy.bool(True), r"numpy\.bool.*use \.item\(\)"),
    "numpy.dtype": (lambda: numpy.dtype("f4"), "Float32DType"),
    "torch.dtype": (lambda: torch.float32, r"torch\.float32 of type torch\.dtype"),
    "torch.device": (lambda: torch.device("cpu"), r"torch\.device"),
    "generator": (lambda: torch.Generator(), r"torch.*Generator"),
    "2**70": (lambda: 2**70, "integer 1180591620717411303424 does not fit 64 bits"),
    "-2**63-1": (lambda: -(2**63) - 1, "does not fit 64 bits"),
    "2**64": (lambda: 2**64, "does not fit 64 bits"),
    "an integer too long to print": (lambda: 10**5000, "integer of 16610 bits does not fit"),
    "set": (lambda: {1}, "type set.*send a list"),
    "frozenset": (lambda: frozenset({1}), "type frozenset.*send a list"),
    "complex": (lambda: 1j, "type complex"),
    "datetime": (lambda: datetime.datetime(2026, 1, 1), r"datetime\.datetime"),
    "date": (lambda: datetime.date(2026, 1, 1), r"datetime\.date"),
    "Decimal": (lambda: decimal.Decimal(1), r"decimal\.Decimal"),
    "Fraction": (lambda: fractions.Fraction(1), r"fractions\.Fraction"),
    "UUID": (lambda: uuid.UUID(int=1), r"uuid\.UUID"),
    "path": (lambda: pathlib.PurePosixPath("/a"), r"pathlib\.PurePosixPath"),
    "enum": (lambda: Color.RED, "Color"),
    "dataclass": (Record, "Record"),
    "exception": (lambda: ValueError("x"), "ValueError"),
    "iterator": (lambda: iter([1]), "list_iterator"),
    "range": (lambda: range(3), "range"),
    "lone surrogate": (lambda: "\ud800", "lone surrogate"),
    "Ellipsis": (lambda: ..., "ellipsis"),
    "key of object": (lambda: {Record: 1}, "key .*Record.* neither a string nor an integer"),
    "key of tuple": (lambda: {(1, 2): 1}, "key .*tuple"),
    "key of None": (lambda: {None: 1}, "key .*NoneType"),
    "key of bool": (lambda: {True: 1}, "key .*bool"),
    "key of float": (lambda: {1.0: 1}, "key .*float"),
    "key of bytes": (lambda: {b"a": 1}, "key .*bytes"),
    "key of numpy": (lambda: {numpy.int64(1): 1}, r"key .*numpy\.int64"),
    "key of enum": (lambda: {Color.RED: 1}, "key .*Color"),
    "key with a lone surrogate": (lambda: {"\ud800": 1}, "lone surrogate"),
    "key of 2**70": (lambda: {2**70: 1}, "does not fit 64 bits"),
    "key that cannot be shown": (lambda: {BadRepr(): 1}, "BadRepr"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"sparse_coo.*to_dense"),
    "sparse csr": (lambda: _csr(), r"sparse_csr.*to_dense"),
    "quantized": (quantized, r"qint8.*int_repr"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta device"),
    "empty on meta": (lambda: torch.ones(0, device="meta"), "meta device"),
    "nested tensor": (nested_tensor, "RuntimeError"),
    "65 dimensions": (lambda: torch.zeros([1] * 65), "65 dimensions"),
    "65 dimensions on the wire": (lambda: WireArray("torch", "int8", (1,) * 65, memoryview(b"a")), "65 dimensions"),
    "masked array": (masked, "masked"),
    "object array": (lambda: numpy.array([object()]), "dtype object"),
    "string array": (lambda: numpy.array(["a"]), "dtype <U1"),
    "date array": (lambda: numpy.array(["2026-01-01"], dtype="M8[s]"), "datetime64"),
    "record array": (lambda: numpy.zeros(3, dtype="i4,f4"), "dtype"),
    "void array": (lambda: numpy.zeros(3, dtype="V3"), "dtype"),
    "empty object array": (lambda: numpy.array([], dtype=object), "dtype object"),
    "no repr": (BadRepr, r"repr raises RuntimeError.*BadRepr"),
    "bad attributes": (BadAttributes, "BadAttributes"),
    "bad class": (BadClass, "BadClass"),
    "bad mapping": (BadMapping, r"BadMapping raised OSError.*no such row"),
    "bad list": (BadList, r"BadList raised OSError.*disk gone"),
    "error that cannot be shown": (lambda: RaisesBadError(a=1), "RaisesBadError raised BadError"),
    "released memory": (released, "memoryview raised ValueError"),
}  # fmt: skip


def _csr() -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "alone": (lambda bad: bad, "result"),
    "in a list": (lambda bad: [1, bad], "result[1]"),
    "in a tuple": (lambda bad: (bad,), "result[0]"),
    "in a mapping": (lambda bad: {"mask": bad}, "result['mask']"),
    "by a number": (lambda bad: {5: bad}, "result[5]"),
    "in another mapping": (lambda bad: MappingProxyType({"a": 1, "b": bad}), "result['b']"),
    "deep": (lambda bad: {"a": [1, {"b": (2, bad)}]}, "result['a'][1]['b'][1]"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_type_and_place_and_leaves_the_buffers_alone(name: str, place: str) -> None:
    make, words = REFUSED[name]
    wrap, path = PLACES[place]
    large = numpy.zeros(2**17, dtype="u1")
    value = [large, {"also": large}, wrap(make()), large]
    before: list[cbor.Buffer] = [b"another buffer"]
    buffers = list(before)
    with pytest.raises(UnencodableError, match=words) as caught:
        packing.encode(value, buffers, path="result")
    expected = path.replace("result", "result[2]", 1)
    assert caught.value.path == expected or caught.value.path.startswith(f"{expected} key ")
    assert str(caught.value).startswith(caught.value.path + ": ")
    assert len(str(caught.value)) < 500
    assert buffers == before
    assert isinstance(caught.value, TypeError)


def test_a_cycle_ends_with_an_error() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    mapping: dict[str, Any] = {}
    mapping["self"] = mapping
    for value in (cycle, mapping):
        with pytest.raises(UnencodableError, match="a cycle") as caught:
            packing.encode(value, [], path="result")
        assert caught.value.path.startswith("result[")


def test_lists_that_hold_each_other_many_times_end_with_an_error() -> None:
    tower: list[Any] = []
    mapping: dict[str, Any] = {}
    for _ in range(50):
        tower = [tower, tower]
        mapping = {"left": mapping, "right": mapping}
    for value in (tower, mapping):
        with pytest.raises(UnencodableError, match=f"more than {packing.MAX_CONTAINERS} lists and maps") as caught:
            packing.encode(value, [], path="result")
        assert caught.value.path.startswith("result[")


def test_items_count_on_every_path() -> None:
    wide: list[Any] = [0.5] * 10**5
    for _ in range(17):  # fewer lists than are allowed
        wide = [wide, wide]
    with pytest.raises(UnencodableError, match=f"more than {packing.MAX_ITEMS} items"):
        packing.encode(wide, [], path="result")


def test_a_list_without_end_is_not_shown_as_a_whole() -> None:
    tower: Any = ()
    for _ in range(50):
        tower = (tower, tower)
    frozen: Any = frozenset()
    for _ in range(50):
        frozen = frozenset({frozen, frozenset({frozen, 1})})
    for value in ({1: deque([tower])}, Record(tower), {frozen: 1}, frozen, {"a": 1, "b": 2}.items(), UserList([tower])):
        with pytest.raises(UnencodableError) as caught:
            packing.encode(value, [], path="result")
        assert len(str(caught.value)) < 300


def test_a_list_on_several_paths_travels_once_for_each() -> None:
    shared = [1, 2]
    assert cbor.decode(packing.encode([shared, {"again": shared}], [], path="result")) == [[1, 2], {"again": [1, 2]}]


def test_a_text_that_is_long_is_not_repeated_in_the_error() -> None:
    with pytest.raises(UnencodableError) as caught:
        packing.encode({1, "x" * 10**6}, [], path="result")
    assert len(str(caught.value)) < 300


class Word(str, enum.Enum):  # noqa: UP042 - as older code has it
    """A string whose ``str()`` is another string."""

    ONE = "one"


class Number(int):
    """An integer whose conversions lie."""

    def __int__(self) -> int:
        return 99

    __index__ = __trunc__ = __int__


class Share(float):
    """A float whose conversion lies."""

    def __float__(self) -> float:
        return 99.0


class Blob(bytes):
    """Bytes whose conversion lies."""

    def __bytes__(self) -> bytes:
        return b"99"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (numpy.float64(1.5), 1.5),
        (numpy.str_("a"), "a"),
        (numpy.bytes_(b"a"), b"a"),
        (signal.SIGKILL, 9),
        (Word.ONE, "one"),
        (Number(5), 5),
        (Share(1.5), 1.5),
        (Blob(b"b"), b"b"),
        ({Word.ONE: 1, signal.SIGKILL: 2}, {"one": 1, 9: 2}),
    ],
    ids=repr,
)
def test_subclasses_of_scalars_arrive_as_what_they_equal(value: Any, expected: Any) -> None:
    received = cbor.decode(packing.encode(value, [], path="value"))
    assert canonical(received) == canonical(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abc"), b"abc"),
        (memoryview(b"abcdef")[::2], b"ace"),
        (memoryview(numpy.arange(3, dtype="<u2")), b"\0\0\1\0\2\0"),
        ((1, (2, [3])), [1, [2, [3]]]),
        (torch.Size([1, 2]), [1, 2]),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (type("Pair", (dict,), {})({"a": 1}), {"a": 1}),
        ([True, False, None], [True, False, None]),
        ({-(2**63): 2**64 - 1}, {-(2**63): 2**64 - 1}),
        ("", ""),
        ({}, {}),
        ([], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_resembles_a_plain_type_travels_as_that(value: Any, expected: Any) -> None:
    received = cbor.decode(packing.encode(value, [], path="value"))
    assert canonical(received) == canonical(expected)


@given(strategies.values(), st.sampled_from(sorted(REFUSED)))
def test_one_thing_that_cannot_travel_anywhere_refuses_the_whole(value: Any, name: str) -> None:
    buffers: list[cbor.Buffer] = []
    with pytest.raises(UnencodableError) as caught:
        packing.pack({"first": value, "bad": REFUSED[name][0]()}, buffers, path="value")
    assert caught.value.path.startswith("value['bad']")
    assert buffers == []


def test_printable_text_is_left_alone() -> None:
    assert cbor.printable("text \u00e9 \U0001f600 \\udc80") == "text \u00e9 \U0001f600 \\udc80"
    assert cbor.printable("a\udc80b") == "a\\udc80b"


def test_two_keys_that_arrive_as_one_are_refused() -> None:
    class Own(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = object.__hash__

    with pytest.raises(UnencodableError, match="two of its keys are 'a'"):
        packing.encode({Own("a"): 1, Own("a"): 2}, [], path="result")


@pytest.mark.parametrize(
    "items", [[7] * 10**6, ["a word"] * 10**6, [0.5, None, True, b"x"] * 250_000], ids=["int", "str", "mixed"]
)
def test_long_lists_of_scalars_are_not_looked_at_one_by_one(items: list[Any]) -> None:
    started = time.thread_time()
    assert packing.pack(items, [], path="result") == items
    assert time.thread_time() - started < 0.3


@pytest.mark.parametrize("odd", [2**64, -(2**63) - 1, "\ud800", object(), 2**5000], ids=lambda odd: type(odd).__name__)
def test_what_cannot_travel_is_found_among_many(odd: object) -> None:
    items: list[Any] = [type(odd)(1) if type(odd) is int else "a"] * 1000
    items[500] = odd
    with pytest.raises(UnencodableError) as caught:
        packing.encode(items, [], path="result")
    assert caught.value.path == "result[500]"
