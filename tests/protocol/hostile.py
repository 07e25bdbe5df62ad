"""Bytes that nobody should send, as hypothesis strategies: from nothing, and out of real messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st
from tests.protocol import strategies

from anyengine.protocol.cbor import ARRAY_TAG

Frames = list[bytes]

_INTERESTING = [0, 1, 23, 24, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1]


def head(major: int, number: int, width: int | None = None) -> bytes:
    """The head of a CBOR item: the shortest encoding, or one of ``width`` bytes."""
    if width is None:
        width = 0 if number < 24 else next(w for w in (1, 2, 4, 8) if number < 2 ** (8 * w))
    if width == 0:
        return bytes([major << 5 | number])
    return bytes([major << 5 | 23 + width.bit_length()]) + number.to_bytes(width, "big")


numbers = st.sampled_from(_INTERESTING) | st.integers(0, 2**64 - 1) | st.integers(0, 30)
_leaves = st.one_of(
    st.builds(head, st.sampled_from([0, 1]), numbers),
    st.builds(lambda number: head(0, number, 8), numbers),
    st.binary(max_size=12).map(lambda data: head(2, len(data)) + data),
    st.binary(max_size=12).map(lambda data: head(3, len(data)) + data),
    strategies.texts.map(lambda text: head(3, len(text.encode())) + text.encode()),
    st.sampled_from(["finish_reason", "stop", "json", "extra", "max_tokens", "torch", "numpy", "|u1", "uint8"]).map(
        lambda text: head(3, len(text)) + text.encode()
    ),
    st.sampled_from([bytes([0xE0 | n]) for n in range(24)] + [b"\xff", b"\xf8\x20", b"\xf8\xff", b"\xf8\x10"]),
    st.sampled_from(
        [b"\xf9\x7e\x00", b"\xf9\x7c\x00", b"\xf9\xfc\x00", b"\xfb" + bytes(8), b"\xfb\x7f\xef" + b"\xff" * 6]
    ),
    st.builds(head, st.sampled_from([2, 3, 4, 5]), numbers),  # lengths of what is not there
    st.sampled_from([b"\x9f\xff", b"\xbf\xff", b"\x5f\x41a\xff", b"\x7f\x61a\xff", b"\x9f", b"\x1c", b"\x1f"]),
)


def _containers(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.lists(inner, max_size=4).map(lambda items: head(4, len(items)) + b"".join(items)),
        st.lists(st.tuples(inner, inner), max_size=3).map(
            lambda pairs: head(5, len(pairs)) + b"".join(key + value for key, value in pairs)
        ),
        st.builds(lambda number, item: head(6, number) + item, numbers | st.just(ARRAY_TAG), inner),
        st.lists(inner, min_size=4, max_size=4).map(lambda items: head(6, ARRAY_TAG) + head(4, 4) + b"".join(items)),
        inner.map(lambda item: b"\x81" * 70 + item),
    )


items = st.recursive(_leaves, _containers, max_leaves=6)
"""One CBOR item, well-formed or not, sensible or not."""


def spans(body: bytes) -> list[tuple[int, int]]:
    """Where each item of a well-formed body of definite lengths begins and ends."""
    found: list[tuple[int, int]] = []
    _walk(body, 0, found)
    return found


def _walk(body: bytes, start: int, found: list[tuple[int, int]]) -> int:
    major, low = body[start] >> 5, body[start] & 31
    width = 0 if low < 24 else 1 << (low - 24)
    number = low if low < 24 else int.from_bytes(body[start + 1 : start + 1 + width], "big")
    position = start + 1 + width
    index = len(found)
    found.append((start, position))
    if major in (2, 3):
        position += number
    for _ in range({4: number, 5: 2 * number, 6: 1}.get(major, 0)):
        position = _walk(body, position, found)
    found[index] = (start, position)
    return position


def _items_of(draw: st.DrawFn, frames: Frames) -> Iterator[tuple[int, int]]:
    places = spans(frames[1])
    yield draw(st.sampled_from(places))
    yield draw(st.sampled_from(places))


@st.composite
def mutated(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> Frames:
    """A real message with one to three things changed: bytes, CBOR items or frames."""
    frames = [bytes(frame) for frame in draw(messages).encode()]
    if len(frames) > 1 and draw(st.integers(0, 2)) > 0:  # first by item, while the body is still whole
        (start, end), (other_start, other_end) = _items_of(draw, frames)
        body = frames[1]
        new = draw(items) if draw(st.booleans()) else body[other_start:other_end]
        frames[1] = body[:start] + new + body[end:]
    for _ in range(draw(st.integers(0, 2))):
        _change(draw, frames)
    return frames


def _change(draw: st.DrawFn, frames: Frames) -> None:
    if not frames:
        return
    index = draw(st.integers(0, len(frames) - 1))
    frame = frames[index]
    at = draw(st.integers(0, len(frame)))
    what = draw(st.sampled_from(["flip", "cut", "insert", "remove", "drop", "repeat", "swap", "append", "resize"]))
    if what == "flip" and at < len(frame):
        frames[index] = frame[:at] + bytes([frame[at] ^ draw(st.integers(1, 255))]) + frame[at + 1 :]
    elif what == "cut":
        frames[index] = frame[:at]
    elif what == "insert":
        frames[index] = frame[:at] + draw(st.binary(min_size=1, max_size=4)) + frame[at:]
    elif what == "remove":
        frames[index] = frame[:at] + frame[at + draw(st.integers(1, 4)) :]
    elif what == "drop":
        del frames[index]
    elif what == "repeat":
        frames.insert(index, frame)
    elif what == "swap":
        other = draw(st.integers(0, len(frames) - 1))
        frames[index], frames[other] = frames[other], frames[index]
    elif what == "append":
        frames.append(draw(st.binary(max_size=16)))
    elif what == "resize":
        frames[index] = (frame * 2)[: draw(st.integers(0, 2 * len(frame)))]


def with_buffers(messages: st.SearchStrategy[Any], large: Sequence[Any]) -> st.SearchStrategy[Any]:
    """``messages``, and now and then one with buffers."""
    return st.one_of(messages, messages, st.sampled_from(large))
