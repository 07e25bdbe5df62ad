"""The client's end of the lane: large buffers of a message go to the engine as descriptors of shared memory.

The kernel holds what is on its way: a descriptor in the socket pair belongs to it, and whichever side dies, nothing of
it is left. What cannot be passed, because the lane is full or the system refuses it, stays a frame of the message.
"""

from __future__ import annotations

import array
import os
import socket
import weakref

from anyengine.memory import offset_in, owner_of
from anyengine.process.blocks import BlockPool, Lease, SharedFile
from anyengine.protocol.cbor import Frames
from anyengine.protocol.lane import LANE_KIND, Passed, encode_passed

_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Lane:
    """One life of one engine has one; ``pool`` is the memory for it. Sending never blocks."""

    def __init__(self, end: socket.socket) -> None:
        self.pool: BlockPool = BlockPool()
        self._socket = end
        self._socket.setblocking(False)
        self._sent = 0
        _lanes.add(self)

    def hand_over(self, frames: Frames) -> Frames:
        """The message to send instead of ``frames`` (kind, body, buffers).

        Buffers that lie in shared memory are passed to the engine at once, each under a number that the message then
        refers to.
        """
        passed: list[Passed] = []
        buffers = frames[2:]
        for index, buffer in enumerate(buffers):
            if not isinstance(buffer, memoryview):
                continue
            owner, number = owner_of(buffer), self._sent
            if isinstance(owner, Lease):
                file, has_gone = owner.block, owner.lend(self._pass)
            elif isinstance(owner, SharedFile):
                file, has_gone = owner, self._pass(owner.fd)
            else:
                continue
            if has_gone:
                lent = isinstance(owner, Lease)
                passed.append(Passed(index, number, offset_in(file, buffer), buffer.nbytes, lent))
                buffers[index] = b""
        return [LANE_KIND, encode_passed(passed), *frames[:2], *buffers] if passed else frames

    def _pass(self, fd: int) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._socket.sendmsg([self._sent.to_bytes(8, "little")], rights, socket.MSG_NOSIGNAL)
        except OSError:
            # Full, or too many descriptors on the way, or the engine is dead, which its watch will tell.
            return False
        self._sent += 1
        return True

    def close(self) -> None:
        """Close this end, and keep no more memory."""
        self._socket.close()
        self.pool.close()

    def free(self) -> None:
        """Close it, and free the memory at once; see :meth:`BlockPool.trim`."""
        self.close()
        self.pool.trim()


def open_lane() -> tuple[Lane, socket.socket] | tuple[None, None]:
    """A lane, and the end of it that the engine inherits; neither where the system refuses such sockets."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:  # of too few descriptors, the next call tells
        return None, None
    _ends.update((ours, theirs))
    return Lane(ours), theirs


def _after_in_child() -> None:
    for end in list(_ends):
        end.close()
    for lane in list(_lanes):
        lane.pool.forget()


# Memory must not stay because a process that the application forked still has its descriptors.
os.register_at_fork(after_in_child=_after_in_child)
