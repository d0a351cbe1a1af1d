"""Paged attention in plain torch: the specification of every other implementation, and the oracle in their tests.

Here live the write of new keys and values into KV blocks and attention over block tables, on any device, without a compiler.
`Plan` holds what all layers of one step share (which rows read which blocks, the masks), so that a layer costs a gather and a
matrix product per group of rows. The caller guarantees that block tables name written blocks; requests, models and the
choice between implementations are left to others.

A layer of the KV cache is `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, keys at 0 and values at 1 of the second axis.
In int8 and float8_e4m3fn it has scales beside it, `[num_blocks, 2, block_size, num_kv_heads]` float32: what is cached is number
times scale.

1. What lies behind a sequence's last key is never read into the result, not even when it is NaN.
2. With a sliding window, no block that lies wholly before the first key seen by the first new token is read: its entry in the
   table may name any block.
3. All new tokens are written before any is attended to, so that a table may name blocks which another sequence of the same
   batch fills.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Most query rows of one tile: bounds the mask, and a tile of a long prompt reads only the keys before its end.
TILE_ROWS = 256
# Most bytes of keys and values gathered at once, so that they are still in the processor's cache when they are used, and how
# far sequences of a group may differ: a group costs about 0.1 ms, as much as some 500 padded positions.
# 64 sequences of 100 to 600 tokens (3 KV heads of 64, fp32; EPYC, 32 MB L3, two cores): 6.4 ms a layer, 13.2 ms in one group.
GROUP_BYTES = 6 << 20
PADDED_POSITIONS = 512


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive query rows of one sequence; the last of them sees the first `context` keys, the one before one less."""

    sequence: int
    first_row: int
    num_rows: int
    context: int

    def first_key(self, window: int | None) -> int:
        return 0 if window is None else max(0, self.context - self.num_rows - window + 1)


@dataclass(frozen=True, slots=True)
class _Group:
    """Tiles of equally many rows that are computed together, padded to the longest one's blocks."""

    num_tiles: int
    rows: Tensor
    """`[num_tiles * num_rows]` int64 into the query."""
    blocks: Tensor
    """`[num_tiles * num_blocks]` int64, the blocks to gather."""
    unfilled: Tensor
    """int64 into the gathered positions: those that hold no key of their sequence."""
    mask: Tensor
    """`[num_tiles, 1, num_rows, num_blocks * block_size]`, 0 where a row sees a key and -inf elsewhere."""


class HostLengths(NamedTuple):
    """`query_start` and `context_lens` on the host, so that making a plan never waits for a device."""

    query_start: np.ndarray
    """`[num_sequences + 1]`."""
    context_lens: np.ndarray
    """`[num_sequences]`."""

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def max_query_len(self) -> int:
        """Most new tokens of a sequence."""
        return int(np.diff(self.query_start).max(initial=0))

    @property
    def max_context_len(self) -> int:
        return int(self.context_lens.max(initial=0))

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return self.num_sequences == int(self.query_start[-1]) and self.max_query_len <= 1


