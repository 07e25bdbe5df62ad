"""The CBOR of the wire takes less than CBOR: what it refuses, and that what can be encoded can be decoded."""

from __future__ import annotations

import math
import signal
import struct
from typing import Any

import cbor2
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol import strategies
from tests.protocol.strategies import arrived, canonical

from anyengine.errors import ProtocolError, UnencodableError
from anyengine.params import SamplingParams
from anyengine.protocol import cbor, packing
from anyengine.protocol.messages import decode_from_client, decode_from_engine
from anyengine.protocol.outputs import OutputDetails, StepOutputs
from anyengine.protocol.replies import Outputs, UtilityResult
from anyengine.protocol.requests import Add, Init, Utility
from anyengine.protocol.sampling import NO_OPTIONS

DECODERS = {
    "decode": cbor.decode,
    "decode_plain": cbor.decode_plain,
    "decode_outline": cbor.decode_outline,
    "decode with buffers": lambda body: cbor.decode(body, [memoryview(bytearray(4))]),
}
TAGS_END = 70_000


def refused_by_all(body: bytes) -> None:
    for decode in DECODERS.values():
        with pytest.raises(ProtocolError):
            decode(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x01\x01",  # a second item
        b"\x01\x00",
        b"\x80\x80",
        b"\xf6" + bytes(1000),
        b"\x41",  # items that are cut off, and would take what is behind them
        b"\x82\x01",
        b"\x81",
        b"\x50",
        b"\x51",
        b"\x62a",
        b"\xa1\x01",
        b"\xfb\x00\x00",
        b"\x18",
        b"\xd9\xa1",
        b"\xd9\xa1\xe0",
        b"\x9f\xff",  # indefinite lengths
        b"\xbf\xff",
        b"\x5f\x41a\xff",
        b"\x7f\x61a\xff",
        b"\x81\x9f\xff",
        b"\xff",  # a break that breaks nothing
        b"\x81\xff",
        b"\x1c",  # reserved lengths
        b"\x3d",
        b"\x5e",
        b"\x9c",
        b"\xfc",
        b"\xf8\x14",  # simple values in two bytes that belong in one
        b"\xf8\x18",
        b"\x61\xff",  # not UTF-8
        b"\x62\xc3\x28",
        b"\x63\xed\xa0\x80",  # a surrogate
        b"\xa2\x01\x01\x01\x02",  # the same key twice
        b"\xa2\x01\x01\x18\x01\x02",
        b"\xa2\x61a\x01\x61a\x01",
        b"\xa2\x01\x01\xf5\x02",  # True is 1 in Python
        b"\xa2\x01\x01\xfb\x3f\xf0\x00\x00\x00\x00\x00\x00\x02",
        b"\x81\xa2\x61a\x01\x61a\x01",
        b"\x5b" + b"\xff" * 8,  # lengths that no memory has
        b"\x7b" + b"\xff" * 8,
        b"\x9b" + b"\xff" * 8,
        b"\xbb" + b"\xff" * 8,
        b"\x5b\x7f" + b"\xff" * 7,
        b"\x9b\x00\x00\x00\xff" + b"\xff" * 4,
        b"\xbb\x00\x00\x00\xff" + b"\xff" * 4,
        b"\x5a\xff\xff\xff\xff",
        b"\x9a\xff\xff\xff\xff",
        b"\x9b\x00\x00\x00\xff\xff\xff\xff\xff" * 30,
        b"\x81" * 100_000 + b"\x01",  # depth
        b"\xa1\x01" * 100_000 + b"\x01",
        b"\xa1" * 100_000,
        b"\x81" * 64 + b"\x01",
        b"\xd9\xa1\xe0" * 100_000,
        b"\xd8\x2a" * 100_000,
    ],
    ids=lambda body: f"{body[:12].hex()}-{len(body)}",
)
def test_what_is_not_exactly_one_item_of_the_strict_form_is_refused(body: bytes) -> None:
    refused_by_all(body)


@given(strategies.values(), st.binary(min_size=1, max_size=40))
def test_bytes_behind_the_item_are_refused(value: Any, more: bytes) -> None:
    refused_by_all(packing.encode(value, [], path="value") + more)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_array_behind_the_item_is_refused(library: str) -> None:
    """Comparing an array with what should be there instead gives an array, which is neither true nor false."""
    dtype = "|u1" if library == "numpy" else "uint8"
    array = cbor2.dumps(cbor2.CBORTag(cbor.ARRAY_TAG, [library, dtype, [4], bytes(4)]))
    refused_by_all(b"\x01" + array)
    refused_by_all(array + array)


