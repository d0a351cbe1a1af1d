"""One step's tensors, made once from the scheduler's decision.

Relies on block tables and computed counts that already cover the step. Sequences lie one after the other, without padding; what
differs per layer is left to the kernels, what is drawn to the sampler.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.decision import ScheduledSequence
from engine.sampler import Row
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """A flattened batch of T tokens of S sequences, R of whose logits are wanted, on the model's device.

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
    logits_indices: Tensor
    """`[R]` int64: the rows that are sampled, each as often as there are samples, then the prompt rows that are scored."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Tokens that the step before has sampled and that nobody has read: they are fed on the device."""

    token_ids: Tensor
    """`[R]` int64."""
    rows: Mapping[Sequence, int]
    """Where each sequence's token is."""


def sampled_rows(items: Collection[ScheduledSequence]) -> list[Row]:
    """What is sampled in a step, in the order of the logits: a row for each choice that continues a sequence."""
    return [
        Row(item.sequence, item.sequence.choice + choice, item.sequence.num_computed_tokens - item.sequence.num_prompt_tokens)
        for item in items
        for choice in range(item.num_samples)
    ]


def scored_positions(item: ScheduledSequence) -> range:
    """The prompt positions of a part of a step whose next token's log probability is asked for."""
    end = min(item.sequence.num_computed_tokens, item.sequence.num_prompt_tokens - 1)
    return range(end - item.num_scored, end)


def build(
    items: Collection[ScheduledSequence], block_size: int, device: torch.device, in_flight: InFlight | None = None
) -> ModelInput:
    """Lay the new tokens of at least one sequence out in one batch. Rows keep the order of `items`."""
    query_lens = np.array([item.num_tokens for item in items], dtype=np.int64)
    contexts = np.array([item.sequence.num_computed_tokens for item in items], dtype=np.int64)
    starts = contexts - query_lens
    query_start = np.concatenate(([0], query_lens.cumsum()))
    tables = _block_tables([item.sequence.block_table for item in items], -(-contexts // block_size))
    rows = np.repeat(np.arange(len(items)), query_lens)
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[rows]
    slots = tables[rows, positions // block_size] * np.int64(block_size) + positions % block_size

    def tensor(values: np.ndarray, dtype: type[np.integer] = np.int64) -> Tensor:
        return torch.from_numpy(values.astype(dtype, copy=False)).to(device)

    return ModelInput(
        input_ids=_input_ids(items, starts, contexts, in_flight, device),
        positions=tensor(positions),
        slot_mapping=tensor(slots),
        block_tables=tensor(tables, np.int32),
        query_start=tensor(query_start, np.int32),
        context_lens=tensor(contexts, np.int32),
        logits_indices=tensor(_logits_indices(items, query_start)),
    )


def _input_ids(
    items: Collection[ScheduledSequence],
    starts: np.ndarray,
    contexts: np.ndarray,
    in_flight: InFlight | None,
    device: torch.device,
) -> Tensor:
    """`[T]` int64. A token in flight is the last one of its sequence."""
    known = [item.sequence.token_ids[start:end] for item, start, end in zip(items, starts, contexts, strict=True)]
    targets, sources, num_before = [], [], 0
    for item, ids in zip(items, known, strict=True):
        num_before += item.num_tokens
        if len(ids) < item.num_tokens:
            assert in_flight is not None, "a token is neither known nor in flight"
            ids.append(0)
            targets.append(num_before - 1)
            sources.append(in_flight.rows[item.sequence])
    input_ids = torch.from_numpy(np.fromiter(chain.from_iterable(known), np.int64, num_before)).to(device)
    if targets:
        assert in_flight is not None
        input_ids[torch.tensor(targets, device=device)] = in_flight.token_ids[torch.tensor(sources, device=device)]
    return input_ids


def _logits_indices(items: Collection[ScheduledSequence], query_start: np.ndarray) -> np.ndarray:
    """`[R]` int64, see `ModelInput`."""
    sampled = np.repeat(query_start[1:] - 1, [item.num_samples for item in items])
    scored = [
        query_start[row] + position - (item.sequence.num_computed_tokens - item.num_tokens)
        for row, item in enumerate(items)
        if item.num_scored
        for position in scored_positions(item)
    ]
    return np.concatenate((sampled, np.array(scored, dtype=np.int64)))


def _block_tables(tables: list[list[int]], num_blocks: np.ndarray) -> np.ndarray:
    """The first `num_blocks[i]` ids of each table, padded with the null block: `[S, max(num_blocks)]` int64."""
    padded = np.zeros((len(tables), int(num_blocks.max())), dtype=np.int64)
    for row, (table, used) in enumerate(zip(tables, num_blocks.tolist(), strict=True)):
        padded[row, :used] = table[:used]
    return padded
