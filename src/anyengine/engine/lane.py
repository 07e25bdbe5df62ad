"""The engine's end of the lane: descriptors come in, and messages get their buffers back."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import weakref
from collections.abc import Sequence

from anyengine.errors import ProtocolError
from anyengine.memory import FREE, HEADER, LOST, Mapping
from anyengine.notices import warn
from anyengine.protocol.lane import LANE_KIND, Passed, decode_passed

_forks = 0
_lanes: weakref.WeakSet[EngineLane] = weakref.WeakSet()


def _before_fork() -> None:
    global _forks
    _forks += 1


def _after_in_child() -> None:
    for lane in list(_lanes):
        lane.close()


os.register_at_fork(before=_before_fork, after_in_child=_after_in_child)


class _LentBlock(Mapping):
    """A block of the client's, which may use it again when this is gone."""

    def __init__(self, fd: int, size: int) -> None:
        super().__init__(fd, size, private=False)
        self._forks = _forks

    def __del__(self) -> None:
        # A process that was forked meanwhile may still read it, and nobody knows until when: then it is not used again,
        # and its memory goes with the last of these processes.
        if self.address:
            self.state = FREE if self._forks == _forks else LOST
        super().__del__()


class EngineLane:
    """Takes in what the client passes by ``fd``, an inherited end of a socket pair.

    The client sends a descriptor before the message that refers to it. So what a message needs is always there, and
    what comes before that belongs to messages that never came.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        _lanes.add(self)

    def close(self) -> None:
        """Take in nothing any more; what came stays."""
        self._socket.close()

    def unwrap(self, frames: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
        """The message as it would have come without a lane; most often it did.

        A buffer that cannot be had (no descriptors or memory left) stays empty, so that only this message is refused.

        :raises ProtocolError: if the references are malformed
        """
        if frames[0] != LANE_KIND:
            return frames
        if len(frames) < 4:
            raise ProtocolError(f"a LANE message has at least four frames; {len(frames)} came")
        message = list(frames[2:])
        for passed in decode_passed(bytes(frames[1])):
            fd = self._take(passed.number)
            if passed.buffer >= len(message) - 2 or (passed.lent and passed.offset != HEADER):
                if fd is not None:
                    _give_back(fd)
                raise ProtocolError(f"LANE refers to buffer {passed.buffer} of {len(message) - 2}, or into a header")
            if fd is not None:
                try:
                    message[2 + passed.buffer] = _map(fd, passed)
                except OSError as error:
                    warn("a tensor of %d bytes is lost: %s", passed.size, error)
                    _give_back(fd)
                else:
                    os.close(fd)
        return message

    def _take(self, number: int) -> int | None:
        """The descriptor of this number; None if this process could not take it."""
        fds = array.array("i")
        while True:
            try:
                data, control, _, _ = self._socket.recvmsg(
                    8, socket.CMSG_SPACE(fds.itemsize), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                data, control = b"", []
            if not data:  # or the end of the lane
                raise ProtocolError(f"LANE refers to descriptor {number}, which did not come")
            received = array.array("i")
            for level, kind, content in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received.frombytes(content)
            if int.from_bytes(data, "little") == number:
                if not received:
                    warn("a tensor is lost: this process has no free descriptor for it")
                    return None
                return received[0]
            for fd in received:
                _give_back(fd)


def _give_back(fd: int) -> None:
    """Close the descriptor of a block that this process has no use for, which the client may use again."""
    with contextlib.suppress(OSError):  # no block, but a file that was opened for reading alone
        os.pwrite(fd, bytes([FREE]), 0)
    os.close(fd)


def _map(fd: int, passed: Passed) -> memoryview:
    end = passed.offset + passed.size
    if os.fstat(fd).st_size < end:
        raise OSError(f"its file has {os.fstat(fd).st_size} bytes, and {end} are needed")
    mapping = _LentBlock(fd, end) if passed.lent else Mapping(fd, end, private=True)
    return mapping.view(passed.offset, passed.size)
