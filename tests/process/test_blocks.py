"""The pool of blocks: no block is anywhere twice, whatever happens at the same time, and nothing is kept for long."""

from __future__ import annotations

import functools
import gc
import os
import random
import threading
from typing import Any

import pytest

from anyengine import memory
from anyengine.memory import FREE, HEADER, HELD, LOST, Mapping
from anyengine.process import blocks
from anyengine.process.blocks import Block, BlockPool, Lease

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def no_check() -> None:
    pass


def state(pool: BlockPool) -> tuple[int, int, int]:
    """Blocks that are idle, lent, and out with a lease."""
    with pool._lock:
        pool._sort()
        return len(pool._idle), len(pool._lent), len(pool._leased)


def fill(pool: BlockPool, data: bytes) -> tuple[Lease, memoryview]:
    lease = pool.take(len(data))
    return lease, lease.fill(memoryview(data), no_check)


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("size", [1, 4095, 4096, 100_000, blocks.SLICE, 2 * blocks.SLICE + 5])
def test_what_is_filled_in_is_there_in_a_fresh_block_and_in_a_used_one(size: int, writable: bool) -> None:
    pool = BlockPool()
    for _ in range(3):
        data = os.urandom(size)
        lease = pool.take(size)
        view = lease.fill(memoryview(bytearray(data) if writable else data), no_check)
        assert view == data
        assert os.pread(lease.block.fd, size, HEADER) == data
        del lease, view
    assert state(pool) == (1, 0, 0)


def test_a_block_comes_back_when_it_is_dropped_or_the_engine_lets_go_of_it() -> None:
    pool = BlockPool()
    dropped, _ = fill(pool, b"dropped")
    lent, view = fill(pool, b"lent")
    block = lent.block
    refused = pool.take(5)
    assert lent.lend(lambda fd: fd == block.fd)
    assert not refused.lend(lambda fd: False)
    assert state(pool) == (0, 1, 2)
    del dropped, lent, refused, _
    assert state(pool) == (2, 1, 0)
    assert pool.take(4).block is not block
    block.state = FREE
    assert state(pool) == (3, 0, 0)
    assert bytes(view) == b"lent"  # a view keeps its memory, whoever has the block


def test_a_lease_in_a_cycle_gives_back_a_block_that_can_be_used() -> None:
    """The collector finalizes all of a cycle, and what hangs on it alone."""
    pool = BlockPool()
    for number in range(20):
        lease, view = fill(pool, bytes([number]) * 100_000)
        cycle: list[Any] = [lease, view]
        cycle.append(cycle)
        del lease, view, cycle
        gc.collect()
        assert state(pool) == (1, 0, 0)


def test_memory_outlives_the_finalizers_of_a_cycle_that_it_is_in() -> None:
    seen: list[Any] = []

    class Reader:
        def __del__(self) -> None:
            seen.append(self.look())

    for _ in range(20):
        block, pool = Block(1000), BlockPool()
        lease, view = fill(pool, b"x" * 1000)
        for keeps, look in (
            (block.view(HEADER, 1000), lambda owner: owner.fd >= 0),
            (view, lambda lease: lease.block in lease._pool._leased),
        ):
            reader: Any = Reader()
            reader.cycle = [reader, keeps]
            reader.look = functools.partial(look, memory.owner_of(keeps))
        del block, pool, lease, view, keeps, look, reader
        gc.collect()
    assert seen == [True] * 40


def test_no_block_is_given_out_twice_while_the_engine_lets_go_of_blocks() -> None:
    pool = BlockPool()
    held: list[Block] = []
    more = threading.Event()
    done = threading.Event()
    chance = random.Random(1)

    def engine() -> None:
        while not done.is_set():
            if held:
                held.pop(0).state = FREE
            else:
                more.wait(0.001)

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        for _ in range(5000):
            leases = [pool.take(100) for _ in range(chance.randrange(1, 5))]
            own = [lease.block for lease in leases]
            assert len(set(own)) == len(own)
            assert not set(own) & set(held)
            for lease in leases:
                if chance.random() < 0.7:
                    lease.lend(lambda fd: True)
                    held.append(lease.block)
            del leases, lease
    finally:
        done.set()
        thread.join()
    for block in held:
        block.state = FREE
    idle, lent, leased = state(pool)
    assert (lent, leased) == (0, 0)
    assert len(set(pool._idle)) == idle