@given(strategies.values(), st.data())
def test_a_body_that_is_cut_anywhere_is_refused(value: Any, data: st.DataObject) -> None:
    body = packing.encode(value, [], path="value")
    refused_by_all(body[: data.draw(st.integers(0, len(body) - 1))])


def test_the_depth_limit_counts_containers_and_tags_and_is_63() -> None:
    for opening in (b"\x81", b"\xa1\x61k"):
        assert cbor.decode_plain(opening * 63 + b"\x01")
        refused_by_all(opening * 64 + b"\x01")
    array = cbor2.dumps(cbor2.CBORTag(cbor.ARRAY_TAG, ["numpy", "|u1", [], bytes(1)]))
    assert cbor.decode(b"\x81" * 60 + array)
    refused_by_all(b"\x81" * 62 + array)


@pytest.mark.parametrize("key", [1, 1.5, None, [1, 2], {"a": 1}], ids=repr)
def test_where_no_value_is_left_open_the_keys_of_maps_are_strings(key: Any) -> None:
    assert cbor.decode_plain(b"\xa1\x61k\x00") == {"k": 0}
    with pytest.raises(ProtocolError, match="map key"):
        cbor.decode_plain(b"\xa1" + cbor2.dumps(key) + b"\x00")


def _tag(number: int, width: int) -> bytes:
    """The head of a tag in one of its encodings, of which only one is the shortest."""
    if width == 0:
        return bytes([0xC0 | number])
    return bytes([0xC0 | 23 + width.bit_length()]) + number.to_bytes(width, "big")


@pytest.mark.parametrize("content", ["01", "60", "820102", "a0"])
def test_every_tag_below_70000_but_ours_is_refused(content: str) -> None:
    for number in range(TAGS_END):
        if number == cbor.ARRAY_TAG:
            continue
        width = 0 if number < 24 else 1 if number < 2**8 else 2 if number < 2**16 else 4
        with pytest.raises(ProtocolError, match="not allowed here"):
            cbor.decode(_tag(number, width) + bytes.fromhex(content))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_tags_in_longer_encodings_than_needed_are_refused_as_well(width: int) -> None:
    for number in (*range(min(2 ** (8 * width), 500)), 1004, 43000, 55799, 2**16, 2**32, 2**64 - 1):
        if number < 2 ** (8 * width):
            refused = _tag(number, width) + b"\x80"
            for decode in (cbor.decode, cbor.decode_plain):
                with pytest.raises(ProtocolError, match="not allowed here"):
                    decode(refused)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_our_own_tag_is_refused_where_no_array_may_be(width: int) -> None:
    body = _tag(cbor.ARRAY_TAG, width) + cbor2.dumps(["numpy", "|u1", [1], b"\5"])
    assert cbor.decode(body).tolist() == [5]
    with pytest.raises(ProtocolError, match="41440 is not allowed here"):
        cbor.decode_plain(body)


@pytest.mark.parametrize("value", [2**64, -(2**64) - 1, 2**200])
def test_bignums_are_refused(value: int) -> None:
    refused_by_all(cbor2.dumps(value))
    refused_by_all(cbor2.dumps([value]))
    refused_by_all(cbor2.dumps({value: 1}))


def test_shared_references_and_string_references_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    refused_by_all(cbor2.dumps(cycle, value_sharing=True))
    refused_by_all(cbor2.dumps(["text" * 5] * 3, string_referencing=True))


FOREIGN = {
    "undefined": cbor2.undefined,
    "simple value": cbor2.CBORSimpleValue(99),
    "key of bytes": {b"key": 1},
    "key of float": {1.5: 1},
    "key of NaN": {math.nan: 1},
    "key of null": {None: 1},
    "key of bool": {True: 1},
    "key of array": {(1, 2): 1},
    "key of map": {cbor2.frozendict({"a": 1}): 1},
    "key of undefined": {cbor2.undefined: 1},
}


def frames_with(value: Any) -> dict[str, list[bytes]]:
    """``value`` in every place that messages leave open."""
    details = {"finish_reason": "stop"}
    handle = bytes(8)
    row = [0, 0, 0, handle, None, bytes(4)]
    return {
        "UTILITY": [b"\x03", cbor2.dumps([0, "method", [value]])],
        "INIT": [b"\x10", cbor2.dumps([1, 0, "", "a:B", {"argument": value}])],
        "extra": [b"\x00", cbor2.dumps([0, None, b"", None, {"extra": {"a": value}}, {}])],
        "json": [b"\x00", cbor2.dumps([0, None, b"", None, {"structured_outputs": {"json": {"a": value}}}, {}])],
        "UTILITY_RESULT": [b"\x31", cbor2.dumps([0, 0, 0, None, value])],
        "pooling_output": [b"\x30", cbor2.dumps([*row, {0: {**details, "pooling_output": value}}])],
        "kv_transfer_params": [b"\x30", cbor2.dumps([*row, {0: {**details, "kv_transfer_params": {"a": value}}}])],
        "events": [b"\x30", cbor2.dumps([*row, {0: {**details, "events": [value]}}])],
    }


