"""Paged attention whose bits depend on a row alone: not on who else is in the batch, nor on how a prompt was cut into steps.

The meaning is that of kernels/reference.py, which also writes the keys. Here each query row is computed by itself, over tiles
of keys that begin at fixed positions of its sequence and are always of the same size:

    o = sum_t exp(m_t - m) o_t / sum_t exp(m_t - m) l_t,   m = max_t m_t   (over key tiles t, in ascending order)

where tile t yields the largest score m_t, the sum l_t of exp(score - m_t), and o_t, the values weighted so. That is no split of
the keys by what the batch leaves room for: a tile that is not full is padded with keys of weight zero. It costs a gather of all
keys for each row, so prefill is as slow as decoding (for rows that share keys, the reference gathers them once).

Relies on two properties of torch, which engine/invariant.py proves on the machine at start: one matrix of a batched product has
the same bits in any batch, and so has `exp` of a number at any place of a tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels import reference

# Keys of a tile, or one block where that is more. Part of the result: another size rounds differently.
KEY_TILE = 128
# Most bytes of keys, or values, gathered at once.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Items:
    """Pairs of query row and key tile, ordered by tile, then by row."""

    rows: Tensor
    """`[n]` int64 into the query."""
    blocks: Tensor
    """`[n, blocks of a tile]` int64."""
    hidden: Tensor
    """`[n, keys of a tile]` bool: what the row does not see."""
    bounds: list[int]
    """Where the items of each tile begin, and the end."""


class Plan(reference.Plan):
    """As its twin in the reference: made once per step, shared by layers with the same window."""

    def __init__(
        self,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        slot_mapping: Tensor | None = None,
        host: reference.HostLengths | None = None,
    ) -> None:
        """Take what its twin takes."""
        super().__init__(block_tables, query_start, context_lens, slot_mapping, host)
        lens = query_start.diff().long()
        self._sequences = torch.arange(len(lens), device=lens.device).repeat_interleave(lens)
        row = torch.arange(len(self._sequences), device=lens.device)
        last = context_lens.long() - 1
        self.positions = (row + 1 - query_start[1:].long()[self._sequences]) + last[self._sequences]
        """Of each row; -1 where its sequence has no keys."""
        self.positions[last[self._sequences] < 0] = -1
        self._items: dict[int | None, _Items] = {}

    def items(self, block_size: int, window: int | None) -> _Items:
        """Return what a layer with this window computes."""
        if window not in self._items:
            self._items[window] = self._make_items(block_size, window)
        return self._items[window]

    def _make_items(self, block_size: int, window: int | None) -> _Items:
        size = max(KEY_TILE, block_size)
        positions, columns = self.positions, torch.arange(size // block_size, device=self.positions.device)
        first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
        rows, blocks, hidden = [], [], []
        for tile in range(int(positions.max()) // size + 1 if len(positions) else 0):
            member = ((positions >= tile * size) & (first < (tile + 1) * size)).nonzero().squeeze(1)
            column = (columns + tile * len(columns)).clamp(max=self._block_tables.shape[1] - 1)
            keys = torch.arange(tile * size, (tile + 1) * size, device=positions.device)
            rows.append(member)
            blocks.append(self._block_tables[self._sequences[member].unsqueeze(1), column])
            hidden.append((keys > positions[member].unsqueeze(1)) | (keys < first[member].unsqueeze(1)))
        if not rows:
            none = positions[:0]
            return _Items(none, none.view(0, len(columns)), none.view(0, size).bool(), [0])
        bounds = [0, *torch.tensor([len(part) for part in rows]).cumsum(0).tolist()]
        return _Items(torch.cat(rows), torch.cat(blocks), torch.cat(hidden), bounds)


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
    """As `reference.paged_attention`, computed in fp32; the bits of a row depend on its query, keys and values alone."""
    plan = plan or Plan(block_tables, query_start, context_lens)
    items = plan.items(kv_cache_layer.shape[2], sliding_window)
    num_kv_heads, head_dim = kv_cache_layer.shape[3:]
    grouped = query.float().view(len(query), num_kv_heads, -1, head_dim)
    most = torch.full(grouped.shape[:3], -torch.inf, device=query.device)
    if sinks is not None:
        most = sinks.float().view(num_kv_heads, -1).expand(most.shape).clone()
    sums, output = torch.zeros_like(most), torch.zeros_like(grouped)
    count = max(1, PIECE_BYTES // (items.hidden.shape[1] * num_kv_heads * head_dim * 4))
    parts = [
        _partial(grouped, kv_cache_layer, kv_scales, piece, scale=scale, softcap=softcap) for piece in _pieces(items, count)
    ]
    if not parts:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)
    maxima, weights, values = (torch.cat(column) for column in zip(*parts, strict=True))
    spans = [(slice(start, stop), items.rows[start:stop]) for start, stop in pairwise(items.bounds)]
    for span, rows in spans:
        most[rows] = torch.maximum(most[rows], maxima[span])
    factors = torch.exp(maxima - most[items.rows])
    for span, rows in spans:
        sums[rows] += factors[span] * weights[span]
        output[rows] += factors[span].unsqueeze(-1) * values[span]
    if sinks is not None:
        sums += torch.exp(sinks.float().view(num_kv_heads, -1) - most)
    output = output.div_(sums.unsqueeze(-1)).flatten(1, 2)
    return output.masked_fill_((plan.positions < 0).view(-1, 1, 1), 0).to(query.dtype)


def _pieces(items: _Items, count: int) -> Iterator[_Items]:
    """Consecutive items, `count` at most."""
    for start in range(0, len(items.rows), count):
        part = slice(start, start + count)
        yield _Items(items.rows[part], items.blocks[part], items.hidden[part], items.bounds)


def _partial(
    query: Tensor,
    kv_cache_layer: Tensor,
    kv_scales: Tensor | None,
    items: _Items,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`m`, `l` `[n, num_kv_heads, group]` and `o` `[n, num_kv_heads, group, D]` of each item.

    A tile that a row sees nothing of is never among the items, so every maximum is finite.
    """
    rows = query[items.rows]
    key, value = (
        reference.gather(kv_cache_layer, kv_scales, part, items.blocks.flatten(), query.dtype).view(
            *items.hidden.shape, *kv_cache_layer.shape[3:]
        )
        for part in (0, 1)
    )
    heads = range(query.shape[1])
    scores = torch.stack([torch.bmm(rows[:, head], key[:, :, head].transpose(1, 2)) for head in heads], 1).mul_(scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores.masked_fill_(items.hidden[:, None, None], -torch.inf)
    value.masked_fill_(items.hidden[:, :, None, None], 0)
    most = scores.amax(-1)
    weights = torch.exp(scores - most.unsqueeze(-1))
    return most, weights.sum(-1), torch.stack([torch.bmm(weights[:, head], value[:, :, head]) for head in heads], 1)
