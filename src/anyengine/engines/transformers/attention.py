"""Attention over the paged KV cache, as an implementation that transformers' models call.

A step runs the tokens of all its requests as one sequence. Requests with one token (nearly all, while they generate)
are computed together: their blocks are gathered through tables padded to the longest, and requests of very different
lengths go into different groups, so that at most half of what is gathered is padding. Pieces of prompts are computed
one request after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from anyengine.engines.transformers.kv_cache import KVCache
from anyengine.engines.transformers.scheduler import Chunk

IMPLEMENTATION = "anyengine_paged"
"""The name under which :func:`forward` is registered with transformers."""


class NotGivenError(Exception):
    """A layer called its attention without handing on what the model was given as ``paged=``."""


class Attention(Protocol):
    """What computes attention in a forward pass: given to the model as ``paged=``, which hands it to every layer."""

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """From ``[1, head, token, dimension]`` to ``[token, head, dimension]``."""
        ...


def forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: Attention | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that each attention layer calls; the result is ``[1, token, head, dimension]`` and no weights.

    :raises NotGivenError: if the layer does not hand on ``paged``
    """
    if paged is None:
        raise NotGivenError
    return paged.attend(module, query, key, value, attention_mask, options).unsqueeze(0), None


@dataclasses.dataclass(frozen=True, slots=True)
class _Decodes:
    """The rows ``start`` to ``stop`` of the step, one token each of requests of similar length."""

    start: int
    stop: int
    table: torch.Tensor
    mask: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """The rows ``start`` to ``stop`` of the step: consecutive tokens of one request. No table: nothing came before."""

    start: int
    stop: int
    table: torch.Tensor | None
    mask: torch.Tensor | None


class PagedAttention:
    """Attention for one step. ``chunks`` are the step's chunks in the order of its rows: those of one token first."""

    def __init__(self, chunks: Sequence[Chunk], cache: KVCache) -> None:
        single = [chunk for chunk in chunks if chunk.stop - chunk.start == 1]
        single.sort(key=lambda chunk: chunk.stop, reverse=True)
        longer = [chunk for chunk in chunks if chunk.stop - chunk.start > 1]
        self.chunks: list[Chunk] = single + longer
        self._cache = cache
        size = cache.block_size
        slots = [
            chunk.request.blocks[position // size] * size + position % size
            for chunk in self.chunks
            for position in range(chunk.start, chunk.stop)
        ]
        self._slots = torch.tensor(slots, device=cache.device)
        self._decodes = list(_group(single, cache))
        self._pieces: list[_Piece] = []
        row = len(single)
        for chunk in longer:
            self._pieces.append(_piece(chunk, row, cache))
            row += chunk.stop - chunk.start

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store the step's keys and values, then attend to all that each request has; see :class:`Attention`."""
        layer: int = module.layer_idx
        scale: float | None = options.get("scaling")
        self._cache.write(layer, self._slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        kv_heads, sharing = key.shape[1], query.shape[1] // key.shape[1]
        result = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for group in self._decodes:
            keys, values = self._cache.read(layer, group.table)
            # The query heads that share a head of keys become that head's rows: no key is repeated, in any kernel.
            rows = query[0, :, group.start : group.stop].transpose(0, 1).reshape(-1, kv_heads, sharing, query.shape[3])
            found = scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask, scale=scale)
            result[group.start : group.stop] = found.flatten(1, 2)
        for piece in self._pieces:
            if piece.table is None:
                keys, values = key[:, :, piece.start : piece.stop], value[:, :, piece.start : piece.stop]
            else:
                keys, values = self._cache.read(layer, piece.table)
            # Here they become a batch over which the keys are expanded, not copied.
            rows = query[0, :, piece.start : piece.stop].reshape(kv_heads, sharing, -1, query.shape[3]).transpose(0, 1)
            found = scaled_dot_product_attention(
                rows,
                keys.expand(sharing, -1, -1, -1),
                values.expand(sharing, -1, -1, -1),
                attn_mask=piece.mask,
                is_causal=piece.mask is None,
                scale=scale,
            )
            result[piece.start : piece.stop] = found.permute(2, 1, 0, 3).flatten(1, 2)
        return result


def _group(chunks: Sequence[Chunk], cache: KVCache) -> Sequence[_Decodes]:
    """Cut requests, longest first, where a table would be more than half padding."""
    groups: list[_Decodes] = []
    start = 0
    while start < len(chunks):
        width = len(chunks[start].request.blocks)
        stop = start
        while stop < len(chunks) and 2 * len(chunks[stop].request.blocks) >= width:
            stop += 1
        members = chunks[start:stop]
        tables = [chunk.request.blocks + [0] * (width - len(chunk.request.blocks)) for chunk in members]
        lengths = torch.tensor([chunk.stop for chunk in members], device=cache.device)
        hidden = torch.arange(width * cache.block_size, device=cache.device) >= lengths[:, None]
        groups.append(
            _Decodes(start, stop, torch.tensor(tables, device=cache.device), _additive(hidden, cache)[:, None, None])
        )
        start = stop
    return groups


def _piece(chunk: Chunk, row: int, cache: KVCache) -> _Piece:
    end = row + chunk.stop - chunk.start
    if chunk.start == 0:
        return _Piece(row, end, None, None)
    table = torch.tensor([chunk.request.blocks], device=cache.device)
    positions = torch.arange(chunk.start, chunk.stop, device=cache.device)
    hidden = torch.arange(table.shape[1] * cache.block_size, device=cache.device) > positions[:, None]
    return _Piece(row, end, table, _additive(hidden, cache))


def _additive(hidden: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Minus infinity where ``hidden``: made once a step, where a boolean mask would be converted in every layer."""
    return torch.zeros(hidden.shape, dtype=cache.dtype, device=cache.device).masked_fill_(hidden, float("-inf"))