@pytest.mark.parametrize("nesting", [0, 1, 2])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_an_open_place_takes_only_what_could_be_encoded(foreign: str, nesting: int) -> None:
    value: Any = FOREIGN[foreign]
    for _ in range(nesting):
        value = [1, {"inner": [{"a": 1}, value]}]
    for place, frames in frames_with(value).items():
        decode = decode_from_client if frames[0] < b"\x20" else decode_from_engine
        with pytest.raises(ProtocolError):
            decode(frames)
            pytest.fail(f"{foreign} was taken in {place}")


def test_a_name_of_an_argument_is_a_string() -> None:
    with pytest.raises(ProtocolError, match="not a string"):
        decode_from_client([b"\x10", cbor2.dumps([1, 0, "", "a:B", {5: 1}])])


@given(strategies.values())
def test_what_can_be_encoded_is_taken_in_every_open_place(value: Any) -> None:
    wire = packing.pack(value, [], path="value")
    for frames in frames_with(wire).values():
        if value is None and b"pooling_output" in frames[1]:
            continue
        decode = decode_from_client if frames[0] < b"\x20" else decode_from_engine
        decode(frames)


def nested(depth: int, kind: str, innermost: Any) -> Any:
    value = innermost
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value} if kind == "mapping" else (value, 1)
    return value


@pytest.mark.parametrize("kind", ["list", "mapping", "tuple"])
@pytest.mark.parametrize("innermost", [5, numpy.zeros(3), numpy.zeros(2**15)], ids=["number", "inline", "buffer"])
def test_whatever_depth_can_be_encoded_can_be_decoded_in_every_message(kind: str, innermost: Any) -> None:
    """Where the limit lies is the encoder's business; that both sides agree on it is a promise."""
    deepest = 0
    for depth in range(70):
        value = nested(depth, kind, innermost)
        messages: list[Any] = [
            Utility(1, "method", [value]),
            Init(1, 2, "", "a:B", {"argument": value}),
            Add(1, [[1]], None, SamplingParams(extra={"a": value}), NO_OPTIONS),
            UtilityResult(1, 2, 3, None, value),
            Outputs(1, 2, 3, StepOutputs([1], [1], None, {0: OutputDetails(pooling_output=value)})),
            Outputs(1, 2, 3, StepOutputs([1], [1], None, {0: OutputDetails(events=[value])})),
        ]
        for message in messages:
            try:
                frames = message.encode()
            except UnencodableError as error:
                assert "nested deeper" in str(error)
                continue
            deepest = depth
            decode = decode_from_client if frames[0] < b"\x20" else decode_from_engine
            assert canonical(decode(arrived(frames))) == canonical(message)
    assert deepest >= 50


@given(st.floats())
def test_floats_keep_every_bit_but_those_of_nan(value: float) -> None:
    received = cbor.decode(packing.encode(value, [], path="value"))
    assert struct.pack("<d", received) == struct.pack("<d", value) or (math.isnan(received) and math.isnan(value))


@pytest.mark.parametrize(
    "body", ["f97e00", "fa7fc00000", "fb7ff8000000000001", "f93c00", "fa3f800000", "1800", "190001"]
)
def test_longer_and_shorter_encodings_of_one_number_are_all_taken(body: str) -> None:
    """The encoder is deterministic enough; the decoder does not ask others to be."""
    assert isinstance(cbor.decode(bytes.fromhex(body)), int | float)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_a_signal_while_an_array_is_made_is_not_taken_for_a_malformed_message(
    monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    """cbor2 wraps whatever its hooks raise, Ctrl-C and the SystemExit of a SIGTERM handler included."""

    def interrupted(*args: Any) -> Any:
        raise raised(signal.SIGINT)

    body = packing.encode(numpy.zeros(3), [], path="value")
    monkeypatch.setattr("anyengine.protocol.arrays.from_wire", interrupted)
    with pytest.raises(raised):
        cbor.decode(body)


def test_each_decoder_says_what_it_found_in_a_sentence() -> None:
    for body, words in (
        (b"\x01\x01", "bytes follow"),
        (b"\xc1\x01", "not allowed here"),
        (b"\xa2\x01\x01\x01\x01", "[Dd]uplicate"),
        (b"\x81" * 100 + b"\x01", "depth"),
        (b"\x9f\xff", "indefinite"),
        (b"", "premature end"),
    ):
        with pytest.raises(ProtocolError, match=words):
            cbor.decode(body)
