"""The one place that chooses between implementations of the kernels. Today there is one: the reference in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import reference


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """One implementation; meaning, shapes and errors are those of the twins in kernels/reference.py."""

    name: str
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Any], None]
    paged_attention: Callable[..., Tensor]
    plan: Callable[[Tensor, Tensor, Tensor, Tensor], Any]
    """`(block_tables, query_start, context_lens, slot_mapping)` -> the `plan` of both, made once per step for all layers."""


REFERENCE = AttentionKernels("reference", reference.write_kv, reference.paged_attention, reference.Plan)


def attention_kernels(device: torch.device) -> AttentionKernels:  # noqa: ARG001 - the choice will depend on it
    """Return the fastest implementation that runs on the device."""
    return REFERENCE
