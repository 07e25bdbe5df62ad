"""The file behind a torch tensor that is in shared memory already, so that nothing of it has to be copied."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

from anyengine.process.blocks import SharedFile
from anyengine.protocol.arrays import is_loaded

_PREFIX = "/dev/shm/torch_"  # noqa: S108 - where torch makes them; nothing is made here
_DELETED = " (deleted)"


class _Region(NamedTuple):
    start: int
    offset: int
    inode: int
    path: str


def open_shared_storage(tensor: Any) -> memoryview | None:
    """The bytes of a tensor whose storage torch has put into shared memory, as a view of that file.

    None for any other tensor or array, and where its elements do not lie side by side. The file is opened for reading
    alone: the engine cannot change it, and whoever has the tensor still can.
    """
    if not is_loaded("torch"):
        return None
    torch: Any = sys.modules["torch"]
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    if not tensor.is_shared() or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    region = _region_of(tensor.data_ptr())
    if region is None:
        return None
    fd = _open(tensor, region)
    if fd is None:
        return None
    offset = region.offset + tensor.data_ptr() - region.start
    file = SharedFile(fd, offset + tensor.nbytes, private=True)
    return file.view(offset, tensor.nbytes)


def _region_of(address: int) -> _Region | None:
    """The shared mapping of one of torch's files that holds ``address``."""
    with open("/proc/self/maps", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as maps:
        for line in maps:
            start, _, rest = line.partition("-")
            end = rest.partition(" ")[0]
            if int(start, 16) <= address < int(end, 16):
                _, permissions, offset, _, inode, path = (*line.rstrip("\n").split(maxsplit=5), "")[:6]
                if permissions[3] == "s" and path.startswith(_PREFIX):
                    return _Region(int(start, 16), int(offset, 16), int(inode), path)
                return None
    return None


def _open(tensor: Any, region: _Region) -> int | None:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    if region.path.endswith(_DELETED):
        # It has no name any more, and torch has it open. Asked for the descriptor of any other kind of storage, torch
        # would move that into a file first.
        path = f"/proc/self/fd/{tensor.untyped_storage()._share_fd_cpu_()[0]}"
        flags &= ~os.O_NOFOLLOW
    else:
        path = region.path
    fd = os.open(path, flags)
    if os.fstat(fd).st_ino != region.inode:
        os.close(fd)
        return None
    return fd
