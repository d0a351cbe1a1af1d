"""Root mean square normalisation in Triton, with the residual added on the way; the twin is in kernels/layers.py.

Relies on rows that fit the registers of one program, which holds up to a hidden size of 16,384. When it is used is decided in
kernels/dispatch.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.specialisation import Specialisation

# Numbers of one program at least, and per thread: eight in 16 bits are one load of 16 bytes. Untuned: chosen without a GPU.
_TILE = 1024
_PER_THREAD = 8


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `kernels.layers.rms_norm`, in one launch: `hidden` `[T, H]` may be a slice of a wider tensor."""
    x = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    if residual is not None and residual.stride(-1) != 1:
        residual = residual.contiguous()
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = hidden if residual is None else torch.empty_like(normed)
    constexprs, options = _shape(x.shape[1])
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    grid = (triton.cdiv(len(x), constexprs["rows"]),)  # Triton launches nothing for an empty grid
    output = None if residual is None else added
    _rms_norm[grid](x, residual, weight, normed, output, len(x), *strides, eps, offset, **constexprs, **options)
    return normed, added


def norm_heads(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, num_kv_heads: int) -> Tensor:
    """As `kernels.layers.norm_heads`, in place and in one launch."""
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    size = len(key_weight)
    num_turned = qkv.shape[1] // size - num_kv_heads
    constexprs, options = _shape(size)
    constexprs |= {"num_queries": num_turned - num_kv_heads, "num_normed": num_turned}
    grid = (triton.cdiv(len(qkv) * num_turned, constexprs["rows"]),)
    _norm_heads[grid](qkv, query_weight, key_weight, len(qkv) * num_turned, qkv.stride(0), eps, **constexprs, **options)
    return qkv


def specialisations() -> list[Specialisation]:
    """With and without a residual: hidden states of small and large models; heads of 128."""
    cases = [(4096, "bf16", True), (4096, "bf16", False), (576, "bf16", True), (8192, "fp32", True)]
    constexprs, options = _shape(128)
    heads = dict.fromkeys(("qkv_ptr", "query_weight_ptr", "key_weight_ptr"), "*bf16")
    heads |= {"num_rows": "i32", "stride": "i32:16", "eps": "fp32"}
    constexprs |= {"num_queries": 16, "num_normed": 24}
    return [
        *(_specialisation(*case) for case in cases),
        Specialisation("norm_heads_16_8_128_bf16", _norm_heads, heads, constexprs, options),
    ]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    hidden_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    added_ptr,
    num_rows,
    hidden_stride,
    residual_stride,
    eps,
    offset,
    size: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
):
    # x = hidden + residual; normed = x / sqrt(mean(x^2) + eps) * (weight + offset), all in fp32.
    # A program owns `rows` whole rows, so that sums cross no program and do not depend on the number of rows.
    # Outputs are contiguous. Masks guard rows beyond the last and, where `size` is no power of two, columns beyond it.
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None].to(tl.int64)
    column = tl.arange(0, block)[None, :]
    is_inside = (row < num_rows) & (column < size)
    x = tl.load(hidden_ptr + row * hidden_stride + column, mask=is_inside, other=0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=is_inside, other=0).to(tl.float32)
        tl.store(added_ptr + row * size + column, x, mask=is_inside)
    factor = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0).to(tl.float32) + offset
    tl.store(normed_ptr + row * size + column, x * factor[:, None] * weight, mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_heads(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    num_rows,
    stride,
    eps,
    size: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    num_queries: tl.constexpr,
    num_normed: tl.constexpr,
):
    # x = x / sqrt(mean(x^2) + eps) * weight for each head x of queries and keys, in fp32, in place.
    # A program owns `rows` rows (token, head) = divmod(row, num_normed). Masks guard rows beyond the last and, where `size` is
    # no power of two, columns beyond it; offsets of tokens are int64.
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None].to(tl.int64)
    head = row % num_normed
    column = tl.arange(0, block)[None, :]
    is_inside = (row < num_rows) & (column < size)
    place = qkv_ptr + row // num_normed * stride + head * size + column
    x = tl.load(place, mask=is_inside, other=0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
    query_weight = tl.load(query_weight_ptr + column, mask=column < size, other=0).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + column, mask=column < size, other=0).to(tl.float32)
    weight = tl.where(head < num_queries, query_weight, key_weight)
    tl.store(place, x * factor[:, None] * weight, mask=is_inside)


def _shape(size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constexprs and options for rows of `size` numbers."""
    block = triton.next_power_of_2(size)
    rows = max(1, _TILE // block)
    num_warps = min(32, max(1, rows * block // (32 * _PER_THREAD)))
    return {"size": size, "block": block, "rows": rows}, {"num_warps": num_warps}


def _specialisation(size: int, dtype: str, has_residual: bool) -> Specialisation:
    constexprs, options = _shape(size)
    signature = {"hidden_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "normed_ptr": f"*{dtype}"}
    if has_residual:
        signature |= {"residual_ptr": f"*{dtype}", "added_ptr": f"*{dtype}"}
    else:
        constexprs |= {"residual_ptr": None, "added_ptr": None}
    signature |= {"num_rows": "i32", "hidden_stride": "i32:16", "residual_stride": "i32:16", "eps": "fp32", "offset": "fp32"}
    name = f"rms_norm_{size}_{dtype}" + ("_residual" if has_residual else "")
    return Specialisation(name, _rms_norm, signature, constexprs, options)
