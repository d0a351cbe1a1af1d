"""Which program of paged attention does what in a step: worked out on the device, once for all layers with the same window.

Relies on lengths that lie on the device; nothing is read back, so that a graph captures it and replays it with other lengths.
Two kinds of programs share a batch. A *decode* owns all rows of a sequence with so few that they fill one small tile, and
either all its keys or one split of them; a *prefill* owns a tile of many rows and all their keys. A list of work has a row for
each program, `(sequence, index, count)`, or -1 for a program that has nothing to do:

    decodes    [ splits of sequences with several )[ sequences with one split )[ -1 ... )   split `index` of `count`
    prefills   [ tiles of sequence 3 )[ tiles of sequence 7 )[ -1 ... )                      tile `count - 1 - index`

A split takes the same number of key tiles in every sequence: as many as share the keys of all of them out over `target`
programs for each KV head, so that one long sequence among many is split as well. What programs compute is left to attention.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.specialisation import Specialisation

# Programs of a decode that a multiprocessor holds at once: as many as share its memory at head size 128. Untuned.
PROGRAMS_PER_MULTIPROCESSOR = 3
# Fewest key tiles of a split: what a combination costs must be little beside them. Untuned.
MIN_SPLIT_TILES = 4
# Stands for a GPU under the interpreter.
INTERPRETED_MULTIPROCESSORS = 8
# Programs' rows that one program of the schedule writes, and sequences that it looks at together.
_ITEMS, _SEQUENCES = 16, 256
_OPTIONS = {"num_warps": 8}


class Tiling(NamedTuple):
    """What a program of attention owns, and how it is compiled."""

    rows: int
    """Query tokens x heads of a KV group."""
    tokens: int
    """Query tokens among them."""
    keys: int
    """Keys that are read together."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of a thread; None: as many as the compiler likes."""


class Work(NamedTuple):
    """A list of work, and the scratch of its splits."""

    tiling: Tiling
    items: Tensor
    """`[n, 3]` int32, see above."""
    split_tiles: Tensor
    """`[1]` int32, key tiles of a split."""
    num_split: int
    """Most items that belong to sequences with several splits; 0 for prefills."""
    partial: Tensor
    """`[num_split, num_kv_heads, rows, head_dim]` float32, weighted sums of values."""
    stats: Tensor
    """`[num_split, num_kv_heads, rows, 2]` float32: largest score in base 2, sum of weights."""


