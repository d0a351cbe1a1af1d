"""Paged attention on a processor; the twin is that of kernels/reference.py, which also serves the shapes that do not fit here.

A piece of work is one KV head and a few consecutive tokens of one sequence; its rows are those tokens' queries of the heads
that share the KV head. It goes over the keys in chunks that begin at fixed positions:

    s = q k^T * scale;  m' = max(m, max s);  o = o * e^(m - m') + e^(s - m') v;  l = l * e^(m - m') + sum e^(s - m')

in float32, and the result is o / l. What a row yields depends on its sequence alone, bit for bit: not on the batch, nor on how
its prompt was cut. kernels/cpu/kv.py lays the memory of a block out for this. Behind a sequence's last key, keys are computed
with and dropped, values never touched.
"""

import struct

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from kernels import reference
from kernels.cpu import threads
from kernels.cpu.kv import KINDS, fits, key_address, value_address
from kernels.cpu.vectors import (
    BFLOAT16,
    WIDTH,
    add,
    as_float,
    div,
    exp,
    fetch_add,
    get,
    keep,
    largest,
    load,
    maximum,
    mul,
    product,
    put,
    splat,
    store,
    sub,
    total,
    word,
    word32,
)

CHUNK = 256
"""Positions between two updates of the maximum. Part of the result: another size rounds differently."""
LAYER_WORD, WINDOW_WORD, SCALE_WORD = 3, 14, 15
"""Where an operation's arguments name what differs between layers."""
TILE_ROWS = 48
"""Query rows of a piece of a prompt: they share what is read, and their scores fit the second-level cache."""
MANY_ITEMS = 8
"""From so many on a thread takes all KV heads of a sequence at once, which lie side by side in its blocks: a fifth faster
(64 sequences of 40 or 300 tokens, 3 KV heads of 64, two cores of an AMD EPYC, 2026-11-30)."""
_PAD = 2 * WIDTH  # tiles of two panels may write one panel too far
_LOWEST = float(np.float32(-np.inf))

_product1, _product2, _product3 = product(1, 2), product(2, 2), product(3, 2)
_product4, _product5, _product6 = product(4, 1), product(5, 1), product(6, 1)


