"""The paged KV cache: keys and values of all running requests, in blocks of a few tokens.

Which request a block belongs to is known to the scheduler alone, in its block tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token takes in the cache: the same in every layer. Dimensions count elements of ``dtype``."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes for the keys and values of one token in all layers."""
        return self.num_layers * self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def default_bytes(self, device: torch.device) -> int:
        """What the cache may take: 1 GiB on the CPU, and nine tenths of what is free on CUDA, work space included."""
        if device.type != "cuda":
            return 2**30
        # Beside the cache, attention holds what it gathers of one layer, and up to half of that is padding.
        return int(0.9 * torch.cuda.mem_get_info(device)[0] / (1 + 2 / self.num_layers))


class KVCache:
    """Keys and values as ``[layer, block, token in block, head, dimension]``, for blocks 1 to ``num_blocks``.

    Block 0 belongs to nobody and stays zero: it fills up the shorter rows of a padded table. What lies behind a
    request's last token is masked, but must still be finite, since a weight of zero times NaN is NaN; so a block is
    cleared when it gets an owner, and what one request wrote can never reach another.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._shape = (layout.num_layers, num_blocks + 1, block_size, layout.num_heads)
        self._dims = (layout.key_dim, layout.value_dim)
        self.block_size = block_size
        self.device = device
        self.dtype: torch.dtype = layout.dtype
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.allocate()

    def allocate(self) -> None:
        """Take the memory, for a cache in which no block is in use.

        :raises RuntimeError: if the device has not enough; then nothing was taken
        """
        keys, values = (torch.empty((*self._shape, dim), dtype=self.dtype, device=self.device) for dim in self._dims)
        self.keys, self.values = keys, values
        self.clear([0])

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory to write into."""
        return self.keys.numel() > 0

    def release(self) -> None:
        """Give the memory back, and with it all that the blocks hold."""
        self.keys = self.values = torch.empty(0, dtype=self.dtype, device=self.device)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks."""
        if blocks:
            index = torch.tensor(blocks, device=self.device)
            self.keys.index_fill_(1, index, 0)
            self.values.index_fill_(1, index, 0)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store ``[token, head, dimension]`` in the ``slots`` of a layer; a slot is block * block_size + offset."""
        self.keys[layer].view(-1, *keys.shape[1:]).index_copy_(0, slots, keys)
        self.values[layer].view(-1, *values.shape[1:]).index_copy_(0, slots, values)

    def read(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of padded block tables ``[request, block]``, as ``[request, head, token, dimension]``."""
        index = table.view(-1)

        def gather(cache: torch.Tensor) -> torch.Tensor:
            return cache[layer].index_select(0, index).view(len(table), -1, *cache.shape[3:]).transpose(1, 2)

        return gather(self.keys), gather(self.values)
