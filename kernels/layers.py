"""What a decoder layer computes beside attention, in plain torch: the specification of every other implementation.

Here live normalisation, the gated activation, rotary positions with the write of new keys, and linear layers. Which modules of
a model are replaced by them is decided in engine/fusion.py, which implementation computes them in kernels/dispatch.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import write_kv

Linear = Callable[..., Tensor]
"""`(x [T, in], *, residual [T, out] or None) -> [T, out]`: `x weight^T + bias + residual`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedLayer:
    """What one layer is made of."""

    before: Tensor
    """`[H]` float32, weight of the norm before attention."""
    between: Tensor
    """`[H]` float32, of the norm before the products of the gate."""
    eps: float
    qkv: Any
    """As the other products what `LayerKernels.linear` has made."""
    out: Any
    gate_up: Any
    down: Any
    scale: float
    """Of attention's scores."""
    window: int | None


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` of each row of `x = hidden + residual`, computed in fp32.

    Args:
        hidden: `[T, H]`.
        weight: `[H]`.
        eps: added to the mean of squares.
        residual: `[T, H]`, in the dtype of `hidden`.
        offset: 1 for models that store the weight's distance from 1, as Gemma.

    Returns:
        The norm and `x`, both `[T, H]` in the dtype of `hidden`. The norm is of `x` before it is rounded to that dtype.
    """
    x = hidden.float() if residual is None else hidden.float() + residual.float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    return normed.to(hidden.dtype), hidden if residual is None else x.to(hidden.dtype)


def norm_heads(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    num_kv_heads: int,
    *,
    norm: Callable[..., tuple[Tensor, Tensor]] = rms_norm,
) -> Tensor:
    """`rms_norm` of each query and each key by itself, as in Qwen3.

    Args:
        qkv: `[T, (num_heads + 2 * num_kv_heads) * head_dim]`: queries, keys, values; it may be changed in place.
        query_weight: `[head_dim]`.
        key_weight: as `query_weight`.
        eps: as for `rms_norm`.
        num_kv_heads: heads of keys, and of values.
        norm: what computes them.

    Returns:
        As `qkv`; it may be the same tensor.
    """
    size = len(key_weight)
    num_keys = num_kv_heads * size
    query, key, value = torch.split(qkv, [qkv.shape[1] - 2 * num_keys, num_keys, num_keys], dim=1)
    parts = [
        norm(part.reshape(-1, size), weight, eps)[0].view(part.shape)
        for part, weight in ((query, query_weight), (key, key_weight))
    ]
    return torch.cat((*parts, value), dim=1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` in fp32: `gate_up` `[T, 2 * I]` holds the gates, then what they let through; `[T, I]` in its dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate_and_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache_layer: Tensor,
    slot_mapping: Tensor,
    plan: Any = None,
    *,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Turn queries and keys by their positions, store keys and values at their slots, return the queries.

    The first R elements of a head are turned in pairs (i, i + R / 2), in fp32: `x * cos + rotate_half(x) * sin`.

    Args:
        qkv: `[T, (num_heads + 2 * num_kv_heads) * head_dim]`: the queries of all heads, their keys, their values.
        cos: `[T, R]`, R at most head_dim and even, both halves equal.
        sin: as `cos`.
        kv_cache_layer: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`, changed in place.
        slot_mapping: as for `reference.write_kv`.
        plan: as for `reference.write_kv`.
        kv_scales: as for `reference.write_kv`.

    Returns:
        `[T, num_heads, head_dim]` in the dtype of `qkv`.
    """
    query, key, value = rotate(qkv, cos, sin, *kv_cache_layer.shape[3:])
    write_kv(key, value, kv_cache_layer, slot_mapping, plan, kv_scales=kv_scales)
    return query


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of `rotate_and_write_kv`, turned, and the values: `[T, heads, head_dim]` each; queries contiguous."""
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    turned, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    size = cos.shape[-1]
    first, second = turned[..., : size // 2].float(), turned[..., size // 2 : size].float()
    half_turned = torch.cat((-second, first), dim=-1)
    x = turned[..., :size].float() * cos.float().unsqueeze(1) + half_turned * sin.float().unsqueeze(1)
    turned = torch.cat((x.to(qkv.dtype), turned[..., size:]), dim=-1)
    return turned[:, :-num_kv_heads].contiguous(), turned[:, -num_kv_heads:], value


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Make a linear layer of `weight` `[out, in]` and `bias` `[out]`."""

    def apply(x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return F.linear(x, weight, bias)
        return torch.addmm(residual if bias is None else residual + bias, x, weight.T)  # added before it is rounded

    return apply
