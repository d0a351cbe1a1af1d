"""The write of new keys and values into KV blocks on a GPU, as kernels/reference.py defines it.

Relies on a cache whose blocks are contiguous inside; how far apart they are is free, since a block holds all layers. What is
cached in one byte an element, int8 or float8_e4m3fn, has a float32 scale for each token and head beside it. `store_vectors` is
for other kernels that have keys or values in hand. Reading them is left to attention.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.specialisation import Specialisation

FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


def format_of(dtype: torch.dtype) -> str:
    """How numbers of a cache of this dtype are stored: `int8` and `fp8` with scales, `plain` otherwise."""
    return FORMATS.get(dtype, "plain")


def raw(kv_cache_layer: Tensor) -> Tensor:
    """Return the cache as a kernel takes it: fp8 as bytes, which compilers know for every GPU."""
    return kv_cache_layer.view(torch.uint8) if kv_cache_layer.dtype == torch.float8_e4m3fn else kv_cache_layer


@triton.jit
def to_fp8(x):
    """Round float32 to the bits of float8_e4m3fn, to nearest even, beyond 448 to 448.

    Done with integers, as sm_80 has no such instruction: above 2^-6 the exponent is rebiased by 120 and the mantissa cut to 3
    bits; below, the code is the number of steps of 2^-9.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    steps = (tl.abs(x) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0x3C800000, steps, tl.minimum(normal, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_vectors(
    x,
    cache,
    scales,
    slot,
    stride_block,
    stride_scales_block,
    part: tl.constexpr,
    kv_format: tl.constexpr,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    head_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    """Store one token's vectors x `[head_block, dim_block]`, zero beyond heads and head size, as keys (part 0) or values (1).

    int8: number = round(x / scale), scale = max |x| / 127; fp8: the same with 448. Twin: `reference.quantise`.
    """
    block = (slot // block_size).to(tl.int64)
    row = part * block_size + slot % block_size
    head = tl.arange(0, head_block)
    column = tl.arange(0, dim_block)
    if kv_format != "plain":
        x = x.to(tl.float32)
        # A maximum ignores NaN, and a product with zero does not.
        largest = tl.max(tl.abs(x), axis=1) + tl.sum(x * 0.0, axis=1)
        scale = tl.math.div_rn(largest, tl.full([head_block], 127.0 if kv_format == "int8" else 448.0, tl.float32))
        at = scales + block * stride_scales_block + row * num_kv_heads + head
        tl.store(at, scale, mask=head < num_kv_heads)
        x = tl.math.div_rn(x, tl.maximum(scale, 1.1754943508222875e-38)[:, None] + tl.zeros_like(x))
        # Adding 1.5 * 2^23 leaves float32 no room for a fraction: to the nearest whole number, a half to the even one.
        x = (x + 12582912.0) - 12582912.0 if kv_format == "int8" else to_fp8(x)
    pointers = cache + block * stride_block + (row * num_kv_heads + head[:, None]) * head_dim + column[None, :]
    mask = (head < num_kv_heads)[:, None] & (column < head_dim)[None, :]
    tl.store(pointers, x.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def write_kv_kernel(
    key,
    value,
    cache,
    scales,
    slot_mapping,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_scales_block,
    kv_format: tl.constexpr,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    head_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    """cache[slot] = key[t], value[t] for each token t with a slot >= 0.

    A program owns the keys (axis 1: 0) or the values (1) of one token: `[num_kv_heads, head_dim]`, contiguous in the block, so
    that its stores lie in one piece. Masks guard what pads heads and head size to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, head_block)
    column = tl.arange(0, dim_block)
    mask = (head < num_kv_heads)[:, None] & (column < head_dim)[None, :]
    if tl.program_id(1) == 0:
        pointers = key + token * stride_key_token + head[:, None] * stride_key_head + column[None, :]
        new = tl.load(pointers, mask=mask, other=0.0)
        store_vectors(
            new, cache, scales, slot, stride_block, stride_scales_block,
            0, kv_format, block_size, num_kv_heads, head_dim, head_block, dim_block,
        )  # fmt: skip
    else:
        pointers = value + token * stride_value_token + head[:, None] * stride_value_head + column[None, :]
        new = tl.load(pointers, mask=mask, other=0.0)
        store_vectors(
            new, cache, scales, slot, stride_block, stride_scales_block,
            1, kv_format, block_size, num_kv_heads, head_dim, head_block, dim_block,
        )  # fmt: skip


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache_layer: Tensor,
    slot_mapping: Tensor,
    plan: Any = None,  # noqa: ARG001 - the twin's
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """Store the keys and values of new tokens at their slots: as `reference.write_kv`, of which `plan` is not needed here.

    Blocks, and those of the scales, are contiguous inside; keys and values are contiguous along the head size, or copied.
    """
    assert kv_cache_layer[0].is_contiguous()
    assert kv_scales is None or kv_scales[0].is_contiguous()
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    shape = _shape(*kv_cache_layer.shape[2:])
    write_kv_kernel[(len(slot_mapping), 2)](
        key,
        value,
        raw(kv_cache_layer),
        kv_scales,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        kv_cache_layer.stride(0),
        0 if kv_scales is None else kv_scales.stride(0),
        kv_format=format_of(kv_cache_layer.dtype),
        **shape,
        **_options(shape),
    )


def _shape(block_size: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "head_block": triton.next_power_of_2(num_kv_heads),
        "dim_block": triton.next_power_of_2(head_dim),
    }


def _options(shape: dict[str, int]) -> dict[str, int]:
    """Eight elements a thread, 16 bytes in 16 bits; untuned."""
    return {"num_warps": min(8, max(1, shape["head_block"] * shape["dim_block"] // 256))}


def specialisations() -> list[Specialisation]:
    """What models with 8 KV heads compile, in bfloat16 and with one byte an element; and an odd shape."""
    shapes = [(8, 128, "plain"), (8, 128, "int8"), (8, 128, "fp8"), (3, 80, "plain")]
    return [_specialisation(*shape) for shape in shapes]


def _specialisation(num_kv_heads: int, head_dim: int, kv_format: str) -> Specialisation:
    element = {"plain": "*bf16", "int8": "*i8", "fp8": "*u8"}[kv_format]
    shape = _shape(16, num_kv_heads, head_dim)
    constexprs: dict[str, Any] = {"kv_format": kv_format, **shape}
    signature = {"key": "*bf16", "value": "*bf16", "cache": element, "slot_mapping": "*i64"}
    if kv_format == "plain":
        constexprs["scales"] = None
    else:
        signature["scales"] = "*fp32"
    strides = [name for name in write_kv_kernel.arg_names if name.startswith("stride_")]
    signature |= {name: "i32" if "scales" in name else "i32:16" for name in strides}
    name = f"write_kv_{num_kv_heads}_{head_dim}_{kv_format}"
    return Specialisation(name, write_kv_kernel, signature, constexprs, _options(shape))
