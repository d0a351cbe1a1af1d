"""The reference kernels against attention written out row by row in float64."""

import math
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.reference import Plan, paged_attention, write_kv
from tests.support.paged_case import MIXED, Case, assert_close


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"sliding_window": 1},
        {"sliding_window": 5},
        {"sliding_window": 8},
        {"sliding_window": 16},
        {"sliding_window": 100},
        {"softcap": 1.5},
        {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0])},
        {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0]), "softcap": 2.0, "sliding_window": 6},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_mixed_batch_equals_the_definition(options: dict[str, Any]) -> None:
    case = Case(**MIXED)

    assert_close(case.paged(**options), case.written_out(**options))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (9, 3), (8, 1)])
@pytest.mark.parametrize("head_dim", [1, 64, 80, 96])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_any_number_and_size_of_heads(num_heads: int, num_kv_heads: int, head_dim: int, softcap: float | None) -> None:
    case = Case([19, 11], [1, 6], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    assert_close(case.paged(softcap=softcap), case.written_out(softcap=softcap))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31])
@pytest.mark.parametrize("sliding_window", [None, 8])
def test_lengths_around_block_edges(length: int, sliding_window: int | None) -> None:
    case = Case([length] * 3 + [length + 40], [1, length, (length + 1) // 2, 1])

    assert_close(case.paged(sliding_window=sliding_window), case.written_out(sliding_window=sliding_window))


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_a_prompt_longer_than_a_tile(sliding_window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TILE_ROWS", 16)
    case = Case([75, 3], [61, 1])

    assert_close(case.paged(sliding_window=sliding_window), case.written_out(sliding_window=sliding_window))


def test_a_short_sequence_is_not_padded_to_a_long_one() -> None:
    case = Case([4] * 8 + [1500], [1] * 9, num_blocks=400)
    plan = Plan(case.block_tables, case.query_start, case.context_lens)

    groups = plan.groups(case.layer, None, torch.float32)

    assert sum(len(group.blocks) for group in groups) == 8 + math.ceil(1500 / 8)


def test_a_window_gathers_only_the_blocks_it_reaches() -> None:
    case = Case([1500], [1], num_blocks=400)
    plan = Plan(case.block_tables, case.query_start, case.context_lens)

    (group,) = plan.groups(case.layer, 16, torch.float32)

    assert len(group.blocks) <= 3


def test_layers_share_the_plan_of_their_window() -> None:
    case = Case(**MIXED)
    plan = Plan(case.block_tables, case.query_start, case.context_lens)

    for window in (None, 5, None, 5):
        assert_close(case.paged(plan=plan, sliding_window=window), case.written_out(sliding_window=window))
    assert plan.groups(case.layer, 5, case.dtype) is plan.groups(case.layer, 5, case.dtype)


def test_a_sequence_without_keys_gets_zeros_and_disturbs_nobody() -> None:
    case = Case([9, 12], [1, 2])
    exact = case.written_out()
    case.context_lens[0] = 0

    output = case.paged()

    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert_close(output[1:], exact[1:])


def test_large_scores_do_not_overflow() -> None:
    case = Case([20], [20], head_dim=64)
    case.query *= 1e4

    for options in ({}, {"softcap": 30.0}, {"sinks": torch.full((4,), 50.0)}):
        assert case.paged(**options).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_bfloat16_is_as_exact_as_its_inputs(options: dict[str, Any]) -> None:
    case = Case(**MIXED, dtype=torch.bfloat16)

    output = case.paged(**options)

    assert output.dtype == torch.bfloat16
    assert_close(output, case.written_out(**options), tolerance=2e-2)


def test_the_query_may_be_a_strided_view() -> None:
    case = Case(**MIXED)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)

    assert_close(case.paged(), case.written_out())


def test_block_ids_above_65536_are_addressed() -> None:
    layer = torch.full((70_000, 2, 8, 1, 4), torch.nan)
    key, value = torch.randn(12, 1, 4), torch.randn(12, 1, 4)
    tables = torch.tensor([[69_999, 66_000]], dtype=torch.int32)
    slots = torch.cat([torch.arange(8) + 69_999 * 8, torch.arange(4) + 66_000 * 8])

    write_kv(key, value, layer, slots)
    output = paged_attention(torch.zeros(1, 1, 4), layer, tables, torch.tensor([0, 1]), torch.tensor([12]), scale=1.0)

    assert_close(output, value.double().mean(0, keepdim=True))


@pytest.mark.parametrize("has_plan", [False, True])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(has_plan: bool) -> None:
    slots = torch.tensor([9, -1, 39, 16])
    plan = Plan(torch.zeros(0, 1), torch.zeros(1), torch.zeros(0), slots) if has_plan else None
    layer = torch.full((5, 3, 2, 8, 2, 4), torch.nan)[:, 1]
    key, value = torch.randn(4, 2, 4), torch.randn(4, 2, 4)

    write_kv(key, value, layer, slots, plan)

    for token, (block, offset) in {0: (1, 1), 2: (4, 7), 3: (2, 0)}.items():
        assert torch.equal(layer[block, 0, offset], key[token])
        assert torch.equal(layer[block, 1, offset], value[token])
    assert layer.isfinite().sum() == 3 * key[0].numel() * 2


def test_strided_new_keys_are_written() -> None:
    layer = torch.zeros(2, 2, 8, 2, 4)
    key = torch.randn(2, 3, 4).transpose(0, 1)

    write_kv(key, key, layer, torch.tensor([8, 9, 10]))

    assert torch.equal(layer[1, 0, :3], key)