def test_a_block_that_is_let_go_of_while_it_is_looked_at_is_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool()
    assert pool.take(100).lend(lambda fd: True)
    looks = iter([HELD, FREE, FREE, FREE])
    monkeypatch.setattr(Block, "state", property(lambda block: next(looks)))
    assert sum(state(pool)) == 1
    assert state(pool) == (1, 0, 0)


def test_only_so_many_blocks_are_kept_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool()
    leases = [pool.take(1000) for _ in range(blocks.KEPT_BLOCKS + 5)]
    for lease in leases[: blocks.KEPT_BLOCKS + 2]:
        assert lease.lend(lambda fd: True)
    assert state(pool) == (0, blocks.KEPT_BLOCKS, 3)
    assert leases[blocks.KEPT_BLOCKS].block.fd == -1  # it is the engine's alone
    for lease in leases:
        lease.block.state = FREE
    leases.clear()
    del lease
    assert state(pool) == (blocks.KEPT_BLOCKS + 3, 0, 0)
    assert pool.needs_trim
    pool.trim()
    assert state(pool) == (blocks.KEPT_BLOCKS, 0, 0)
    monkeypatch.setattr(blocks, "KEPT_BYTES", 3000)
    pool.trim()
    assert state(pool) == (3, 0, 0)
    assert not pool.needs_trim
    monkeypatch.setattr(blocks, "IDLE_LIMIT", 0.0)
    assert pool.needs_trim
    pool.trim()
    assert state(pool) == (0, 0, 0)


def test_blocks_that_may_never_come_back_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool()
    for number in range(2 * blocks.KEPT_BLOCKS - 1):
        lease, view = fill(pool, b"lent")
        assert lease.lend(lambda fd: True)
        lease.block.state = LOST if number % 2 else HELD
        del lease, view
        assert state(pool) == (0, number // 2 + 1, 0)
        assert pool.needs_trim == (number % 2 == 1)
        pool.trim()
    assert not pool.needs_trim
    monkeypatch.setattr(blocks, "IDLE_LIMIT", 0.0)
    assert pool.needs_trim
    pool.trim()
    assert state(pool) == (0, 0, 0)
    monkeypatch.undo()
    lease = pool.take(10)
    block = lease.block
    assert lease.lend(lambda fd: True)
    block.state = FREE
    assert pool.take(10).block is block


def test_a_small_array_takes_no_large_block() -> None:
    pool = BlockPool()
    large = pool.take(10_000).block
    assert pool.take(4_000).block is not large
    assert pool.take(10_001).block is not large
    assert pool.take(6_000).block is large


def test_a_closed_pool_keeps_nothing() -> None:
    pool = BlockPool()
    dropped, lent, late = (pool.take(10) for _ in range(3))
    lent.lend(lambda fd: True)
    pool.close()
    late.lend(lambda fd: True)
    del dropped, lent, late
    pool.trim()
    assert state(pool) == (0, 0, 0)


def test_nobody_can_truncate_a_block_under_whoever_reads_it() -> None:
    block = Block(10_000)
    for size in (0, 20_000):
        with pytest.raises(PermissionError):
            os.ftruncate(block.fd, size)


def test_what_the_system_refuses_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="cannot be mapped"):
        Mapping(0, 2**60, private=True)
    with pytest.raises(OSError, match=r"File too large|cannot be mapped|Invalid argument"):
        Block(2**62)


def test_a_lease_that_is_released_gives_its_block_back_once_whoever_keeps_it() -> None:
    pool = BlockPool()
    released, view = fill(pool, b"released")
    released.release()
    assert state(pool) == (1, 0, 0)
    again, _ = fill(pool, b"again...")
    assert again.block is released.block
    released.release()
    lent, _ = fill(pool, b"lent")
    assert lent.lend(lambda fd: True)
    lent.release()
    assert state(pool) == (0, 1, 1)
    again.release()
    pool.close()
    pool.trim()
    assert [lease.block.fd for lease in (released, lent)] == [-1, -1]
    assert view.nbytes == 8  # memory stays while there is a view of it


def test_a_lease_that_cannot_be_filled_gives_its_block_back() -> None:
    def refuse() -> None:
        raise InterruptedError

    pool = BlockPool()
    lease = pool.take(5)
    with pytest.raises(InterruptedError):
        lease.fill(memoryview(b"never"), refuse)
    assert state(pool) == (1, 0, 0)
