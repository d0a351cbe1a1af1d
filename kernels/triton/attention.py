"""Paged attention on a GPU, as kernels/reference.py defines it: one kernel for decodes and prefills, and one that joins splits.

Relies on plan.py for which program owns what, and on kv.py for how blocks are stored. A program reads the keys of its rows in
tiles that are gathered from several blocks, the next one while it computes, and keeps the largest score, the sum of weights and
the weighted values of each row in float32. The choice between implementations is left to kernels/dispatch.py.

What is stored in one byte an element is multiplied in the query's dtype, and its scales are applied to scores and weights. The
products of a tile are summed by themselves in float32 and then added to the rows' sums, so that long contexts do not lose bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.kv import format_of, raw
from kernels.triton.plan import Plan, Tiling, Work
from kernels.triton.specialisation import Specialisation

# Partial results of a head that are joined together.
_SPLITS = 16


@triton.jit
def _from_fp8(numbers, is_native: tl.constexpr, dtype: tl.constexpr):
    # Bits of float8_e4m3fn, moved by 7, are a float16 that is 2^8 times too small.
    if is_native:
        return numbers.to(tl.float8e4nv, bitcast=True).to(dtype)
    bits = numbers.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * 256.0).to(dtype)


@triton.jit(
    do_not_specialize=["window", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "query_start", "context_lens", "items", "split_tiles"],
)
def attention_kernel(
    output,
    partial,
    stats,
    query,
    cache,
    scales,
    sinks,
    block_tables,
    query_start,
    context_lens,
    items,
    split_tiles,
    scale,
    softcap,
    window,
    stride_query_token,
    stride_query_head,
    stride_block,
    stride_scales_block,
    stride_table,
    kv_format: tl.constexpr,
    is_fp8_native: tl.constexpr,
    is_decode: tl.constexpr,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
):
    # o = sum_j w_j v_j / sum_j w_j,   w_j = 2^(s_j - m),   s_j = cap(scale * q k_j) * log2(e),   m = max_j s_j
    # with a sink z: m and the lower sum begin with it.   cap(x) = softcap * tanh(x / softcap)
    #
    # A program owns `rows` rows (token t, head h of the group) = divmod(row, group) of one sequence and one KV head, and of
    # their keys all, or those of one split. Keys lie at [block, 0 or 1, offset, KV head, :]; the block of each key of a tile is
    # looked up once for both. Masks guard rows beyond the sequence's, columns beyond the head size, and keys that no row of the
    # tile sees, before its window or behind its end: these are never loaded, for they may be NaN, and NaN times 0 is NaN.
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    sequence = tl.load(items + item * 3)
    if sequence < 0:
        return
    index = tl.load(items + item * 3 + 1)
    count = tl.load(items + item * 3 + 2)
    start = tl.load(query_start + sequence)
    num_rows = tl.load(query_start + sequence + 1) - start
    context = tl.load(context_lens + sequence)

    tokens: tl.constexpr = rows // group
    row = tl.arange(0, rows)
    column = tl.arange(0, dim_block)
    first_token = 0
    if not is_decode:
        first_token = (count - 1 - index) * tokens  # the longest first
    token = first_token + row // group
    head = kv_head * group + row % group
    is_row = (row < tokens * group) & (token < num_rows)
    is_column = column < head_dim
    position = context - num_rows + token
    end = tl.maximum(context - num_rows + tl.minimum(first_token + tokens, num_rows), 0)
    begin = 0
    if window is not None:
        begin = tl.maximum(context - num_rows + first_token - window + 1, 0)
    first_tile = begin // keys
    end_tile = (end + keys - 1) // keys
    if is_decode:
        per_split = tl.load(split_tiles)
        first_tile += index * per_split
        end_tile = tl.minimum(end_tile, first_tile + per_split)

    dtype: tl.constexpr = query.dtype.element_ty
    row_at = (start + token).to(tl.int64)
    q = tl.load(
        query + (row_at * stride_query_token + head * stride_query_head)[:, None] + column[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )
    most = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    values = tl.zeros([rows, dim_block], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        has_sink = (index == 0) | (not is_decode)
        most = tl.where(has_sink, sink, most)
        total = tl.where(has_sink, 1.0, total)
    table = block_tables + sequence.to(tl.int64) * stride_table
    head_cache = cache + kv_head * head_dim + column
    part_size: tl.constexpr = block_size * num_kv_heads * head_dim

    key = first_tile * keys + tl.arange(0, keys)
    next_block = tl.load(table + key // block_size, mask=key < end, other=0)
    for number in range(first_tile, end_tile):
        key = number * keys + tl.arange(0, keys)
        is_key = (key >= begin) & (key < end)
        block = next_block.to(tl.int64)
        next_block = tl.load(table + (key + keys) // block_size, mask=key + keys < end, other=0)
        place = block * stride_block + (key % block_size) * (num_kv_heads * head_dim)
        is_loaded = is_key[:, None] if head_dim == dim_block else is_key[:, None] & is_column[None, :]
        k = tl.load(head_cache[None, :] + place[:, None], mask=is_loaded, other=0)
        v = tl.load(head_cache[None, :] + (place + part_size)[:, None], mask=is_loaded, other=0)
        k = _from_fp8(k, is_fp8_native, dtype) if kv_format == "fp8" else k.to(dtype)
        v = _from_fp8(v, is_fp8_native, dtype) if kv_format == "fp8" else v.to(dtype)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if kv_format != "plain":
            scale_at = scales + block * stride_scales_block + (key % block_size) * num_kv_heads + kv_head
            key_scale = tl.load(scale_at, mask=is_key, other=0.0)
            value_scale = tl.load(scale_at + block_size * num_kv_heads, mask=is_key, other=0.0)
            scores *= key_scale[None, :]
        if softcap is None:
            scores *= scale * 1.4426950408889634
        else:
            # tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|): e is in 0..1, so nothing overflows.
            x = scores * (scale / softcap)
            e = tl.exp2(tl.abs(x) * -2.8853900817779268)
            bounded = (1.0 - e) / (1.0 + e) * (softcap * 1.4426950408889634)
            scores = tl.where(x < 0, -bounded, bounded)
        if window is None:
            is_seen = key[None, :] <= position[:, None]
        else:  # a key ahead is at a distance that is negative, or huge without a sign
            is_seen = (position[:, None] - key[None, :]).to(tl.uint32, bitcast=True) < window.to(tl.uint32)
        scores = tl.where(is_seen, scores, float("-inf"))

        new_most = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(new_most == float("-inf"), 0.0, new_most)  # of rows that see nothing yet: -inf less -inf is NaN
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, axis=1)
        most = new_most
        if kv_format == "plain":
            values = values * shrink[:, None] + tl.dot(weights.to(dtype), v, input_precision="ieee")
        elif dtype != tl.float16:
            weights *= value_scale[None, :]
            values = values * shrink[:, None] + tl.dot(weights.to(dtype), v, input_precision="ieee")
        else:  # weights times scales may be too small for float16: scales are taken as parts of the largest
            largest = tl.maximum(tl.max(value_scale), 1.1754943508222875e-38)
            weights *= (value_scale / largest)[None, :]
            values = values * shrink[:, None] + tl.dot(weights.to(dtype), v, input_precision="ieee") * largest

    is_stored = is_row[:, None] & is_column[None, :]
    if is_decode:  # noqa: SIM102 - one is decided by the compiler
        if count > 1:
            at = (item.to(tl.int64) * num_kv_heads + kv_head) * rows + row
            tl.store(stats + at * 2, most, mask=is_row)
            tl.store(stats + at * 2 + 1, total, mask=is_row)
            tl.store(partial + at[:, None] * head_dim + column[None, :], values, mask=is_stored)
            return
    values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (row_at * (num_kv_heads * group) + head) * head_dim
    tl.store(output + at[:, None] + column[None, :], values.to(dtype), mask=is_stored)


@triton.jit(do_not_specialize_on_alignment=["query_start", "items"])
def combine_kernel(
    output,
    partial,
    stats,
    query_start,
    items,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    rows: tl.constexpr,
    splits: tl.constexpr,
):
    # o = sum_i 2^(m_i - m) o_i / sum_i 2^(m_i - m) l_i,   m = max_i m_i, over the splits i of a sequence
    # A program owns one head of a sequence with several splits, whose first item it is called with, and leaves otherwise.
    # Partial results lie at [item, KV head, row, :]; masks guard splits beyond the last and columns beyond the head size.
    head = tl.program_id(0)
    item = tl.program_id(1)
    sequence = tl.load(items + item * 3)
    count = tl.load(items + item * 3 + 2)
    if (sequence < 0) | (tl.load(items + item * 3 + 1) > 0) | (count < 2):
        return
    start = tl.load(query_start + sequence)
    num_rows = tl.load(query_start + sequence + 1) - start
    column = tl.arange(0, dim_block)
    is_column = column < head_dim
    for token in range(0, num_rows):
        most = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        values = tl.zeros([dim_block], tl.float32)
        for first in range(0, count, splits):
            split = first + tl.arange(0, splits)
            is_split = split < count
            at = ((item + split).to(tl.int64) * num_kv_heads + head // group) * rows + token * group + head % group
            split_most = tl.load(stats + at * 2, mask=is_split, other=float("-inf"))
            split_total = tl.load(stats + at * 2 + 1, mask=is_split, other=0.0)
            is_loaded = is_split[:, None] & is_column[None, :]
            split_values = tl.load(partial + at[:, None] * head_dim + column[None, :], mask=is_loaded, other=0.0)
            new_most = tl.maximum(most, tl.max(split_most))
            base = tl.where(new_most == float("-inf"), 0.0, new_most)
            weights = tl.exp2(split_most - base)
            shrink = tl.exp2(most - base)
            total = total * shrink + tl.sum(weights * split_total)
            values = values * shrink + tl.sum(weights[:, None] * split_values, axis=0)
            most = new_most
        values = values / tl.where(total == 0.0, 1.0, total)
        at = ((start + token).to(tl.int64) * (num_kv_heads * group) + head) * head_dim
        tl.store(output + at + column, values.to(output.dtype.element_ty), mask=is_column)


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
    """As `reference.paged_attention`; every row belongs to a sequence. A mixed batch takes two launches, splits a third.

    `block_tables`, `query_start` and `context_lens` are int32; blocks and scales are contiguous inside.
    """
    assert block_tables.dtype == query_start.dtype == context_lens.dtype == torch.int32
    assert block_tables.stride(-1) == 1
    assert kv_cache_layer[0].is_contiguous()
    assert kv_scales is None or kv_scales[0].is_contiguous()
    query = query if query.stride(-1) == 1 else query.contiguous()
    plan = plan or Plan(block_tables, query_start, context_lens)
    num_kv_heads, head_dim = kv_cache_layer.shape[3:]
    group = query.shape[1] // num_kv_heads
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    kv_format = format_of(kv_cache_layer.dtype)
    tilings = (tiling(group, head_dim, query.dtype, kv_format, is_decode=is_decode) for is_decode in (True, False))
    for work in plan.works(query, kv_cache_layer, sliding_window, *tilings):
        heads = _heads(num_kv_heads, group, head_dim, work.tiling)
        attention_kernel[(num_kv_heads, len(work.items))](
            output,
            work.partial,
            work.stats,
            query,
            raw(kv_cache_layer),
            kv_scales,
            sinks,
            block_tables,
            query_start,
            context_lens,
            work.items,
            work.split_tiles,
            scale,
            softcap,
            sliding_window,
            *query.stride()[:2],
            kv_cache_layer.stride(0),
            0 if kv_scales is None else kv_scales.stride(0),
            block_tables.stride(0),
            kv_format=kv_format,
            is_fp8_native=_is_fp8_native(query.device),
            is_decode=work.num_split > 0,
            block_size=kv_cache_layer.shape[2],
            keys=work.tiling.keys,
            **heads,
            **_options(work.tiling),
        )
        if work.num_split:
            _combine(output, work, query_start, heads)
    return output


def _combine(output: Tensor, work: Work, query_start: Tensor, heads: dict[str, int]) -> None:
    grid = (output.shape[1], work.num_split)
    combine_kernel[grid](output, work.partial, work.stats, query_start, work.items, **heads, splits=_SPLITS, num_warps=4)


def tiling(group: int, head_dim: int, dtype: torch.dtype, kv_format: str, *, is_decode: bool) -> Tiling:
    """Rows and keys of a program, for any GPU.

    Chosen from what the compiler makes of them, and untuned: nothing is spilled for sm_80, sm_90 and sm_100, K and V are double
    buffered and take at most 96 KiB where a program can have no more. float32, which has no tensor cores, is for proofs.
    """
    width = triton.next_power_of_2(head_dim) * dtype.itemsize
    rows = least = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tiling(rows, rows // group, keys=32, num_warps=4, num_stages=2)
    keys = 64 if width <= 256 else 32
    if is_decode and kv_format != "plain":  # two programs a multiprocessor: numbers on their way to 16 bits take registers
        return Tiling(rows, rows // group, keys, num_warps=8, num_stages=4, max_registers=128)
    if is_decode:
        return Tiling(rows, rows // group, keys, num_warps=4, num_stages=3)
    rows = max(least, 128 if width <= 256 else 64)
    return Tiling(rows, rows // group, 32 if kv_format != "plain" else keys, num_warps=8, num_stages=3 if width <= 256 else 2)


def _heads(num_kv_heads: int, group: int, head_dim: int, how: Tiling) -> dict[str, int]:
    dim_block = max(16, triton.next_power_of_2(head_dim))
    return {"num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim, "dim_block": dim_block, "rows": how.rows}


def _options(how: Tiling) -> dict[str, int | None]:
    return {"num_warps": how.num_warps, "num_stages": how.num_stages, "maxnreg": how.max_registers}


def _is_fp8_native(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def specialisations() -> list[Specialisation]:
    """Decodes and prefills of common heads, every storage, both 16-bit formats, and all that changes scores at once."""
    return [
        _combination(128),
        *(_specialisation(is_decode, head_dim) for is_decode in (True, False) for head_dim in (64, 128)),
        _specialisation(True, 128, "int8"),
        _specialisation(True, 128, "fp8"),
        _specialisation(True, 128, "fp8", is_fp8_native=True),
        _specialisation(False, 128, "int8", torch.float16),
        _specialisation(False, 256, extras=("window", "softcap", "sinks")),
    ]


def _specialisation(
    is_decode: bool,
    head_dim: int,
    kv_format: str = "plain",
    dtype: torch.dtype = torch.bfloat16,
    extras: tuple[str, ...] = (),
    is_fp8_native: bool = False,
) -> Specialisation:
    how = tiling(4, head_dim, dtype, kv_format, is_decode=is_decode)
    element = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    constexprs: dict[str, Any] = {
        **{"kv_format": kv_format, "is_fp8_native": is_fp8_native, "is_decode": is_decode, "block_size": 16, "keys": how.keys},
        **_heads(8, 4, head_dim, how),
    }
    signature = {
        **{"output": element, "partial": "*fp32", "stats": "*fp32", "query": element},
        **{"cache": {"plain": element, "int8": "*i8", "fp8": "*u8"}[kv_format], "scales": "*fp32", "sinks": "*bf16"},
        **dict.fromkeys(("block_tables", "query_start", "context_lens", "items", "split_tiles"), "*i32"),
        **{"scale": "fp32", "softcap": "fp32", "window": "i32"},
        **dict.fromkeys(("stride_query_token", "stride_query_head", "stride_block"), "i32:16"),
        **dict.fromkeys(("stride_scales_block", "stride_table"), "i32"),
    }
    absent = {"softcap", "window", "sinks"} - set(extras) | ({"scales"} if kv_format == "plain" else set())
    for name in absent:
        del signature[name]
        constexprs[name] = None
    kind = kv_format + "_native" * is_fp8_native
    words = ("decode" if is_decode else "prefill", str(head_dim), kind, str(dtype).removeprefix("torch."), *extras)
    least_target = 89 if is_fp8_native else 0
    return Specialisation("_".join(words), attention_kernel, signature, constexprs, _options(how), least_target)


def _combination(head_dim: int) -> Specialisation:
    signature = {"output": "*bf16", "partial": "*fp32", "stats": "*fp32", "query_start": "*i32", "items": "*i32"}
    heads = _heads(8, 4, head_dim, tiling(4, head_dim, torch.bfloat16, "plain", is_decode=True))
    return Specialisation(f"combine_{head_dim}", combine_kernel, signature, {**heads, "splits": _SPLITS}, {"num_warps": 4})