class Plan(reference.Plan):
    """As its twin in the reference, and which pieces of work a step has."""

    def __init__(
        self,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        slot_mapping: Tensor | None,
        host: reference.HostLengths | None = None,
    ) -> None:
        """Take the arguments of its twin."""
        super().__init__(block_tables, query_start, context_lens, slot_mapping, host)
        self.tables = block_tables.to(torch.int32).contiguous()
        self._starts, self._contexts = query_start.numpy(), context_lens.numpy()
        self._items: dict[int, Tensor] = {}
        self.has_idle_rows = bool((self._contexts == 0).any())
        """Whether some rows see no key, and are nobody's work."""

    def items(self, group: int) -> Tensor:
        """`[n, 4]` int32: sequence, first row, number of tokens, keys that the last of them sees. The longest come first."""
        if group not in self._items:
            most = max(1, TILE_ROWS // group)
            counts = np.diff(self._starts)
            tiles = np.where(self._contexts > 0, -(-counts // most), 0)
            sequences = np.repeat(np.arange(len(counts)), tiles)
            index = np.arange(len(sequences)) - np.repeat(tiles.cumsum() - tiles, tiles)
            first = index * most
            tokens = np.minimum(counts[sequences] - first, most)
            contexts = self._contexts[sequences] - counts[sequences] + first + tokens
            items = np.stack((sequences, self._starts[sequences] + first, tokens, contexts), axis=1)
            order = np.argsort(-(tokens * contexts), kind="stable")
            self._items[group] = torch.from_numpy(items[order].astype(np.int32))
        return self._items[group]


@njit
def _scores(kind, rows, s, s_row, q, q_row, head_dim, keys, step, distance, ahead, ahead_1):
    """Scores of all rows over two panels of keys, `distance` bytes apart; the second is of no meaning where that is 0."""
    row = 0
    while rows - row >= 6 or rows - row == 4 or rows - row == 5:
        left = rows - row
        count = 6 if left >= 6 else left
        for panel in range(2 if distance else 1):
            c, a, b = s + row * s_row + 4 * WIDTH * panel, q + row * q_row, keys + panel * distance
            if count == 6:
                _product6(kind, c, s_row, 0, 0, a, q_row, b, step, 0, head_dim, 0, 0, 0, 0)
            elif count == 5:
                _product5(kind, c, s_row, 0, 0, a, q_row, b, step, 0, head_dim, 0, 0, 0, 0)
            else:
                _product4(kind, c, s_row, 0, 0, a, q_row, b, step, 0, head_dim, 0, 0, 0, 0)
        row += count
    c, a, left = s + row * s_row, q + row * q_row, rows - row
    if left == 3:
        _product3(kind, c, s_row, 0, 0, a, q_row, keys, step, distance, head_dim, 0, 0, ahead, ahead_1)
    elif left == 2:
        _product2(kind, c, s_row, 0, 0, a, q_row, keys, step, distance, head_dim, 0, 0, ahead, ahead_1)
    elif left == 1:
        _product1(kind, c, s_row, 0, 0, a, q_row, keys, step, distance, head_dim, 0, 0, ahead, ahead_1)


@njit
def _gather(kind, rows, o, o_row, p, p_row, count, values, step, panels, ahead):
    """Add the values of `count` positions, weighted by `p`, to all rows of `o`."""
    width = step // panels
    row = 0
    while rows - row >= 6 or rows - row == 4 or rows - row == 5:
        left = rows - row
        rows_now = 6 if left >= 6 else left
        a = p + row * p_row
        for panel in range(panels):
            c, b = o + row * o_row + 4 * WIDTH * panel, values + panel * width
            if rows_now == 6:
                _product6(kind, c, o_row, c, o_row, a, p_row, b, step, 0, count, 0, 0, 0, 0)
            elif rows_now == 5:
                _product5(kind, c, o_row, c, o_row, a, p_row, b, step, 0, count, 0, 0, 0, 0)
            else:
                _product4(kind, c, o_row, c, o_row, a, p_row, b, step, 0, count, 0, 0, 0, 0)
        row += rows_now
    a, left = p + row * p_row, rows - row
    for panel in range(0, panels, 2):
        c, b, distance = o + row * o_row + 4 * WIDTH * panel, values + panel * width, width if panel + 1 < panels else 0
        if left == 3:
            _product3(kind, c, o_row, c, o_row, a, p_row, b, step, distance, count, 0, 0, ahead, ahead)
        elif left == 2:
            _product2(kind, c, o_row, c, o_row, a, p_row, b, step, distance, count, 0, 0, ahead, ahead)
        elif left == 1:
            _product1(kind, c, o_row, c, o_row, a, p_row, b, step, distance, count, 0, 0, ahead, ahead)


@njit
def _soften(s, start, end, first, last, cap, most):
    """Cap the scores in [start, end), drop those outside [first, last), return the largest, at least `most`."""
    best = splat(most)
    for at in range(start, end, WIDTH):
        value = load(s + 4 * at)
        if cap > 0:  # cap * tanh(x / cap) = cap - 2 cap / (e^(2 x / cap) + 1): neither end overflows
            power = exp(mul(value, splat(types.float32(2) / cap)))
            value = sub(splat(cap), div(splat(2 * cap), add(power, splat(types.float32(1)))))
        if at < first or at + WIDTH > last:
            value = keep(value, first - at, last - at, types.float32(_LOWEST))
        store(s + 4 * at, value)
        best = maximum(best, value)
    return largest(best)


@njit
def _weigh(s, start, end, first, last, most):
    """Turn scores in [start, end) into weights, 0 outside [first, last), and return their sum."""
    sums = splat(types.float32(0))
    for at in range(start, end, WIDTH):
        value = exp(sub(load(s + 4 * at), splat(most)))
        if at < first or at + WIDTH > last:
            value = keep(value, first - at, last - at, types.float32(0))
        store(s + 4 * at, value)
        sums = add(sums, value)
    return total(sums)


@njit
def _scale(o, size, factor):
    for at in range(0, 4 * size, 4 * WIDTH):
        store(o + at, mul(load(o + at), splat(factor)))


@njit
def _begin(query, sinks, first_row, rows, head, heads, group, head_dim, scale, queries, o_row, sums, maxima, totals):
    """Copy the scaled queries of a piece of work, and set its sums to what they are before any key."""
    for row in range(rows):
        token, member = row // group, row % group
        source = query + 4 * (((first_row + token) * heads + head) * group + member) * head_dim
        for at in range(0, 4 * head_dim, 4 * WIDTH):
            store(queries + row * o_row + at, mul(load(source + at), splat(scale)))
            store(sums + row * o_row + at, splat(types.float32(0)))
        put(maxima + 4 * row, get(sinks + 4 * (head * group + member)) if sinks else types.float32(_LOWEST))
        put(totals + 4 * row, types.float32(1) if sinks else types.float32(0))


@njit
def _end(out, first_row, rows, head, heads, group, head_dim, o_row, sums, totals):
    """Write what a piece of work has found."""
    for row in range(rows):
        token, member = row // group, row % group
        target = out + 4 * (((first_row + token) * heads + head) * group + member) * head_dim
        total_weight = splat(get(totals + 4 * row))
        for at in range(0, 4 * head_dim, 4 * WIDTH):
            store(target + at, div(load(sums + row * o_row + at), total_weight))


@njit
def _chunk_scores(place, kind, start, end, chunk, rows, scores, s_row, queries, o_row):
    """Scores of a chunk, two panels of keys at a time; what comes next is asked for meanwhile, since blocks lie anywhere."""
    layer, block_bytes, table, head, heads, head_dim, block_size, size = place
    for at in range(start, end, 2 * WIDTH):
        keys = key_address(layer, block_bytes, table, at, head, head_dim, block_size, size)
        distance, ahead, ahead_1, then = 0, 0, 0, at + 2 * WIDTH
        if at + WIDTH < end:
            distance = key_address(layer, block_bytes, table, at + WIDTH, head, head_dim, block_size, size) - keys
        if then < end:
            ahead = key_address(layer, block_bytes, table, then, head, head_dim, block_size, size) - keys
        else:
            ahead = value_address(layer, block_bytes, table, start, head, heads, head_dim, block_size, size) - keys
        if then + WIDTH < end:
            ahead_1 = key_address(layer, block_bytes, table, then + WIDTH, head, head_dim, block_size, size) - keys - distance
        line = scores + 4 * (at - chunk)
        _scores(kind, rows, line, s_row, queries, o_row, head_dim, keys, WIDTH * size, distance, ahead, ahead_1)


@njit
def _chunk_weights(
    start, end, chunk, rows, group, context, tokens, window, cap, scores, s_row, head_dim, o_row, sums, maxima, totals
):
    """Turn the scores of a chunk into weights, and scale what earlier chunks have summed."""
    for row in range(rows):
        last_seen = context - tokens + row // group + 1
        first, last = (max(0, last_seen - window) if window else 0) - chunk, min(last_seen, end) - chunk
        line, before = scores + row * s_row, get(maxima + 4 * row)
        now = _soften(line, start - chunk, end - chunk, first, last, cap, before)
        if now == types.float32(_LOWEST):
            now = types.float32(0)
        weight = _weigh(line, start - chunk, end - chunk, first, last, now)
        factor = types.float32(1)
        if before != now:
            factor = largest(exp(splat(before - now)))
            _scale(sums + row * o_row, head_dim, factor)
        put(totals + 4 * row, get(totals + 4 * row) * factor + weight)
        if weight > 0:
            put(maxima + 4 * row, now)


@njit
def _chunk_values(place, kind, at, end, chunk, rows, scores, s_row, sums, o_row):
    """Add the weighted values of positions [at, end)."""
    layer, block_bytes, table, head, heads, head_dim, block_size, size = place
    while at < end:
        count, ahead = min(WIDTH - at % WIDTH, end - at), 0
        values = value_address(layer, block_bytes, table, at, head, heads, head_dim, block_size, size)
        if at + count < end:
            ahead = value_address(layer, block_bytes, table, at + count, head, heads, head_dim, block_size, size) - values
        line, panels = scores + 4 * (at - chunk), head_dim // WIDTH
        _gather(kind, rows, sums, o_row, line, s_row, count, values, head_dim * size, panels, ahead)
        at += count


@njit
def attend(args):
    """The operation ATTEND; its arguments are those of `attend_words`."""
    out, query, layer, block_bytes = word(args, 1), word(args, 2), word(args, 3), word(args, 4)
    items, num_items, tables, table_bytes = word(args, 5), word(args, 6), word(args, 7), word(args, 8)
    heads, group, head_dim, block_size = word(args, 9), word(args, 10), word(args, 11), word(args, 12)
    kind, window, sinks = word(args, 13), word(args, 14), word(args, 17)
    scale, cap = as_float(word(args, 15)), as_float(word(args, 16))
    size, most_rows = 2 if kind == BFLOAT16 else 4, max(TILE_ROWS, group)
    s_row, o_row = 4 * (CHUNK + _PAD), 4 * (head_dim + _PAD)
    scores = word(args, 18) + fetch_add(args + 8 * 20, 1) * word(args, 19)
    queries = scores + most_rows * s_row
    sums = queries + most_rows * o_row
    maxima = sums + most_rows * o_row
    totals = maxima + 4 * most_rows
    together = heads if num_items >= MANY_ITEMS else 1
    taken = fetch_add(args, together)
    while taken < num_items * heads:
        for piece in range(taken, taken + together):
            item, head = items + 16 * (piece // heads), piece % heads
            sequence, first_row, tokens, context = word32(item, 0), word32(item, 1), word32(item, 2), word32(item, 3)
            rows = tokens * group
            place = layer, block_bytes, tables + sequence * table_bytes, head, heads, head_dim, block_size, size
            _begin(query, sinks, first_row, rows, head, heads, group, head_dim, scale, queries, o_row, sums, maxima, totals)
            begin = max(0, context - tokens - window + 1) if window else 0
            for chunk in range(begin // CHUNK * CHUNK, context, CHUNK):
                start, end = max(chunk, begin // WIDTH * WIDTH), min(chunk + CHUNK, context)
                _chunk_scores(place, kind, start, end, chunk, rows, scores, s_row, queries, o_row)
                _chunk_weights(
                    start,
                    end,
                    chunk,
                    rows,
                    group,
                    context,
                    tokens,
                    window,
                    cap,
                    scores,
                    s_row,
                    head_dim,
                    o_row,
                    sums,
                    maxima,
                    totals,
                )
                _chunk_values(place, kind, max(start, begin), end, chunk, rows, scores, s_row, sums, o_row)
            _end(out, first_row, rows, head, heads, group, head_dim, o_row, sums, totals)
        taken = fetch_add(args, together)


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
    """As `reference.paged_attention`; where this module wrote keys and values, it also reads them."""
    if not fits(kv_cache_layer):
        return reference.paged_attention(
            query, kv_cache_layer, block_tables, query_start, context_lens,
            scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks, plan=plan, kv_scales=kv_scales,
        )  # fmt: skip
    plan = plan or Plan(block_tables, query_start, context_lens, None)
    queries, heads = query.float().contiguous(), kv_cache_layer.shape[3]
    out = torch.zeros_like(queries) if plan.has_idle_rows else torch.empty_like(queries)
    sinks = None if sinks is None else sinks.float().contiguous()
    scratch, items = scratch_for(kv_cache_layer, query.shape[1]), plan.items(query.shape[1] // heads)
    words = attend_words(
        queries, kv_cache_layer, plan, out, scratch, scale=scale, window=sliding_window, softcap=softcap, sinks=sinks
    )
    threads.run(threads.ATTEND, *words, pieces=len(items) * heads)
    return out.to(query.dtype)


def scratch_for(kv_cache_layer: Tensor, num_heads: int) -> Tensor:
    """`[threads, bytes]`, what each thread writes on the way."""
    heads, head_dim = kv_cache_layer.shape[3:]
    numbers = max(TILE_ROWS, num_heads // heads) * (CHUNK + _PAD + 2 * (head_dim + _PAD) + 2)
    return torch.empty((torch.get_num_threads(), 4 * numbers), dtype=torch.uint8)


def attend_words(
    query: Tensor,
    kv_cache_layer: Tensor,
    plan: Plan,
    out: Tensor,
    scratch: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[int, ...]:
    """Arguments of the operation; `query` and `out` `[T, num_heads, head_dim]` float32, contiguous."""
    block_size, heads, head_dim = kv_cache_layer.shape[2:]
    items = plan.items(query.shape[1] // heads)
    return (
        *(out.data_ptr(), query.data_ptr(), kv_cache_layer.data_ptr()),
        kv_cache_layer.stride(0) * kv_cache_layer.element_size(),
        *(items.data_ptr(), len(items), plan.tables.data_ptr(), 4 * plan.tables.stride(0)),
        *(heads, query.shape[1] // heads, head_dim, block_size, KINDS[kv_cache_layer.dtype], window or 0),
        *(bits(scale), bits(softcap or 0.0), 0 if sinks is None else sinks.data_ptr()),
        *(scratch.data_ptr(), scratch.stride(0), 0),
    )


def bits(number: float) -> int:
    """Of the float32."""
    return int(struct.unpack("i", struct.pack("f", number))[0])
