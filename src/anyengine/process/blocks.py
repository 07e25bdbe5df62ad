"""Blocks of shared memory for tensors on their way to an engine, used again and again.

To fill fresh memory takes several times as long as to fill memory that is there: most of it goes into finding pages. So
a block whose tensor the engine has let go of serves the next one.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from anyengine import memory
from anyengine.memory import FREE, HEADER, HELD, Mapping

KEPT_BYTES = 512 * 2**20
"""Bytes in blocks that are kept for the next tensor."""

KEPT_BLOCKS = 32
"""Blocks that are kept, and blocks that an engine has and that come back; each is a descriptor."""

IDLE_LIMIT = 10.0
"""Seconds after it was last taken for which a block is kept, or waited for while the engine has it."""

SLICE = 8 * 2**20
"""Bytes that are copied between two looks whether somebody still wants them."""


class SharedFile(Mapping):
    """A file whose descriptor can be passed to an engine; it is closed with the last view, or if this raises."""

    fd: int = -1

    def __init__(self, fd: int, size: int, *, private: bool) -> None:
        self.fd = fd
        super().__init__(fd, size, private=private)

    def __del__(self) -> None:
        self.close()
        super().__del__()

    def close(self) -> None:
        """Close the descriptor; the memory stays."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Block(SharedFile):
    """Shared memory of its own for an array of ``size`` bytes; nobody can truncate it under whoever reads it.

    :raises OSError: if the system refuses it
    """

    def __init__(self, size: int) -> None:
        # This object's at once, so that it is closed whatever comes next.
        self.fd: int = os.memfd_create("anyengine-tensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, HEADER + size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        super().__init__(self.fd, HEADER + size, private=False)
        self.capacity = size
        self.used_at: float = 0.0
        self._is_populated = False

    def write(self, data: memoryview, check: Callable[[], None]) -> None:
        """Copy ``data`` in; ``check`` is called now and then and may raise.

        :raises OSError: if there is no memory for it
        """
        for start in range(0, data.nbytes, SLICE):
            check()
            part = data[start : start + SLICE]
            if self._is_populated and not part.readonly:
                memory.copy(part, self.view(HEADER + start, part.nbytes))
                continue
            # Faster than a copy into memory that has to be faulted in page by page.
            written = 0
            while written < part.nbytes:
                written += os.pwrite(self.fd, part[written:], HEADER + start + written)

    def reuse(self) -> None:
        """It has been filled before, and is to be filled again."""
        self._is_populated = self._is_populated or self.populate()


class Lease:
    """A block while an array lies in it that has not been handed over; the pool has it back when nobody keeps it."""

    def __init__(self, block: Block, pool: BlockPool) -> None:
        memory.go_last(self)
        self.block = block
        self._pool = pool
        self._is_kept = True

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the block back, unless it has been handed over. What lies in it must not be read any more."""
        if self._is_kept:
            self._is_kept = False
            self._pool.take_back(self.block)

    def fill(self, data: memoryview, check: Callable[[], None]) -> memoryview:
        """Copy ``data`` in, and what it is there; ``check`` is called now and then and may raise.

        :raises OSError: if there is no memory for it; the block has been given back then, as whenever this raises
        """
        try:
            self.block.write(data, check)
        except BaseException:
            self.release()
            raise
        return self.block.view(HEADER, data.nbytes, owner=self)

    def lend(self, send: Callable[[int], bool]) -> bool:
        """Hand the block over, once, by ``send``, which is given its descriptor and says whether it went."""
        assert self._is_kept
        self.block.state = HELD
        self._is_kept = not send(self.block.fd)
        if self._is_kept:
            self.block.state = FREE
        else:
            self._pool.note_lent(self.block)
        return not self._is_kept


class BlockPool:
    """The blocks of one life of an engine; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Block] = []
        self._lent: list[Block] = []
        self._given_up: list[Block] = []
        # Without the lock: destructors call take_back.
        self._leased: set[Block] = set()
        self._returned: deque[Block] = deque()
        self._closed = False

    def take(self, size: int) -> Lease:
        """A block for ``size`` bytes, one that is there or a new one.

        :raises OSError: if the system refuses a new one
        """
        with self._lock:
            self._sort()
            fitting = [block for block in self._idle if size <= block.capacity <= 2 * size]
            block = min(fitting, key=lambda block: block.capacity, default=None)
            if block is not None:
                self._idle.remove(block)
        if block is None:
            block = Block(size)
        else:
            block.reuse()
        block.used_at = time.monotonic()
        self._leased.add(block)
        return Lease(block, self)

    def take_back(self, block: Block) -> None:
        """It was not handed over. Called by destructors, in any thread and at any time."""
        if self._closed:
            block.close()
        else:
            self._returned.append(block)
        self._leased.discard(block)

    def note_lent(self, block: Block) -> None:
        """The engine has it now. If it has many, this one is not kept: it goes when the engine lets go of it."""
        with self._lock:
            if not self._closed and len(self._lent) < KEPT_BLOCKS:
                self._lent.append(block)
            else:
                block.close()
        self._leased.discard(block)

    def trim(self) -> None:
        """Free what is not to be kept any longer. That takes a millisecond for 8 MiB: call it in a worker thread."""
        with self._lock:
            excess = self._excess()
            self._idle = [block for block in self._idle if block not in excess]
            given_up, self._given_up = self._given_up, []
        # Not under the lock, which the event loop may want meanwhile. What an exception keeps in its frames stays as
        # memory, but not as a descriptor.
        for block in (*excess, *given_up):
            block.close()

    @property
    def needs_trim(self) -> bool:
        """Whether :meth:`trim` would free something."""
        with self._lock:
            return bool(self._excess() or self._given_up)

    def _sort(self) -> None:
        """Find out which blocks are idle by now, and which ones the engine may never give back.

        Those are the ones that a process it forked may still read, and those that it could not take or has for long:
        a block that comes back so late would not be kept either.
        """
        while self._returned:
            self._idle.append(self._returned.popleft())
        oldest = time.monotonic() - IDLE_LIMIT
        lent, self._lent = self._lent, []
        for block in lent:
            state = block.state  # looked at once: the engine may let go of it at any time
            if state == FREE:
                self._idle.append(block)
            elif state == HELD and block.used_at >= oldest:
                self._lent.append(block)
            else:
                self._given_up.append(block)

    def _excess(self) -> set[Block]:
        """Idle blocks that are too old, or too many, those that were used last being kept."""
        self._sort()
        oldest = math.inf if self._closed else time.monotonic() - IDLE_LIMIT
        excess: set[Block] = set()
        count = total = 0
        for block in sorted(self._idle, key=lambda block: -block.used_at):
            count, total = count + 1, total + block.capacity
            if block.used_at < oldest or count > KEPT_BLOCKS or total > KEPT_BYTES:
                excess.add(block)
        return excess

    def close(self) -> None:
        """Keep no more blocks; those that are here go with :meth:`trim`."""
        with self._lock:
            self._closed = True
            self._idle += self._lent
            self._lent = []
            self._leased.clear()

    def forget(self) -> None:
        """In a process that was forked: have no part in the memory of the engines that are its parent's.

        What is in a lease stays mapped until that goes: somebody here may have it. Without the lock, which may be held
        by a thread that is not here.
        """
        self._closed = True
        for block in (*self._idle, *self._lent, *self._given_up, *self._leased, *self._returned):
            block.close()
        for kept in (self._idle, self._lent, self._given_up, self._returned):
            kept.clear()
