"""Attention on a processor equals its definition over blocks full of NaN, and a row's bits depend on its sequence alone."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import attention, kv
from tests.support.paged_case import MIXED, Case, assert_close

NUM_TOKENS = 300


@dataclass
class CpuCase(Case):
    """As `Case`, in the order of kernels/cpu/kv.py."""

    block_size: int = 16

    def _fill(self, sequence: int) -> None:
        assert kv.fits(self.layer)
        kv.write_kv(self.keys[sequence], self.values[sequence], self.layer, self.slots(sequence))

    def paged(self, **options: Any) -> Tensor:
        tables = self.block_tables, self.query_start, self.context_lens
        return attention.paged_attention(self.query, self.layer, *tables, **({"scale": self.head_dim**-0.5} | options))


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"sliding_window": 1},
        {"sliding_window": 5},
        {"sliding_window": 16},
        {"sliding_window": 17},
        {"sliding_window": 100},
        {"softcap": 1.5},
        {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0])},
        {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0]), "softcap": 2.0, "sliding_window": 6},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_mixed_batch_equals_the_definition(options: dict[str, Any], block_size: int) -> None:
    case = CpuCase(**MIXED, block_size=block_size)

    assert_close(case.paged(**options), case.written_out(**options))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("group", [*range(1, 9), 50])
def test_any_number_and_size_of_heads(head_dim: int, group: int) -> None:
    case = CpuCase([19, 11, 40], [1, 6, 40], num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)

    assert_close(case.paged(), case.written_out())


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 255, 256, 257, 600])
@pytest.mark.parametrize("sliding_window", [None, 20])
def test_lengths_around_the_edges_of_vectors_blocks_and_chunks(length: int, sliding_window: int | None) -> None:
    case = CpuCase([length] * 3 + [length + 40], [1, min(length, 20), (length + 1) // 2, 1], block_size=32)

    assert_close(case.paged(sliding_window=sliding_window), case.written_out(sliding_window=sliding_window))


@pytest.mark.parametrize("new", [*range(1, 14), 48, 49, 97])
def test_any_number_of_new_tokens(new: int) -> None:
    case = CpuCase([97], [new], num_heads=3, num_kv_heads=3)

    assert_close(case.paged(), case.written_out())


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_a_cache_in_bfloat16(sliding_window: int | None) -> None:
    case = CpuCase([300, 17, 1], [5, 17, 1], head_dim=64, dtype=torch.bfloat16)
    found = case.paged(sliding_window=sliding_window)

    assert found.dtype == torch.bfloat16
    assert_close(found, case.written_out(sliding_window=sliding_window), tolerance=2**-7)


def test_queries_in_float32_over_a_cache_in_bfloat16_are_not_rounded() -> None:
    case = CpuCase([300, 17, 1], [5, 17, 1], head_dim=64, dtype=torch.bfloat16)
    case.query = case.query.float()

    assert_close(case.paged(), case.written_out())


@pytest.mark.parametrize("factor", [30.0, 200.0])
def test_large_scores_do_not_overflow(factor: float) -> None:
    case = CpuCase([300, 20], [1, 20])
    case.query *= factor

    scores_shifted = torch.nn.functional.scaled_dot_product_attention(
        case.query[:1].double().transpose(0, 1),
        *(part[0].double().transpose(0, 1).repeat_interleave(2, 0) for part in (case.keys, case.values)),
    )

    assert_close(case.paged()[:1].transpose(0, 1), scores_shifted, tolerance=2e-5 * factor)


def test_rows_of_a_sequence_without_keys_are_zero() -> None:
    case = CpuCase([20, 20], [1, 2])
    case.context_lens[1] = 0

    found = case.paged()

    assert_close(found[:1], case.written_out()[:1])
    assert torch.equal(found[1:], torch.zeros_like(found[1:]))


@pytest.mark.parametrize("sliding_window", [1, 16, 40])
def test_blocks_before_a_window_are_not_read(sliding_window: int) -> None:
    case = CpuCase([200], [3])
    expected = case.written_out(sliding_window=sliding_window)
    case.block_tables[0, : (197 - sliding_window + 1) // 16] = 0  # nobody's, full of NaN

    assert_close(case.paged(sliding_window=sliding_window), expected)


def test_what_is_no_number_stays_visible_and_in_its_sequence() -> None:
    case = CpuCase([40, 40], [3, 3])
    expected = case.paged()
    kv.write_kv(*(torch.full((1, 2, 16), torch.nan) for _ in range(2)), case.layer, case.slots(0)[38:39])

    found = case.paged()

    assert not found[1:3].isfinite().any()
    assert torch.equal(found[3:], expected[3:])


def prompt_in_chunks(case: CpuCase, counts: list[int], **options: Any) -> Tensor:
    """Rows of the first sequence of `case`, computed in several calls."""
    parts, done = [], case.contexts[0] - sum(counts)
    for count in counts:
        places = case.block_tables[:1], torch.tensor([0, count]), torch.tensor([done + count])
        parts.append(attention.paged_attention(case.query[: sum(counts)][done - case.contexts[0] + sum(counts) :][:count],
                                               case.layer, *places, scale=0.25, **options))  # fmt: skip
        done += count
    return torch.cat(parts)


@pytest.mark.parametrize("counts", [[1] * NUM_TOKENS, [7] * 42 + [6], [256, 44], [13, 1, 200, 86]], ids=len)
@pytest.mark.parametrize("sliding_window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_bits_do_not_depend_on_how_a_prompt_was_cut(
    counts: list[int], sliding_window: int | None, dtype: torch.dtype, group: int
) -> None:
    case = CpuCase([NUM_TOKENS], [NUM_TOKENS], num_heads=2 * group, dtype=dtype)
    options = {"sliding_window": sliding_window}

    whole = case.paged(scale=0.25, **options)

    assert torch.equal(prompt_in_chunks(case, counts, **options), whole)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_do_not_depend_on_the_batch(num_threads: int) -> None:
    case = CpuCase([300, 1, 40, 257, 16, 90], [1, 1, 40, 20, 1, 3], num_heads=6)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = case.paged(scale=0.25)
    finally:
        torch.set_num_threads(before)
    for sequence, (start, new) in enumerate(zip(case.query_start, case.new, strict=False)):
        places = case.block_tables[sequence : sequence + 1], torch.tensor([0, new]), case.context_lens[sequence : sequence + 1]
        alone = attention.paged_attention(case.query[start : start + new], case.layer, *places, scale=0.25)
        assert torch.equal(whole[start : start + new], alone), sequence


@pytest.mark.parametrize("rest", [{"block_size": 8}, {"head_dim": 20}, {"is_int8": True}, {"dtype": torch.float16}], ids=str)
def test_what_does_not_fit_is_left_to_the_reference(rest: dict[str, Any]) -> None:
    case = Case(**(MIXED | {"block_size": 16} | rest))
    assert not kv.fits(case.layer)
    plan = attention.Plan(case.block_tables, case.query_start, case.context_lens, None)
    places = case.block_tables, case.query_start, case.context_lens

    found = attention.paged_attention(case.query, case.layer, *places, scale=0.25, plan=plan, kv_scales=case.scales)

    assert torch.equal(found, case.paged(scale=0.25))
