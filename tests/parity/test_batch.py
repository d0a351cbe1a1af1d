"""From the scheduler's decision to one step's tensors."""

import pytest
import torch

from engine.batch import InFlight, ModelInput, build, sampled_rows, scored_positions
from engine.decision import ScheduledSequence
from engine.request import Request, SamplingParams
from engine.sequence import Sequence
from engine.staging import Staging

CPU = Staging(torch.device("cpu"))


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
        staging=CPU,
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


def decodes(count: int) -> list[ScheduledSequence]:
    return [item(list(range(10, 20)), 9, 1, [7 + row, 30 + row], samples=1) for row in range(count)]


def test_a_step_of_decodes_is_padded_with_sequences_that_are_written_nowhere_and_see_nothing() -> None:
    batch = build(decodes(3), 8, CPU, decode_sizes=(1, 2, 5, 9))

    assert batch.is_decode
    assert batch.slot_mapping.tolist() == [30 * 8 + 1, 31 * 8 + 1, 32 * 8 + 1, -1, -1]
    assert batch.context_lens.tolist() == [10, 10, 10, 0, 0]
    assert batch.block_tables.tolist() == [[7, 30], [8, 31], [9, 32], [0, 0], [0, 0]]
    assert batch.query_start.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(batch.input_ids) == len(batch.positions) == 5
    assert batch.logits_indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize("sizes", [(), (1, 2), (3, 8)])
def test_no_padding_where_the_size_is_there_or_none_is_as_large(sizes: tuple[int, ...]) -> None:
    assert len(build(decodes(3), 8, CPU, decode_sizes=sizes).context_lens) == 3


@pytest.mark.parametrize(
    "other",
    [
        item([1, 2, 3], 1, 2, [1], samples=1),
        item([1, 2, 3], 1, 1, [1], samples=0),
        item([1, 2, 3], 2, 1, [1], samples=2),
        item([1, 2, 3], 1, 1, [1], samples=1, scored=1),
    ],
    ids=["two tokens", "a chunk of one", "two choices", "a scored prompt"],
)
def test_a_step_that_does_not_only_decode_is_not_padded(other: ScheduledSequence) -> None:
    batch = build([*decodes(2), other], 8, CPU, decode_sizes=(8,))

    assert not batch.is_decode
    assert len(batch.context_lens) == 3


def test_the_lengths_are_on_the_host_too(batch: ModelInput) -> None:
    assert batch.host.query_start.tolist() == batch.query_start.tolist()
    assert batch.host.context_lens.tolist() == batch.context_lens.tolist()
    assert (batch.host.num_sequences, batch.host.max_query_len, batch.host.max_context_len) == (3, 3, 11)
    assert [batch.host.is_decode, build(decodes(2), 8, CPU, decode_sizes=(4,)).host.is_decode] == [False, True]
