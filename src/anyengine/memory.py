"""Files without a name as memory: how tensors cross from one process to the other; both of them use it.

Through libc and not Python's ``mmap``, which keeps a descriptor open for each mapping: an engine may hold thousands of
tensors, and a process may have as few as 1,024 descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

HEADER = 4096
"""Bytes in front of the array in a block. The first of them is the state of the block, one of the three below."""

FREE = 0
HELD = 1
"""The engine has it, or will have it."""
LOST = 2
"""The engine has let go of it, but processes that it forked may read it, and nobody knows until when."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, <linux/mman.h>, since Linux 5.14; Python's mmap module does not name it
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_map: Callable[..., int] = _libc.mmap
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_unmap: Callable[[int, int], int] = _libc.munmap
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_advise: Callable[[int, int, int], int] = _libc.madvise
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_untrack: Callable[[object], None] = ctypes.pythonapi.PyObject_GC_UnTrack
ctypes.pythonapi.PyObject_GC_UnTrack.restype = None
ctypes.pythonapi.PyObject_GC_UnTrack.argtypes = (ctypes.py_object,)


def go_last(value: object) -> None:
    """Have ``value`` finalized only when nothing refers to it; nothing that it refers to may lead back to it.

    Otherwise the collector, when it finds a cycle, calls the finalizers of all that is in it or hangs on it alone, in
    any order: one would unmap, or give away, what the next one reads.
    """
    _untrack(value)


class Mapping:
    """The first ``size`` bytes of a file as memory that can be written to. It goes with the last view of it.

    :param private: what is written stays in this process, on copies of the pages that it touches
    :raises OSError: if the system refuses it
    """

    address: int = 0

    def __init__(self, fd: int, size: int, *, private: bool) -> None:
        go_last(self)
        self.size = size
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        address = _map(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), f"{size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
        self.address = address

    def __del__(self) -> None:
        if self.address:
            _unmap(self.address, self.size)

    def view(self, offset: int, size: int, owner: Any = None) -> memoryview:
        """``size`` bytes from ``offset`` on. The view keeps ``owner`` alive, or else this mapping."""
        array: Any = (ctypes.c_ubyte * size).from_address(self.address + offset)
        array.owner = self if owner is None else owner
        return memoryview(array).cast("B")

    @property
    def state(self) -> int:
        """Of a block: ``FREE``, ``HELD`` or ``LOST``."""
        return ctypes.c_ubyte.from_address(self.address).value

    @state.setter
    def state(self, state: int) -> None:
        ctypes.c_ubyte.from_address(self.address).value = state

    def populate(self) -> bool:
        """Have all pages at hand, which is much faster than one fault for each; whether the system can do that."""
        return _advise(self.address, self.size, _POPULATE_WRITE) == 0


def owner_of(view: memoryview) -> Any:
    """What a view that :meth:`Mapping.view` made keeps alive; None for most others."""
    return getattr(view.obj, "owner", None)


def offset_in(mapping: Mapping, view: memoryview) -> int:
    """Where a view of ``mapping`` begins."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) - mapping.address


def copy(source: memoryview, target: memoryview) -> None:
    """Copy ``source``, which must be writable, to the beginning of ``target``, without holding the GIL."""
    to, origin = (ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) for view in (target, source))
    ctypes.memmove(to, origin, source.nbytes)
