"""The one place that chooses between implementations of the kernels.

The reference in plain torch runs everywhere, kernels/invariant.py is the one whose bits do not depend on the batch,
kernels/cpu is compiled for the processor at hand, and kernels/triton for a GPU.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import blocks, invariant, layers, reference, sampling


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """One implementation; meaning, shapes and errors are those of the twins in kernels/reference.py."""

    name: str
    write_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    plan: Callable[[Tensor, Tensor, Tensor, Tensor, reference.HostLengths], Any]
    """`(block_tables, query_start, context_lens, slot_mapping, host)` -> the `plan` of both, made once per step for all layers.

    It reads lengths from `host`, never from the device. Where `host.is_decode`, only their number and largest may decide what
    is launched: a graph is captured with the longest contexts and replayed with shorter ones."""


REFERENCE = AttentionKernels("reference", reference.write_kv, reference.paged_attention, reference.Plan)
BATCH_INVARIANT = AttentionKernels("invariant", reference.write_kv, invariant.paged_attention, invariant.Plan)


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """What a fused decoder layer is made of; meaning, shapes and errors are those of the twins in kernels/layers.py."""

    name: str
    linear: Callable[..., layers.Linear]
    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    norm_heads: Callable[..., Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    rotate_and_write_kv: Callable[..., Tensor]
    stack: Callable[[list[layers.StackedLayer]], Any] | None = None
    """All layers as one operation, where there is one: kernels/cpu/stack.py says what it takes."""
    packs_weights: bool = False
    """What `linear` makes keeps weights of its own; then activations are float32, and so are the weights of norms."""


REFERENCE_LAYERS = LayerKernels(
    "reference", layers.linear, layers.rms_norm, layers.norm_heads, layers.silu_and_mul, layers.rotate_and_write_kv
)


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """What moves KV blocks; meaning and shapes are those of the twins in kernels/blocks.py."""

    name: str
    copy: Callable[[Tensor, Tensor, Tensor], None]
    gather: Callable[[Tensor, Tensor, Tensor], None]
    scatter: Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """The part of sampling that has kernels of its own; meaning and shapes are those of the twins in kernels/sampling.py."""

    name: str
    largest: Callable[[Tensor], tuple[Tensor, Tensor]]
    uniform: Callable[[Tensor, Tensor, Tensor], Tensor]
    draw: Callable[..., Tensor]


def attention_kernels(device: torch.device, *, batch_invariant: bool = False, is_reference: bool = False) -> AttentionKernels:
    """Return the fastest implementation that runs on the device, and whose bits are as wanted."""
    if batch_invariant:
        return BATCH_INVARIANT
    if is_reference:
        return REFERENCE
    if device.type == "cuda":
        return _triton_attention()
    from kernels.cpu import attention, kv  # numba takes half a second to import

    return AttentionKernels("cpu", kv.write_kv, attention.paged_attention, attention.Plan)


def layer_kernels(device: torch.device, *, is_int8: bool = False) -> LayerKernels:
    """Return the fastest implementation that runs on the device; in int8 linear layers round weights and activations."""
    if device.type == "cuda":
        return _triton_layers()
    from kernels.cpu import kv
    from kernels.cpu import layers as cpu_layers
    from kernels.cpu.linear import PackedLinear
    from kernels.cpu.stack import Stack

    return LayerKernels(
        "cpu",
        partial(PackedLinear, is_int8=is_int8),
        cpu_layers.rms_norm,
        partial(layers.norm_heads, norm=cpu_layers.rms_norm),
        cpu_layers.silu_and_mul,
        kv.rotate_and_write_kv,
        Stack,
        packs_weights=True,
    )


@cache
def block_kernels(device: torch.device) -> BlockKernels:
    """Return what moves blocks on the device."""
    if device.type == "cuda":
        return _triton_blocks()
    return BlockKernels("torch", blocks.copy_blocks, blocks.gather_blocks, blocks.scatter_blocks)


@cache
def sampling_kernels(device: torch.device) -> SamplingKernels:
    """Return what chooses tokens on the device."""
    if device.type == "cuda":
        return _triton_sampling()
    return SamplingKernels("torch", sampling.largest, sampling.uniform, sampling.draw)


def _triton_attention() -> AttentionKernels:
    _choose_fusion()
    from kernels.triton import attention, kv, plan

    def make_plan(
        tables: Tensor, query_start: Tensor, context_lens: Tensor, slot_mapping: Tensor, host: reference.HostLengths
    ) -> plan.Plan:
        return plan.Plan(tables, query_start, context_lens, slot_mapping, query_lens=np.diff(host.query_start))

    return AttentionKernels("triton", kv.write_kv, attention.paged_attention, make_plan)


def _triton_layers() -> LayerKernels:
    _choose_fusion()
    from kernels.triton import activation, norm, rotary

    return LayerKernels(
        "triton", layers.linear, norm.rms_norm, norm.norm_heads, activation.silu_and_mul, rotary.rotate_and_write_kv
    )


def _triton_blocks() -> BlockKernels:
    _choose_fusion()
    from kernels.triton import blocks

    return BlockKernels("triton", blocks.copy_blocks, blocks.gather_blocks, blocks.scatter_blocks)


def _triton_sampling() -> SamplingKernels:
    _choose_fusion()
    from kernels.triton import sampling

    return SamplingKernels("triton", sampling.largest, sampling.uniform, sampling.draw)


def _choose_fusion() -> None:
    """Say that a product and a sum may be rounded once: Triton 3.9 warns where nobody has said."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
