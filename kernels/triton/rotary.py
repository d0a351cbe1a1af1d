"""Rotary positions and the write of new keys and values in one Triton kernel; the twin is in kernels/layers.py.

Relies on slots that lie in the cache, or are negative. When it is used is decided in kernels/dispatch.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.kv import format_of, raw, to_fp8
from kernels.triton.specialisation import Specialisation

# Numbers of one half of a program's heads at most, and per thread: eight in 16 bits are one load of 16 bytes. Untuned: chosen
# without a GPU.
_HALF_TILE = 1024
_PER_THREAD = 8


def rotate_and_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache_layer: Tensor,
    slot_mapping: Tensor,
    plan: Any = None,  # noqa: ARG001 - as the twin has it
    *,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """As `kernels.layers.rotate_and_write_kv`, in one launch. `qkv` and the cache may be slices of larger tensors.

    The cache is contiguous in its last axis, and is in int8 or float8_e4m3fn if there are `kv_scales`.
    """
    qkv, cos, sin = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (qkv, cos, sin))
    num_tokens, num_kv_heads, head_dim = len(qkv), *kv_cache_layer.shape[3:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    constexprs, options = _shape(num_heads, num_kv_heads, head_dim, cos.shape[-1], kv_cache_layer.shape[2])
    constexprs["kv_format"] = format_of(kv_cache_layer.dtype)
    tensors = (qkv, cos, sin, query, raw(kv_cache_layer), kv_scales, slot_mapping)
    scale_strides = (0,) * 4 if kv_scales is None else kv_scales.stride()
    strides = (qkv.stride(0), cos.stride(0), sin.stride(0), *kv_cache_layer.stride()[:4], *scale_strides)
    grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, constexprs["heads"]))
    _rotate_and_write_kv[grid](*tensors, *strides, **constexprs, **options)
    return query


def specialisations() -> list[Specialisation]:
    """Heads turned whole and in part, a cache in the dtype of the model, int8 and fp8, and sizes that are no power of two."""
    return [
        _specialisation(32, 8, 128, 128, "bf16"),
        _specialisation(32, 8, 128, 128, "i8"),
        _specialisation(32, 8, 128, 128, "u8"),
        _specialisation(9, 3, 64, 64, "bf16"),
        _specialisation(8, 8, 80, 20, "bf16"),
    ]


@triton.jit
def _rotate_and_write_kv(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    cache_ptr,
    scales_ptr,
    slots_ptr,
    qkv_stride,
    cos_stride,
    sin_stride,
    cache_block_stride,
    cache_part_stride,
    cache_offset_stride,
    cache_head_stride,
    scales_block_stride,
    scales_part_stride,
    scales_offset_stride,
    scales_head_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    turned: tl.constexpr,
    block_size: tl.constexpr,
    heads: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    kv_format: tl.constexpr,
):
    # (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of the first `turned` numbers of a query or key head.
    # A program owns `heads` heads of one token: query heads go to `query` [T, num_heads, head_dim], key and value heads to the
    # token's slot. A head is three tiles: both halves, and what is not turned. Masks guard heads beyond the last, columns where
    # a tile is wider than its part, and slots that are negative. Offsets of tokens and blocks are int64.
    half: tl.constexpr = turned // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    is_head = head < num_heads + 2 * num_kv_heads
    is_turned = head < num_heads + num_kv_heads
    column = tl.arange(0, half_block)[None, :]
    is_half = is_head & (column < half)
    source = qkv_ptr + token * qkv_stride + head * head_dim
    raw_first = tl.load(source + column, mask=is_half, other=0)
    raw_second = tl.load(source + half + column, mask=is_half, other=0)
    cos_first = tl.load(cos_ptr + token * cos_stride + column, mask=column < half, other=0).to(tl.float32)
    cos_second = tl.load(cos_ptr + token * cos_stride + half + column, mask=column < half, other=0).to(tl.float32)
    sin_first = tl.load(sin_ptr + token * sin_stride + column, mask=column < half, other=0).to(tl.float32)
    sin_second = tl.load(sin_ptr + token * sin_stride + half + column, mask=column < half, other=0).to(tl.float32)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    # Rounded to the dtype of `qkv` before the cache's own rounding, as the twin does.
    new_first = tl.where(is_turned, (first * cos_first - second * sin_first).to(raw_first.dtype), raw_first)
    new_second = tl.where(is_turned, (second * cos_second + first * sin_second).to(raw_first.dtype), raw_second)

    is_query = head < num_heads
    target = query_ptr + token * (num_heads * head_dim) + head * head_dim
    tl.store(target + column, new_first, mask=is_half & is_query)
    tl.store(target + half + column, new_second, mask=is_half & is_query)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    is_written = is_head & (head >= tl.where(slot >= 0, num_heads, num_heads + 2 * num_kv_heads))
    block = slot // block_size
    offset = slot % block_size
    part = (head >= num_heads + num_kv_heads).to(tl.int64)
    kv_head = head - num_heads - part * num_kv_heads
    place = cache_ptr + block * cache_block_stride + part * cache_part_stride + offset * cache_offset_stride
    place += kv_head * cache_head_stride
    if rest_block:
        rest_column = turned + tl.arange(0, rest_block)[None, :]
        is_rest = is_head & (rest_column < head_dim)
        rest = tl.load(source + rest_column, mask=is_rest, other=0)
        tl.store(target + rest_column, rest, mask=is_rest & is_query)
    if scales_ptr is not None:
        limit: tl.constexpr = 127.0 if kv_format == "int8" else 448.0
        largest, is_nan = _extent(new_first)
        other_largest, other_is_nan = _extent(new_second)
        largest, is_nan = tl.maximum(largest, other_largest), is_nan | other_is_nan
        if rest_block:
            other_largest, other_is_nan = _extent(rest)
            largest, is_nan = tl.maximum(largest, other_largest), is_nan | other_is_nan
        scale = tl.where(is_nan > 0, float("nan"), tl.div_rn(largest, tl.full(largest.shape, limit, tl.float32)))[:, None]
        scale_place = scales_ptr + block * scales_block_stride + part * scales_part_stride + offset * scales_offset_stride
        tl.store(scale_place + kv_head * scales_head_stride, scale, mask=is_written)
        new_first, new_second = _numbers(new_first, scale, kv_format), _numbers(new_second, scale, kv_format)
        if rest_block:
            rest = _numbers(rest, scale, kv_format)
    # What is left for a cache in a float dtype is the cast that the stores imply.
    tl.store(place + column, new_first, mask=is_written & is_half)
    tl.store(place + half + column, new_second, mask=is_written & is_half)
    if rest_block:
        tl.store(place + rest_column, rest, mask=is_written & is_rest)


@triton.jit
def _extent(x):
    # The largest magnitude of each row in fp32, and whether one of its numbers is NaN, which a maximum may pass over.
    x = x.to(tl.float32)
    return tl.max(tl.abs(x), 1), tl.max((x != x).to(tl.int32), 1)


@triton.jit
def _numbers(x, scale, kv_format: tl.constexpr):
    # x / scale in the cache's format. Of whole numbers the nearest, and the even one of two: adding 1.5 * 2^23 leaves fp32 no
    # room for a fraction. The divisor of a vector of zeros is the least normal number. What is not finite is told by its scale.
    quotient = tl.div_rn(x.to(tl.float32), tl.maximum(scale, 1.1754943508222875e-38) + tl.zeros_like(x).to(tl.float32))
    if kv_format == "fp8":
        numbers = to_fp8(quotient)
    else:
        rounded = (quotient + 12582912.0) - 12582912.0
        numbers = tl.where(tl.abs(rounded) <= 127, rounded, 0).to(tl.int8)
    return numbers


def _shape(
    num_heads: int, num_kv_heads: int, head_dim: int, turned: int, block_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constexprs and options."""
    half_block = triton.next_power_of_2(turned // 2)
    heads = min(triton.next_power_of_2(num_heads + 2 * num_kv_heads), max(1, _HALF_TILE // half_block))
    rest = head_dim - turned
    constexprs = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "turned": turned,
        "block_size": block_size,
        "heads": heads,
        "half_block": half_block,
        "rest_block": triton.next_power_of_2(rest) if rest else 0,
    }
    return constexprs, {"num_warps": max(1, heads * half_block // (32 * _PER_THREAD))}


def _specialisation(num_heads: int, num_kv_heads: int, head_dim: int, turned: int, cache: str) -> Specialisation:
    constexprs, options = _shape(num_heads, num_kv_heads, head_dim, turned, 16)
    names = ("qkv_ptr", "cos_ptr", "sin_ptr", "query_ptr")
    signature = dict.fromkeys(names, "*bf16") | {"cache_ptr": f"*{cache}", "slots_ptr": "*i64"}
    constexprs["kv_format"] = {"i8": "int8", "u8": "fp8"}.get(cache, "plain")
    if constexprs["kv_format"] != "plain":
        signature["scales_ptr"] = "*fp32"
    else:
        constexprs["scales_ptr"] = None
    strides = [name for name in _rotate_and_write_kv.arg_names if name.endswith("_stride")]
    signature |= {name: "i32" if name.startswith("scales") else "i32:16" for name in strides}
    name = f"rotate_and_write_kv_{num_heads}_{num_kv_heads}_{head_dim}" + (f"_turned_{turned}" if turned < head_dim else "")
    return Specialisation(f"{name}_{cache}", _rotate_and_write_kv, signature, constexprs, options)
