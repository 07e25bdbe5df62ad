"""The checks that decoding makes on values it took from the wire."""

from __future__ import annotations

from typing import Any, cast

from anyengine.brief import brief
from anyengine.errors import ProtocolError
from anyengine.types import U64_MAX


def expect_array(name: str, value: object, length: int) -> list[Any]:
    """``value`` as a list.

    :raises ProtocolError: if it is not an array of ``length``
    """
    if type(value) is not list or len(cast("list[object]", value)) != length:
        raise ProtocolError(f"the body of {name} is not an array of {length}")
    return cast("list[Any]", value)


def expect_type(name: str, value: object, expected: type) -> None:
    """:raises ProtocolError: if ``value`` is not exactly an ``expected``"""
    if type(value) is not expected:
        raise ProtocolError(f"{name} is {brief(value)}, expected {expected.__name__}")


def expect_u64(name: str, value: object) -> None:
    """:raises ProtocolError: if ``value`` is not an unsigned number of 64 bits"""
    if type(value) is not int or not 0 <= value <= U64_MAX:
        raise ProtocolError(f"{name} is {brief(value)}, expected an unsigned number of 64 bits")


def expect_counts(name: str, *numbers: object) -> None:
    """:raises ProtocolError: if one of ``numbers``, which CBOR keeps within 64 bits, is not a number from 0 up"""
    for number in numbers:
        if type(number) is not int or number < 0:
            raise ProtocolError(f"{name} has {brief(number)} where an unsigned number belongs")


def expect_u16(name: str, value: object) -> None:
    """:raises ProtocolError: if ``value`` is not an unsigned number of 16 bits"""
    if type(value) is not int or not 0 <= value < 2**16:
        raise ProtocolError(f"{name} is {brief(value)}, expected an unsigned number of 16 bits")