class Plan:
    """The part of attention that depends on the step but not on the layer; layers with the same window share it."""

    def __init__(
        self,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        slot_mapping: Tensor | None = None,
        host: HostLengths | None = None,
    ) -> None:
        """Take the arguments of `paged_attention` and `write_kv` of the same names.

        `slot_mapping` is needed for `write_kv` alone; `host` holds the numbers of `query_start` and `context_lens`.
        """
        self._slot_mapping = slot_mapping
        self._block_tables = block_tables.long()
        starts, contexts = (query_start, context_lens) if host is None else host
        self._tiles = list(_tiles(starts.tolist(), contexts.tolist()))
        self._slots: tuple[Tensor | None, Tensor, Tensor] | None = None
        self._groups: dict[int | None, list[_Group]] = {}

    def slots(self, block_size: int) -> tuple[Tensor | None, Tensor, Tensor]:
        """Which tokens are written, None for all of them; their blocks and their offsets therein."""
        if self._slots is None:
            assert self._slot_mapping is not None
            self._slots = _slots(self._slot_mapping, block_size)
        return self._slots

    def groups(self, kv_cache_layer: Tensor, window: int | None, dtype: torch.dtype) -> list[_Group]:
        """Return the groups of a layer with this window, computed in `dtype`; every row of a sequence with keys is in one."""
        if window not in self._groups:
            tiles = sorted(self._tiles, key=lambda tile: (tile.num_rows, tile.context))
            block_size, token_bytes = kv_cache_layer.shape[2], 2 * kv_cache_layer[0, 0, 0].numel() * dtype.itemsize
            parts = _partition(tiles, block_size, GROUP_BYTES // token_bytes, window)
            self._groups[window] = [_group(part, self._block_tables, block_size, window, dtype) for part in parts]
        return self._groups[window]


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache_layer: Tensor,
    slot_mapping: Tensor,
    plan: Plan | None = None,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """Store the keys and values of new tokens at their slots, rounded to the cache's dtype.

    Args:
        key: `[num_tokens, num_kv_heads, head_dim]`.
        value: as `key`.
        kv_cache_layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, changed in place.
        slot_mapping: `[num_tokens]` int64, `block_id * block_size + offset`; a token with -1 is not written.
        plan: `Plan` of the same slot mapping, made once for all layers.
        kv_scales: `[num_blocks, 2, block_size, num_kv_heads]` float32, changed in place, for a cache of one byte an
            element: `quantise`.
    """
    block_size = kv_cache_layer.shape[2]
    kept, blocks, offsets = plan.slots(block_size) if plan else _slots(slot_mapping, block_size)
    if kept is not None:
        key, value = key[kept], value[kept]
    for part, new in enumerate((key, value)):
        numbers = new
        if kv_scales is not None:
            numbers, scales = quantise(new, kv_cache_layer.dtype)
            kv_scales[:, part].index_put_((blocks, offsets), scales)
        kv_cache_layer[:, part].index_put_((blocks, offsets), numbers.to(kv_cache_layer.dtype))


def quantise(vectors: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Round each vector `[..., D]` to int8 or float8_e4m3fn, with a scale of its own `[...]` float32.

    The scale makes its largest number the dtype's largest, 127 or 448. A vector with a number that is not finite gets a scale
    that is not finite, and so comes back as no number either.
    """
    vectors = vectors.float()
    scales = vectors.abs().amax(-1) / (torch.iinfo if dtype == torch.int8 else torch.finfo)(dtype).max
    divisors = scales.clamp(min=torch.finfo(scales.dtype).tiny).unsqueeze(-1)  # a vector of zeros stays one
    numbers = vectors / divisors
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scales


def paged_attention(
    query: Tensor,
    kv_cache_layer: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    plan: Plan | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens over its blocks: `softmax(cap(scale * q k^T) + mask) v`.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, sequence after sequence; heads are grouped over the KV heads.
        kv_cache_layer: as for `write_kv`, the new tokens' keys and values already written.
        block_tables: `[num_sequences, max_blocks]` integers, padded with any block id.
        query_start: `[num_sequences + 1]` integers, where each sequence's rows begin.
        context_lens: `[num_sequences]` integers, keys of each sequence with the new ones; rows of a sequence with 0 become 0.
        scale: factor on the scores.
        sliding_window: a key is seen while `query position - key position < sliding_window`.
        softcap: scores become `softcap * tanh(scores / softcap)`, as in Gemma 2.
        sinks: `[num_heads]`, one more logit in each head's softmax whose value is zero, as in gpt-oss.
        plan: `Plan` of the same tensors, made once for all layers.
        kv_scales: as for `write_kv`.

    Returns:
        `[num_tokens, num_heads, head_dim]`, contiguous.
    """
    plan = plan or Plan(block_tables, query_start, context_lens)
    output = query.new_zeros(query.shape)
    for group in plan.groups(kv_cache_layer, sliding_window, query.dtype):
        rows = query[group.rows].view(group.num_tiles, -1, *query.shape[1:]).transpose(1, 2)
        key, value = (_gather(kv_cache_layer, kv_scales, part, group, query.dtype) for part in (0, 1))
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(rows, key, value, group.mask, scale=scale, enable_gqa=True)
        else:
            attended = _attend(rows, key, value, mask=group.mask, scale=scale, softcap=softcap, sinks=sinks)
        output[group.rows] = attended.transpose(1, 2).flatten(0, 1)
    return output


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention in fp32, step by step: query `[n, num_heads, rows, D]`, key and value `[n, num_kv_heads, keys, D]`."""
    num_tiles, num_heads, num_rows, head_dim = query.shape
    num_kv_heads, num_keys = key.shape[1:3]
    grouped = query.float().reshape(num_tiles, num_kv_heads, -1, num_rows, head_dim)
    scores = torch.einsum("nkgrd,nktd->nkgrt", grouped, key.float()).flatten(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        sink = sinks.float().view(1, num_heads, 1, 1).expand(num_tiles, -1, num_rows, -1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys].reshape(num_tiles, num_kv_heads, -1, num_rows, num_keys)
    return torch.einsum("nkgrt,nktd->nkgrd", weights, value.float()).flatten(1, 2).to(query.dtype)


def _gather(kv_cache_layer: Tensor, kv_scales: Tensor | None, part: int, group: _Group, dtype: torch.dtype) -> Tensor:
    """Copy the keys (0) or values (1) of a group's blocks out as `[n, num_kv_heads, keys, D]` in `dtype`, tails zeroed."""
    gathered = gather(kv_cache_layer, kv_scales, part, group.blocks, dtype).index_fill_(0, group.unfilled, 0)
    return gathered.view(group.num_tiles, -1, *gathered.shape[1:]).transpose(1, 2)


def gather(kv_cache_layer: Tensor, kv_scales: Tensor | None, part: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy the keys (0) or values (1) of `blocks` `[n]` int64 out as `[n * block_size, num_kv_heads, D]` in `dtype`."""
    gathered = kv_cache_layer[:, part].index_select(0, blocks)
    if kv_scales is not None:
        gathered = gathered.float().mul_(kv_scales[:, part].index_select(0, blocks).unsqueeze(-1))
    return gathered.flatten(0, 1).to(dtype)


def _slots(slot_mapping: Tensor, block_size: int) -> tuple[Tensor | None, Tensor, Tensor]:
    written = slot_mapping >= 0
    kept = None if bool(written.all()) else written
    slots = slot_mapping if kept is None else slot_mapping[kept]
    return kept, slots // block_size, slots % block_size


def _tiles(query_start: Sequence[int], context_lens: Sequence[int]) -> Iterator[_Tile]:
    for sequence, ((start, end), context) in enumerate(zip(pairwise(query_start), context_lens, strict=True)):
        for row in range(start, end if context else start, TILE_ROWS):
            num_rows = min(TILE_ROWS, end - row)
            yield _Tile(sequence, row, num_rows, context - (end - row - num_rows))


def _partition(tiles: list[_Tile], block_size: int, limit: int, window: int | None) -> list[list[_Tile]]:
    """Cut the sorted tiles into runs of equally many rows, of at most `limit` positions and within the limit on padding."""
    parts: list[list[_Tile]] = []
    longest = total = 0
    for tile in tiles:
        span = -(-tile.context // block_size) * block_size - tile.first_key(window) // block_size * block_size
        if parts and parts[-1][0].num_rows == tile.num_rows:
            padded = (len(parts[-1]) + 1) * max(longest, span)
            if padded <= limit and padded - total - span <= PADDED_POSITIONS + padded // 4:
                parts[-1].append(tile)
                longest, total = max(longest, span), total + span
                continue
        parts.append([tile])
        longest = total = span
    return parts


def _group(tiles: list[_Tile], block_tables: Tensor, block_size: int, window: int | None, dtype: torch.dtype) -> _Group:
    """Work out indices and mask. A tile's gathered keys begin with the block of the first key that one of its rows sees."""
    device, num_rows = block_tables.device, tiles[0].num_rows
    numbers = [(t.sequence, t.first_row, t.context, t.first_key(window) // block_size) for t in tiles]
    sequences, first_rows, contexts, first_blocks = torch.tensor(numbers, device=device).T.unsqueeze(-1)
    num_blocks = max(-(-tile.context // block_size) - number[3] for tile, number in zip(tiles, numbers, strict=True))
    columns = (first_blocks + torch.arange(num_blocks, device=device)).clamp(max=block_tables.shape[1] - 1)
    keys = first_blocks * block_size + torch.arange(num_blocks * block_size, device=device)
    rows = torch.arange(num_rows, device=device)
    distance = (contexts - num_rows + rows).unsqueeze(-1) - keys.unsqueeze(1)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
    return _Group(
        num_tiles=len(tiles),
        rows=(first_rows + rows).flatten(),
        blocks=block_tables[sequences, columns].flatten(),
        unfilled=(keys >= contexts).flatten().nonzero().squeeze(1),
        mask=mask.unsqueeze(1),
    )
