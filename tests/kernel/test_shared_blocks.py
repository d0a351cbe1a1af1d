"""What the scheduler relies on: blocks that left a window are not read, and tables may share blocks."""

import pytest
import torch

from kernels import reference
from kernels.reference import paged_attention, write_kv
from tests.support.paged_case import Case, assert_close

CHUNKS = {
    "decodes": ([40, 23, 8, 61], [1, 1, 1, 1]),
    "chunks": ([40, 33, 64, 17], [13, 16, 40, 9]),
    "mixed": ([40, 5, 57, 32, 49], [1, 5, 33, 8, 1]),
}
WINDOWS = [1, 2, 7, 8, 9, 15, 16, 17, 24, 100]


def first_needed_block(case: Case, sequence: int, window: int) -> int:
    """The block of the first key that the first new token of a sequence sees."""
    first_new = case.contexts[sequence] - case.new[sequence]
    return max(0, first_new - window + 1) // case.block_size


def assert_block_0_is_never_read(case: Case, window: int) -> None:
    for sequence in range(len(case.contexts)):
        case.block_tables[sequence, : first_needed_block(case, sequence, window)] = 0

    assert_close(case.paged(sliding_window=window), case.written_out(sliding_window=window))


@pytest.mark.parametrize("batch", CHUNKS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("is_int8", [False, True], ids=["fp32", "int8"])
def test_blocks_before_the_window_may_be_the_null_block(batch: str, window: int, is_int8: bool) -> None:
    contexts, new = CHUNKS[batch]

    assert_block_0_is_never_read(Case(contexts, new, is_int8=is_int8), window)


@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_before_the_window_may_be_the_null_block_when_a_chunk_takes_several_tiles(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "TILE_ROWS", 16)

    assert_block_0_is_never_read(Case([75, 40, 3], [61, 1, 1]), window)


@pytest.mark.parametrize("window", [1, 8, 9, 16, 17])
def test_the_first_block_that_a_window_reaches_is_read(window: int) -> None:
    case = Case([40], [1])
    case.block_tables[0, first_needed_block(case, 0, window)] = 0

    assert case.paged(sliding_window=window).isnan().all()


def test_the_scores_of_softcap_and_sinks_leave_the_null_block_out_too() -> None:
    case = Case([40, 33], [1, 16])
    options = {"sliding_window": 9, "softcap": 2.0, "sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0])}
    for sequence in (0, 1):
        case.block_tables[sequence, : first_needed_block(case, sequence, 9)] = 0

    assert_close(case.paged(**options), case.written_out(**options))


@pytest.mark.parametrize("is_int8", [False, True], ids=["fp32", "int8"])
def test_tables_that_share_blocks_read_the_same_keys(is_int8: bool) -> None:
    case = Case([29, 23, 16], [1, 7, 1], is_int8=is_int8)
    for sequence, shared in ((1, 16), (2, 8)):
        case.block_tables[sequence, : shared // 8] = case.block_tables[0, : shared // 8]
        case.keys[sequence][:shared], case.values[sequence][:shared] = case.keys[0][:shared], case.values[0][:shared]

    assert_close(case.paged(), case.written_out())


def test_forks_that_are_equal_but_for_their_last_block_each_read_their_own() -> None:
    case = Case([23] * 4, [1] * 4)
    for fork in (1, 2, 3):
        case.block_tables[fork, :2] = case.block_tables[0, :2]
        case.keys[fork][:16], case.values[fork][:16] = case.keys[0][:16], case.values[0][:16]

    assert_close(case.paged(), case.written_out())


def test_a_table_may_name_what_another_sequence_of_the_batch_writes() -> None:
    """One sequence computes 20 positions of a prompt, another goes on behind the first 16 of them, all in one batch."""
    layer = torch.full((6, 2, 8, 2, 4), torch.nan)
    key, value = torch.randn(2, 23, 2, 4, generator=torch.Generator().manual_seed(0))
    query = torch.randn(23, 2, 4, generator=torch.Generator().manual_seed(1))
    tables, starts, contexts = torch.tensor([[5, 2, 4], [5, 2, 1]]), torch.tensor([0, 20, 23]), torch.tensor([20, 19])
    slots = torch.cat([torch.arange(40, 48), torch.arange(16, 24), torch.arange(32, 36), torch.arange(8, 11)])

    write_kv(key, value, layer, slots)
    output = paged_attention(query, layer, tables, starts, contexts, scale=0.5)

    seen_key, seen_value = (torch.cat([new[:16], new[20:]]).transpose(0, 1) for new in (key, value))
    scores = query[-1].unsqueeze(1) @ seen_key.transpose(1, 2) * 0.5
    assert_close(output[-1], (scores.double().softmax(-1) @ seen_value.double()).squeeze(1))
