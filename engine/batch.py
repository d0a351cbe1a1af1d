"""One step's tensors, made once from the scheduler's decision.

Relies on block tables that already cover the step. Sequences lie one after the other, without padding; what differs per layer
is left to the kernels, what is drawn to the sampler.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.sampler import SamplingInput
from engine.scheduler import ScheduledSequence, SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """A flattened batch of T tokens of S sequences, R of which are sampled, on the model's device.

    query_start  0            3        4                 T
                 [ sequence 0 )[ seq. 1 )[ sequence 2     )   rows of each sequence's new tokens
    """

    input_ids: Tensor
    """`[T]` int64."""
    positions: Tensor
    """`[T]` int64, counted in each sequence."""
    slot_mapping: Tensor
    """`[T]` int64, where each token's keys and values are stored: block id * block_size + offset."""
    block_tables: Tensor
    """`[S, max_blocks]` int32, padded with the null block 0."""
    query_start: Tensor
    """`[S + 1]` int32."""
    context_lens: Tensor
    """`[S]` int32, computed and new tokens."""
    max_query_len: int
    max_context_len: int
    logits_indices: Tensor
    """`[R]` int64, the rows whose next token is sampled."""
    sampling: SamplingInput


def build(output: SchedulerOutput, block_size: int, device: torch.device) -> ModelInput:
    """Turn a non-empty decision into tensors. Rows keep the decision's order."""
    return flatten(output.scheduled, block_size, device)


def flatten(items: Collection[ScheduledSequence], block_size: int, device: torch.device) -> ModelInput:
    """Lay the new tokens of at least one sequence out in one batch; their block tables cover them."""
    query_lens = np.array([item.num_tokens for item in items], dtype=np.int64)
    computed = np.array([item.sequence.num_computed_tokens for item in items], dtype=np.int64)
    contexts = computed + query_lens
    query_start = np.concatenate(([0], query_lens.cumsum()))
    tables = _block_tables([item.sequence.block_table for item in items], -(-contexts // block_size))
    rows = np.repeat(np.arange(len(items)), query_lens)
    positions = np.arange(query_start[-1]) + (computed - query_start[:-1])[rows]
    slots = tables[rows, positions // block_size] * np.int64(block_size) + positions % block_size
    known = [item.sequence.token_ids[start:end] for item, start, end in zip(items, computed, contexts, strict=True)]
    samples = np.array([item.samples for item in items], dtype=np.bool_)

    def tensor(values: np.ndarray, dtype: type[np.integer] = np.int64) -> Tensor:
        return torch.from_numpy(values.astype(dtype, copy=False)).to(device)

    return ModelInput(
        input_ids=tensor(np.fromiter(chain.from_iterable(known), np.int64, int(query_start[-1]))),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        block_tables=tensor(tables, np.int32),
        query_start=tensor(query_start, np.int32),
        context_lens=tensor(contexts, np.int32),
        max_query_len=int(query_lens.max()),
        max_context_len=int(contexts.max()),
        logits_indices=tensor(query_start[1:][samples] - 1),
        sampling=SamplingInput.of([item.sequence for item in items if item.samples], device),
    )


def _block_tables(tables: list[list[int]], num_blocks: np.ndarray) -> np.ndarray:
    """The first `num_blocks[i]` ids of each table, padded with the null block: `[S, max(num_blocks)]` int64."""
    padded = np.zeros((len(tables), int(num_blocks.max())), dtype=np.int64)
    for row, (table, used) in enumerate(zip(tables, num_blocks.tolist(), strict=True)):
        padded[row, :used] = table[:used]
    return padded
