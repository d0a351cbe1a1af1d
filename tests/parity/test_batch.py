"""From the scheduler's decision to one step's tensors."""

import pytest
import torch

from engine.batch import InFlight, ModelInput, build, sampled_rows, scored_positions
from engine.decision import ScheduledSequence
from engine.request import Request, SamplingParams
from engine.sequence import Sequence

CPU = torch.device("cpu")


def item(tokens: list[int], computed: int, count: int, table: list[int], samples: int, scored: int = 0) -> ScheduledSequence:
    request = Request(request_id="", prompt_token_ids=tuple(tokens), params=SamplingParams())
    sequence = Sequence(request, (0, 0, 0), frozenset())
    sequence.num_computed_tokens = computed + count
    sequence.block_table = table
    return ScheduledSequence(sequence, count, samples, scored)


@pytest.fixture
def batch() -> ModelInput:
    """A decode at position 9, a chunk of positions 8 to 10, and a whole prompt of two."""
    return build(
        [
            item(list(range(10, 20)), 9, 1, [7, 2], samples=1),
            item(list(range(30, 50)), 8, 3, [4, 9, 1], samples=0),
            item([60, 61], 0, 2, [3], samples=1),
        ],
        block_size=8,
        device=CPU,
    )


def test_new_tokens_lie_one_sequence_after_the_other(batch: ModelInput) -> None:
    assert batch.input_ids.tolist() == [19, 38, 39, 40, 60, 61]
    assert batch.query_start.tolist() == [0, 1, 4, 6]


def test_positions_count_in_each_sequence(batch: ModelInput) -> None:
    assert batch.positions.tolist() == [9, 8, 9, 10, 0, 1]
    assert batch.context_lens.tolist() == [10, 11, 2]


def test_slots_follow_the_block_tables(batch: ModelInput) -> None:
    assert batch.slot_mapping.tolist() == [2 * 8 + 1, 9 * 8, 9 * 8 + 1, 9 * 8 + 2, 3 * 8, 3 * 8 + 1]


def test_block_tables_are_cut_to_what_the_step_reads_and_padded_with_the_null_block(batch: ModelInput) -> None:
    assert batch.block_tables.tolist() == [[7, 2], [4, 9], [3, 0]]


def test_only_the_last_row_of_a_sampled_sequence_is_sampled(batch: ModelInput) -> None:
    assert batch.logits_indices.tolist() == [0, 5]


def test_a_step_of_chunks_alone_samples_nothing() -> None:
    batch = build([item([1, 2, 3], 0, 2, [1], samples=0)], 8, CPU)

    assert batch.logits_indices.shape == (0,)


def test_slots_beyond_32_bits_are_exact() -> None:
    batch = build([item([5], 0, 1, [2**30], samples=1)], 256, CPU)

    assert batch.slot_mapping.tolist() == [2**38]


def test_types_are_those_of_the_kernels(batch: ModelInput) -> None:
    kernels = (batch.block_tables, batch.query_start, batch.context_lens)
    indices = (batch.input_ids, batch.positions, batch.slot_mapping, batch.logits_indices)

    assert {tensor.dtype for tensor in kernels} == {torch.int32}
    assert {tensor.dtype for tensor in indices} == {torch.int64}


def test_choices_of_one_prompt_are_sampled_from_the_same_row() -> None:
    items = [item([1, 2, 3], 0, 3, [1], samples=3), item([4, 5], 0, 2, [2], samples=1)]

    assert build(items, 8, CPU).logits_indices.tolist() == [2, 2, 2, 4]
    assert [(row.choice, row.index) for row in sampled_rows(items)] == [(0, 0), (1, 0), (2, 0), (0, 0)]


def test_scored_rows_come_after_the_sampled_ones_and_leave_out_the_last_of_the_prompt() -> None:
    items = [item([1, 2, 3, 4, 5, 6], 3, 3, [1], samples=1, scored=2), item([7, 8, 9], 0, 2, [2], samples=0, scored=2)]

    assert build(items, 8, CPU).logits_indices.tolist() == [2, 0, 1, 3, 4]
    assert [list(scored_positions(part)) for part in items] == [[3, 4], [0, 1]]


def test_a_token_in_flight_is_fed_on_the_device() -> None:
    items = [item([1, 2, 3], 2, 1, [1], samples=1), item([4, 5], 2, 1, [2], samples=1)]

    batch = build(items, 8, CPU, InFlight(torch.tensor([70, 71, 72]), {items[1].sequence: 2}))

    assert batch.input_ids.tolist() == [3, 72]
    assert batch.positions.tolist() == [2, 2]
