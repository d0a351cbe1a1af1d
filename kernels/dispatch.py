"""The one place that chooses between implementations of the kernels, today two in plain torch.

One is the reference; the other's bits do not depend on the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import invariant, reference


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """One implementation; meaning, shapes and errors are those of the twins in kernels/reference.py."""

    name: str
    write_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    plan: Callable[[Tensor, Tensor, Tensor, Tensor], Any]
    """`(block_tables, query_start, context_lens, slot_mapping)` -> the `plan` of both, made once per step for all layers."""


REFERENCE = AttentionKernels("reference", reference.write_kv, reference.paged_attention, reference.Plan)
BATCH_INVARIANT = AttentionKernels("invariant", reference.write_kv, invariant.paged_attention, invariant.Plan)


def attention_kernels(device: torch.device, *, batch_invariant: bool = False) -> AttentionKernels:  # noqa: ARG001 - will matter
    """Return the fastest implementation that runs on the device, and whose bits are as wanted."""
    return BATCH_INVARIANT if batch_invariant else REFERENCE
