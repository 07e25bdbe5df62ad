"""The engine's end of the lane, with a client that does what none of ours does."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

from anyengine.engine.lane import EngineLane
from anyengine.errors import ProtocolError
from anyengine.memory import FREE, HEADER, HELD, LOST
from anyengine.process.lane import Lane, open_lane
from anyengine.protocol.cbor import Frames
from anyengine.protocol.lane import LANE_KIND, Passed, decode_passed, encode_passed

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def ends() -> Iterator[tuple[Lane, EngineLane]]:
    ours, theirs = open_lane()
    assert ours is not None and theirs is not None
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


def test_blocks_that_the_engine_has_no_use_for_come_back(
    ends: tuple[Lane, EngineLane],
) -> None:
    ours, theirs = ends
    ours.hand_over(message(ours, b"skipped"))
    theirs.unwrap([bytes(frame) for frame in ours.hand_over(message(ours, b"there"))])
    beyond = ours.hand_over(message(ours, b"beyond"))
    beyond[1] = encode_passed([item._replace(size=10_000) for item in decode_passed(bytes(beyond[1]))])
    assert theirs.unwrap([bytes(frame) for frame in beyond])[2] == b""
    misplaced = ours.hand_over(message(ours, b"misplaced"))
    with pytest.raises(ProtocolError, match="LANE refers to buffer 0 of 0"):
        theirs.unwrap([bytes(frame) for frame in misplaced[:-1]])
    assert {block.state for block in (*ours.pool._lent, *ours.pool._idle)} == {FREE}


def test_a_block_that_a_forked_process_may_read_is_lost(ends: tuple[Lane, EngineLane]) -> None:
    ours, theirs = ends
    for expected, forks in ((FREE, False), (LOST, True), (FREE, False)):
        received = theirs.unwrap([bytes(frame) for frame in ours.hand_over(message(ours, b"x"))])
        (block,) = ours.pool._lent
        if forks:
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
        assert block.state == HELD
        del received
        assert block.state == expected
        ours.pool.trim()


def test_a_block_is_held_until_the_last_finalizer_of_a_cycle_has_run(ends: tuple[Lane, EngineLane]) -> None:
    ours, theirs = ends
    states: list[int] = []

    class Request:
        def __del__(self) -> None:
            states.append(self.block.state)
            if self.block.state == HELD:  # else it is not there
                states.append(self.prompt[0])

    for number in range(20):
        received = theirs.unwrap([bytes(frame) for frame in ours.hand_over(message(ours, bytes([number])))])
        request: Any = Request()
        (block,) = ours.pool._lent
        request.block, request.prompt, request.itself = block, received[2], request
        del request, received
        gc.collect()
        assert states == [HELD, number]
        assert block.state == FREE
        del block
        states.clear()


def test_a_process_that_is_forked_has_neither_end(ends: tuple[Lane, EngineLane]) -> None:
    ours, theirs = open_lane()
    assert ours is not None and theirs is not None
    pid = os.fork()
    if not pid:
        os._exit(ours._socket.fileno() != -1 or theirs.fileno() != -1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    theirs.close()
    ours.free()


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
