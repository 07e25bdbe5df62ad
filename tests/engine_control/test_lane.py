"""The engine's end of the lane, with a client that does what none of ours does."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from anyengine.engine.lane import EngineLane
from anyengine.errors import ProtocolError
from anyengine.memory import HEADER
from anyengine.process.lane import Lane, open_lane
from anyengine.protocol.cbor import Frames
from anyengine.protocol.lane import LANE_KIND, Passed, encode_passed

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def ends() -> Iterator[tuple[Lane, EngineLane]]:
    ours, theirs = open_lane()
    engine = EngineLane(theirs.detach())
    yield ours, engine
    engine._socket.close()
    ours.free()


def message(lane: Lane, *contents: bytes) -> Frames:
    """One with a large buffer for each of ``contents``."""
    leases = [lane.pool.take(len(content)) for content in contents]
    views = [lease.fill(memoryview(content), lambda: None) for lease, content in zip(leases, contents, strict=True)]
    return [b"\x03", b"body", *views]


def test_a_message_arrives_as_it_would_without_a_lane(ends: tuple[Lane, EngineLane]) -> None:
    ours, theirs = ends
    frames = message(ours, b"one", b"two")
    frames.insert(3, b"a frame")
    sent = ours.hand_over(frames)
    assert sent[0] == LANE_KIND
    assert [bytes(frame) for frame in sent[2:]] == [b"\x03", b"body", b"", b"a frame", b""]
    received = theirs.unwrap([bytes(frame) for frame in sent])
    assert [bytes(frame) for frame in received] == [b"\x03", b"body", b"one", b"a frame", b"two"]
    plain = [b"\x03", b"body", b"frame"]
    assert ours.hand_over(list(plain)) == plain
    assert theirs.unwrap(plain) == plain


def test_what_the_engine_writes_is_not_in_the_next_array(ends: tuple[Lane, EngineLane]) -> None:
    ours, theirs = ends
    for number in range(3):
        content = bytes([number]) * 10
        received = theirs.unwrap([bytes(frame) for frame in ours.hand_over(message(ours, content))])
        view = received[2]
        assert isinstance(view, memoryview)
        assert view == content
        view[:] = b"\xff" * 10
        del view, received
    assert len(ours.pool._lent) + len(ours.pool._idle) == 1


def test_descriptors_of_messages_that_never_came_are_closed(ends: tuple[Lane, EngineLane]) -> None:
    ours, theirs = ends
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        ours.hand_over(message(ours, b"lost"))
    received = theirs.unwrap([bytes(frame) for frame in ours.hand_over(message(ours, b"there"))])
    assert bytes(received[2]) == b"there"
    assert len(os.listdir("/proc/self/fd")) == before + 11  # of the pool's blocks, none of the engine's


@pytest.mark.parametrize("number", [0, 7])
def test_a_descriptor_that_never_comes_is_not_waited_for(ends: tuple[Lane, EngineLane], number: int) -> None:
    ours, theirs = ends
    frames = [LANE_KIND, encode_passed([Passed(0, number, HEADER, 5, True)]), b"\x03", b"body", b""]
    with pytest.raises(ProtocolError, match=f"descriptor {number}, which did not come"):
        theirs.unwrap(frames)
    ours.close()
    with pytest.raises(ProtocolError, match=f"descriptor {number}, which did not come"):
        theirs.unwrap(frames)


def test_a_closed_lane_leaves_frames_as_they_are(ends: tuple[Lane, EngineLane]) -> None:
    ours, _ = ends
    frames = message(ours, b"late")
    ours.close()
    assert ours.hand_over(frames) is frames
