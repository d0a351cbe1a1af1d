"""Attention whose bits depend on a row alone, against the definition, and against itself in other batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.invariant import Plan, paged_attention
from tests.support.paged_case import MIXED, Case, assert_close

OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 5},
    {"sliding_window": 100},
    {"softcap": 1.5},
    {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0]), "softcap": 2.0, "sliding_window": 6},
]


def attend(case: Case, **options: Any) -> Tensor:
    tables = case.block_tables, case.query_start, case.context_lens
    defaults = {"scale": case.head_dim**-0.5, "kv_scales": case.scales}
    return paged_attention(case.query, case.layer, *tables, **(defaults | options))


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_a_mixed_batch_equals_the_definition(options: dict[str, Any], is_int8: bool) -> None:
    case = Case(**MIXED, is_int8=is_int8)

    assert_close(attend(case, **options), case.written_out(**options))


@pytest.mark.parametrize("block_size", [8, 128, 256])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_contexts_of_several_key_tiles_equal_the_definition(options: dict[str, Any], block_size: int) -> None:
    case = Case([300, 129, 128, 127, 256], [5, 1, 3, 2, 130], block_size=block_size)

    assert_close(attend(case, **options), case.written_out(**options))


def test_a_sequence_without_keys_gets_zeros_and_disturbs_nobody() -> None:
    case = Case([9, 12], [1, 2])
    exact = case.written_out()
    case.context_lens[0] = 0

    output = attend(case)

    assert torch.equal(output[0], torch.zeros_like(output[0]))
    assert_close(output[1:], exact[1:])


def test_layers_share_the_plan_of_their_window() -> None:
    case = Case(**MIXED)
    plan = Plan(case.block_tables, case.query_start, case.context_lens)

    for window in (None, 5, None, 5):
        assert_close(attend(case, plan=plan, sliding_window=window), case.written_out(sliding_window=window))
    assert plan.items(case.block_size, 5) is plan.items(case.block_size, 5)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 40)), min_size=2, max_size=12),
    heads=st.sampled_from([(4, 2), (3, 3), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([16, 64, 80]),
    options=st.sampled_from([options for options in OPTIONS if "sinks" not in options]),
)
def test_each_row_alone_has_the_bits_it_has_in_any_batch(
    lengths: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, options: dict[str, Any]
) -> None:
    contexts, new = zip(*((context, min(context, count)) for context, count in lengths), strict=True)
    case = Case(list(contexts), list(new), num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, num_blocks=700)
    together = attend(case, **options)

    row = 0
    for sequence, (context, count) in enumerate(zip(contexts, new, strict=True)):
        for position in (context - count, context - 1):
            at = row + position - (context - count)
            alone = paged_attention(
                case.query[at : at + 1].clone(),
                case.layer,
                case.block_tables[sequence : sequence + 1],
                torch.tensor([0, 1]),
                torch.tensor([position + 1]),
                scale=head_dim**-0.5,
                **options,
            )
            assert torch.equal(alone[0], together[at])
        row += count
