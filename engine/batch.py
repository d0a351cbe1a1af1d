"""One step's tensors, made once from the scheduler's decision.

Relies on block tables and computed counts that already cover the step, and on staging.py for the way to the device. Sequences
lie one after the other; a step in which each decodes one token is padded to a size that graphs were captured for. What differs
per layer is left to the kernels, what is drawn to the sampler.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch import Tensor

from engine.decision import ScheduledSequence
from engine.sampler import Row
from engine.sequence import Sequence
from engine.staging import Staging
from kernels.reference import HostLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """A flattened batch of T tokens of S sequences, R of whose logits are wanted, on the model's device.

    query_start  0            3        4                 T
                 [ sequence 0 )[ seq. 1 )[ sequence 2     )   rows of each sequence's new tokens

    Padding is sequences of one token that stand at the end, are written nowhere and see nothing.
    """

    input_ids: Tensor
    """`[T]` int64."""
    positions: Tensor
    """`[T]` int64, counted in each sequence."""
    slot_mapping: Tensor
    """`[T]` int64, where each token's keys and values are stored: block id * block_size + offset; -1 for padding."""
    block_tables: Tensor
    """`[S, max_blocks]` int32, padded with the null block 0."""
    query_start: Tensor
    """`[S + 1]` int32."""
    context_lens: Tensor
    """`[S]` int32, computed and new tokens; 0 for padding."""
    logits_indices: Tensor
    """`[R]` int64: the rows that are sampled, each as often as there are samples, then the prompt rows that are scored."""
    host: HostLengths
    """What `query_start` and `context_lens` hold."""
    is_decode: bool = False
    """Every sequence has one token, and the first R are sampled once each: what a graph computes."""


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
    items: Collection[ScheduledSequence],
    block_size: int,
    staging: Staging,
    in_flight: InFlight | None = None,
    decode_sizes: Items[int] = (),
) -> ModelInput:
    """Lay the new tokens of at least one sequence out in one batch, and send it with what was added to `staging` before.

    Rows keep the order of `items`. A step that only decodes is padded to the next of the ascending `decode_sizes`, if any.
    """
    query_lens = np.array([item.num_tokens for item in items], dtype=np.int64)
    contexts = np.array([item.sequence.num_computed_tokens for item in items], dtype=np.int64)
    starts = contexts - query_lens
    query_start = np.concatenate(([0], query_lens.cumsum()))
    tables = _block_tables([item.sequence.block_table for item in items], -(-contexts // block_size))
    rows = np.repeat(np.arange(len(items)), query_lens)
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[rows]
    slots = tables[rows, positions // block_size] * np.int64(block_size) + positions % block_size
    input_ids, targets, sources = _input_ids(items, starts, contexts, in_flight)
    is_decode = all(item.num_tokens == item.num_samples == 1 and not item.num_scored for item in items)
    missing = _num_missing(len(items), decode_sizes) if is_decode else 0
    lengths = HostLengths(
        np.concatenate((query_start, query_start[-1] + np.arange(1, missing + 1))).astype(np.int32),
        _padded(contexts, missing).astype(np.int32),
    )
    batch = ModelInput(
        input_ids=staging.add(_padded(input_ids, missing)),
        positions=staging.add(_padded(positions, missing)),
        slot_mapping=staging.add(_padded(slots, missing, -1)),
        block_tables=staging.add(_padded(tables, missing).astype(np.int32)),
        query_start=staging.add(lengths.query_start),
        context_lens=staging.add(lengths.context_lens),
        logits_indices=staging.add(_logits_indices(items, query_start)),
        host=lengths,
        is_decode=is_decode,
    )
    places = [staging.add(np.array(rows, dtype=np.int64)) for rows in (targets, sources) if rows]
    staging.send()
    if in_flight is not None and places:
        target, source = places
        batch.input_ids.index_copy_(0, target, in_flight.token_ids.index_select(0, source))
    return batch


def _num_missing(num_sequences: int, sizes: Items[int]) -> int:
    """Sequences that are lacking to the next size; none where no size is as large."""
    index = bisect_left(sizes, num_sequences)
    return sizes[index] - num_sequences if index < len(sizes) else 0


def _padded(rows: np.ndarray, missing: int, value: int = 0) -> np.ndarray:
    return np.concatenate((rows, np.full((missing, *rows.shape[1:]), value, rows.dtype))) if missing else rows


def _input_ids(
    items: Collection[ScheduledSequence], starts: np.ndarray, contexts: np.ndarray, in_flight: InFlight | None
) -> tuple[np.ndarray, list[int], list[int]]:
    """`[T]` int64, and for tokens in flight where they belong and where they are. One is the last of its sequence."""
    known = [item.sequence.token_ids[start:end] for item, start, end in zip(items, starts, contexts, strict=True)]
    targets, sources, num_before = [], [], 0
    for item, ids in zip(items, known, strict=True):
        num_before += item.num_tokens
        if len(ids) < item.num_tokens:
            assert in_flight is not None, "a token is neither known nor in flight"
            ids.append(0)
            targets.append(num_before - 1)
            sources.append(in_flight.rows[item.sequence])
    return np.fromiter(chain.from_iterable(known), np.int64, num_before), targets, sources


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