class Plan:
    """The part of attention that depends on the step but not on the layer; as its twin in the reference, without host reads."""

    def __init__(
        self,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        slot_mapping: Tensor | None = None,  # noqa: ARG002 - the twin's
        *,
        query_lens: Sequence[int] | np.ndarray | None = None,
        is_invariant: bool = False,
    ) -> None:
        """Take the arguments of `paged_attention` of the same names.

        Args:
            block_tables: `[num_sequences, max_blocks]` int32; so are the other two.
            query_start: `[num_sequences + 1]`.
            context_lens: `[num_sequences]`.
            slot_mapping: not needed; `write_kv` takes it.
            query_lens: `[num_sequences]`, rows of each sequence as the host knows them. They decide which launches there
                are, and in a graph must hold for every replay. None: both kinds, with as many programs as may be needed.
            is_invariant: every row by the same tiles, none split, so that its bits do not depend on the batch; slower.
        """
        self._query_start, self._context_lens = query_start, context_lens
        self._query_lens = None if query_lens is None else np.asarray(query_lens)
        self._is_invariant = is_invariant
        self._num_sequences = len(block_tables)
        self._works: dict[int | None, list[Work]] = {}

    def works(self, query: Tensor, kv_cache_layer: Tensor, window: int | None, decode: Tiling, prefill: Tiling) -> list[Work]:
        """Return the launches of a layer with this window; all layers have heads of the same number and size."""
        if window not in self._works:
            short = 0 if self._is_invariant else decode.tokens
            prefill = decode if self._is_invariant else prefill
            num_kv_heads, head_dim = kv_cache_layer.shape[3:]
            works = []
            if self._has_decodes(short):
                target = max(1, _multiprocessors(query.device) * PROGRAMS_PER_MULTIPROCESSOR // num_kv_heads)
                works.append(self._work(decode, self._num_sequences + target, target, short, window, num_kv_heads, head_dim))
            num_tiles = self._num_prefill_tiles(len(query), short, prefill.tokens)
            if num_tiles:
                works.append(self._work(prefill, num_tiles, 0, short, window, num_kv_heads, head_dim))
            self._works[window] = works
        return self._works[window]

    def _has_decodes(self, short: int) -> bool:
        lens = self._query_lens
        return short > 0 and self._num_sequences > 0 and (lens is None or bool(((lens > 0) & (lens <= short)).any()))

    def _num_prefill_tiles(self, num_rows: int, short: int, tokens: int) -> int:
        """Tiles of sequences of more than `short` rows, or the most there can be."""
        if self._query_lens is not None:
            return int((-(-self._query_lens[self._query_lens > short] // tokens)).sum())
        return num_rows // tokens + min(self._num_sequences, num_rows // (short + 1))

    def _work(
        self, tiling: Tiling, num_items: int, target: int, short: int, window: int | None, num_kv_heads: int, head_dim: int
    ) -> Work:
        device = self._query_start.device
        num_split = min(2 * target, num_items)  # of sequences with two splits or more, target programs' keys fill half at least
        scratch = (num_split, num_kv_heads, tiling.rows)
        items = torch.empty(num_items, 3, dtype=torch.int32, device=device)
        split_tiles = torch.empty(1, dtype=torch.int32, device=device)
        schedule_kernel[(triton.cdiv(num_items, _ITEMS),)](
            items,
            split_tiles,
            self._query_start,
            self._context_lens,
            self._num_sequences,
            num_items,
            target,
            short,
            MIN_SPLIT_TILES,
            window,
            **_constexprs(tiling, is_decode=target > 0),
            **_OPTIONS,
        )
        return Work(
            tiling,
            items,
            split_tiles,
            num_split,
            torch.empty(*scratch, head_dim, dtype=torch.float32, device=device),
            torch.empty(*scratch, 2, dtype=torch.float32, device=device),
        )


@triton.jit
def _counts(
    query_start, context_lens, first, num_sequences, short, split_tiles, window,
    keys: tl.constexpr, tokens: tl.constexpr, is_decode: tl.constexpr, sequences: tl.constexpr,
):  # fmt: skip
    # Of sequences first..first + sequences: key tiles, and programs in this list.
    sequence = first + tl.arange(0, sequences)
    is_there = sequence < num_sequences
    start = tl.load(query_start + sequence, mask=is_there, other=0)
    num_rows = tl.load(query_start + sequence + 1, mask=is_there, other=0) - start
    if is_decode:
        is_own = (num_rows > 0) & (num_rows <= short)
        context = tl.maximum(tl.load(context_lens + sequence, mask=is_there, other=0), 0)
        tiles = (context + keys - 1) // keys
        if window is not None:
            tiles -= tl.maximum(context - num_rows - window + 1, 0) // keys
        tiles = tl.where(is_own, tiles, 0)
        counts = tl.maximum((tiles + split_tiles - 1) // split_tiles, 1)
    else:
        is_own = num_rows > short
        tiles = tl.zeros_like(num_rows)
        counts = (num_rows + tokens - 1) // tokens
    return tiles, tl.where(is_own, counts, 0)


@triton.jit(do_not_specialize=["num_sequences", "num_items", "target", "short", "min_split_tiles", "window"])
def schedule_kernel(
    items,
    split_tiles,
    query_start,
    context_lens,
    num_sequences,
    num_items,
    target,
    short,
    min_split_tiles,
    window,
    keys: tl.constexpr,
    tokens: tl.constexpr,
    is_decode: tl.constexpr,
    sequences: tl.constexpr,
    block: tl.constexpr,
):
    # Item n belongs to the sequence before which the counts of all sequences sum up to n at most: the number of running sums
    # that are <= n. Counts above one are summed first, those of one behind them.
    # A program owns `block` rows of `items` [num_items, 3], and looks at all sequences for them; masks guard both ends.
    per_split = tl.full([], 1, tl.int32)
    if is_decode:
        total = tl.zeros([sequences], tl.int32)
        for first in range(0, num_sequences, sequences):
            tiles, _ = _counts(query_start, context_lens, first, num_sequences, short, 1, window,
                               keys, tokens, is_decode, sequences)  # fmt: skip
            total += tiles
        per_split = tl.maximum((tl.sum(total) + target - 1) // target, min_split_tiles)
        if tl.program_id(0) == 0:
            tl.store(split_tiles, per_split)
    several = tl.zeros([sequences], tl.int32)
    for first in range(0, num_sequences, sequences):
        _, counts = _counts(query_start, context_lens, first, num_sequences, short, per_split, window,
                            keys, tokens, is_decode, sequences)  # fmt: skip
        several += tl.where(counts > 1, counts, 0)
    num_several = tl.sum(several)
    item = tl.program_id(0) * block + tl.arange(0, block)
    is_several = item < num_several
    owner = tl.zeros([block], tl.int32)
    before = tl.zeros([block], tl.int32)
    size = tl.zeros([block], tl.int32)
    several_before = tl.zeros([], tl.int32)
    one_before = num_several
    for first in range(0, num_sequences, sequences):
        _, counts = _counts(query_start, context_lens, first, num_sequences, short, per_split, window,
                            keys, tokens, is_decode, sequences)  # fmt: skip
        several = tl.where(counts > 1, counts, 0)
        one = tl.where(counts == 1, 1, 0)
        several_end = (several_before + tl.cumsum(several))[None, :]
        one_end = (one_before + tl.cumsum(one))[None, :]
        end = tl.where(is_several[:, None], several_end, one_end)
        count = tl.where(is_several[:, None], several[None, :], one[None, :])
        is_passed = end <= item[:, None]
        is_there = (first + tl.arange(0, sequences) < num_sequences)[None, :]
        owner += tl.sum((is_passed & is_there).to(tl.int32), axis=1)
        before += tl.sum(tl.where(is_passed, count, 0), axis=1)
        is_owner = (end > item[:, None]) & (end - count <= item[:, None])
        size += tl.sum(tl.where(is_owner, count, 0), axis=1)
        several_before += tl.sum(several)
        one_before += tl.sum(one)
    index = item - before - tl.where(is_several, 0, num_several)
    is_item = item < num_items
    tl.store(items + item * 3, tl.where(item < one_before, owner, -1), mask=is_item)
    tl.store(items + item * 3 + 1, index, mask=is_item)
    tl.store(items + item * 3 + 2, size, mask=is_item)


def _constexprs(tiling: Tiling, *, is_decode: bool) -> dict[str, int]:
    return {
        "keys": tiling.keys,
        "tokens": tiling.tokens,
        "is_decode": is_decode,
        "sequences": _SEQUENCES,
        "block": _ITEMS,
    }


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def specialisations() -> list[Specialisation]:
    """Both lists of work, as layers with a window have them."""
    return [_specialisation(is_decode=is_decode) for is_decode in (True, False)]


def _specialisation(*, is_decode: bool) -> Specialisation:
    tiling = Tiling(rows=16, tokens=4, keys=64, num_warps=4, num_stages=3)
    integers = ("num_sequences", "num_items", "target", "short", "min_split_tiles", "window")
    signature = dict.fromkeys(("items", "split_tiles", "query_start", "context_lens"), "*i32") | dict.fromkeys(integers, "i32")
    name = "schedule_decodes" if is_decode else "schedule_prefills"
    return Specialisation(name, schedule_kernel, signature, _constexprs(tiling, is_decode=is_decode), _OPTIONS)
