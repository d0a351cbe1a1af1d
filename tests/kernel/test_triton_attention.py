"""Paged attention in Triton, under its interpreter, against attention written out row by row in float64."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.triton import attention, plan
from kernels.triton.attention import paged_attention
from kernels.triton.plan import Plan, Tiling, Work
from tests.support.paged_case import MIXED, Case, assert_close

SINKS = torch.tensor([-1.0, 0.0, 2.0, 5.0])
ALL: dict[str, Any] = {"sinks": SINKS, "softcap": 2.0, "sliding_window": 6}
EDGES = [1, 2, 7, 8, 9, 15, 16, 17, 31]


def attend(case: Case, *, has_host_numbers: bool = True, is_invariant: bool = False, **options: Any) -> Tensor:
    tables = case.block_tables, case.query_start, case.context_lens
    step = Plan(*tables, query_lens=case.new if has_host_numbers else None, is_invariant=is_invariant)
    defaults = {"scale": case.head_dim**-0.5, "kv_scales": case.scales}
    return paged_attention(case.query, case.layer, *tables, plan=step, **(defaults | options))


def check(case: Case, tolerance: float = 1e-5, **options: Any) -> None:
    assert_close(attend(case, **options), case.written_out(**options), tolerance)


@pytest.fixture
def split_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_SPLIT_TILES", 1)


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of bfloat16, for float32."""
    tiling = attention.tiling

    def as_bfloat16(group: int, head_dim: int, dtype: torch.dtype, kv_format: str, *, is_decode: bool) -> Tiling:
        return tiling(group, head_dim, torch.bfloat16, kv_format, is_decode=is_decode)

    monkeypatch.setattr(attention, "tiling", as_bfloat16)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"sliding_window": 1},
        {"sliding_window": 8},
        {"sliding_window": 100},
        {"softcap": 1.5},
        {"sinks": SINKS},
        ALL,
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_mixed_batch_equals_the_definition(options: dict[str, Any]) -> None:
    check(Case(**MIXED), **options)


@pytest.mark.parametrize("storage", ["is_int8", "is_fp8"])
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_a_mixed_batch_over_a_cache_of_one_byte_an_element_equals_the_definition(options: dict[str, Any], storage: str) -> None:
    check(Case(**MIXED, **{storage: True}), **options)


def test_the_gpus_own_conversion_of_fp8_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([19, 11], [1, 6], is_fp8=True)
    by_integers = attend(case)

    monkeypatch.setattr(attention, "_is_fp8_native", lambda device: True)

    assert torch.equal(attend(case), by_integers)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_tiles_of_many_rows_and_keys_equal_the_definition(options: dict[str, Any]) -> None:
    check(Case([150, 8, 131, 67], [131, 1, 1, 67]), **options)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (9, 3), (8, 1), (17, 1)])
def test_any_number_of_heads(num_heads: int, num_kv_heads: int) -> None:
    check(Case([19, 11], [1, 6], num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("head_dim", [1, 33, 64, 80, 96])
def test_any_size_of_heads(head_dim: int) -> None:
    check(Case([19, 11], [1, 6], head_dim=head_dim))


@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_any_size_of_blocks(block_size: int) -> None:
    check(Case([301, 29], [1, 7], block_size=block_size, num_blocks=60))


@pytest.mark.parametrize("new", [[1] * len(EDGES), EDGES], ids=["decodes", "prompts"])
@pytest.mark.parametrize("sliding_window", [None, 8])
def test_lengths_around_block_edges(new: list[int], sliding_window: int | None) -> None:
    check(Case(EDGES, new), sliding_window=sliding_window)


@pytest.mark.parametrize("contexts", [[1], [61], [997]])
def test_a_single_sequence(contexts: list[int]) -> None:
    check(Case(contexts, [1]))


@pytest.mark.usefixtures("split_often")
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 250}, {"softcap": 1.5, "sinks": SINKS}], ids=lambda options: "-".join(options) or "plain"
)
def test_splits_joined_equal_the_definition(options: dict[str, Any]) -> None:
    check(Case([700, 40, 1, 300], [1, 1, 1, 5], num_blocks=400), **options)


@pytest.mark.usefixtures("split_often")
@pytest.mark.parametrize("storage", ["is_int8", "is_fp8"])
def test_splits_of_a_cache_of_one_byte_an_element_equal_the_definition(storage: str) -> None:
    check(Case([250, 40], [1, 1], **{storage: True}), sinks=SINKS)


def test_a_batch_without_the_hosts_numbers_equals_the_definition() -> None:
    case = Case(**MIXED)

    assert_close(attend(case, has_host_numbers=False), case.written_out())


@pytest.mark.usefixtures("split_often")
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_a_sequence_without_keys_gets_zeros_and_disturbs_nobody(sinks: Tensor | None) -> None:
    case = Case([90, 80, 12], [1, 1, 9])
    exact = case.written_out(sinks=sinks)
    case.context_lens[0] = 0
    case.block_tables[0] = 2**30  # a block that is not there

    output = attend(case, sinks=sinks)

    assert not output[0].any()
    assert_close(output[1:], exact[1:])


def test_a_sequence_without_rows_disturbs_nobody() -> None:
    case = Case([20, 12, 30], [1, 0, 9])

    check(case)


@pytest.mark.parametrize("new", [[1, 1, 1], [13, 16, 9]], ids=["decodes", "chunks"])
@pytest.mark.parametrize("storage", [{}, {"is_int8": True}], ids=["fp32", "int8"])
def test_blocks_before_the_window_are_not_read(new: list[int], storage: dict[str, bool]) -> None:
    case = Case([40, 33, 64], new, **storage)
    for sequence, (context, count) in enumerate(zip(case.contexts, new, strict=True)):
        case.block_tables[sequence, : max(0, context - count - 9 + 1) // case.block_size] = 2**30  # not there

    check(case, sliding_window=9)


def test_layers_share_the_plan_of_their_window() -> None:
    case = Case([23, 8, 40], [1, 8, 1])
    tables = case.block_tables, case.query_start, case.context_lens
    step = Plan(*tables, query_lens=case.new)

    made: dict[int | None, list[Work]] = {}
    for window in (None, 5, None, 5):
        output = paged_attention(case.query, case.layer, *tables, scale=0.25, sliding_window=window, plan=step)
        assert_close(output, case.written_out(sliding_window=window))
        assert step._works[window] is made.setdefault(window, step._works[window])


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"sinks": torch.full((4,), 50.0)}])
def test_large_scores_do_not_overflow(options: dict[str, Any]) -> None:
    case = Case([20, 9], [20, 1], head_dim=64)
    case.query *= 1e4

    assert attend(case, **options).isfinite().all()


@pytest.mark.parametrize("storage", [{}, {"is_int8": True}, {"is_fp8": True}], ids=["plain", "int8", "fp8"])
def test_a_model_in_float16_is_as_exact_as_its_inputs(storage: dict[str, bool]) -> None:
    case = Case([23, 40], [1, 13], dtype=torch.float16, **storage)

    output = attend(case)

    assert output.dtype == torch.float16
    assert_close(output, case.written_out(), tolerance=2e-3)


def test_small_values_survive_float16() -> None:
    case = Case([23, 40], [1, 13], dtype=torch.float16, is_int8=True)
    assert case.scales is not None
    case.scales[:, 1] *= 2**-12
    case.values = [values * 2**-12 for values in case.values]

    assert_close(attend(case) * 2**12, case.written_out() * 2**12, tolerance=2e-2)


def test_the_query_may_be_a_strided_view() -> None:
    case = Case([19, 11], [1, 6])
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)

    check(case)


def test_a_number_that_is_not_finite_spoils_its_own_sequence_and_head_only() -> None:
    case = Case([19, 12], [1, 6])
    exact = case.written_out()
    case.layer[case.block_tables[0, 1], 0, 3, 1] = torch.nan

    with np.errstate(invalid="ignore"):
        output = attend(case)

    assert output[0, 2:].isnan().all()  # the query heads of KV head 1
    assert_close(output[0, :2], exact[0, :2])
    assert_close(output[1:], exact[1:])


@pytest.mark.parametrize("new", [1, 5], ids=["decode", "prefill"])
def test_blocks_beyond_two_thousand_million_elements_are_addressed(new: int) -> None:
    case = Case([12], [new], block_size=16, head_dim=64, num_heads=1, num_kv_heads=1, is_int8=True, num_blocks=4)
    near, near_scales = case.block_tables.clone(), case.scales
    assert near_scales is not None
    far = far_view(case.layer, 66_000, stride=40_000)
    far[65_999] = case.layer[near[0, 0]]
    scales = far_view(near_scales, 66_000, stride=32)
    scales[65_999] = near_scales[near[0, 0]]
    case.layer, case.scales, case.block_tables = far, scales, torch.full_like(near, 65_999)

    check(case)


def far_view(like: Tensor, num_blocks: int, stride: int) -> Tensor:
    """Blocks far apart; memory that nobody touches is never there."""
    storage = torch.empty(num_blocks * stride, dtype=like.dtype)
    return storage.as_strided((num_blocks, *like.shape[1:]), (stride, *like[0].contiguous().stride()))


class NothingIsRead(TorchFunctionMode):
    """Refuses what would wait for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in ("item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"), name
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_back_from_the_device() -> None:
    case = Case([23, 40], [1, 13])

    with NothingIsRead():
        attend(case)


@pytest.mark.usefixtures("split_often")
@pytest.mark.parametrize("row", [0, 1, 9, 17])  # the first of their tiles: numpy's products of other rows may differ in bits
def test_each_row_alone_has_the_bits_it_has_in_an_invariant_batch(row: int) -> None:
    case = Case([300, 8, 40, 300, 300], [1, 8, 13, 1, 1], num_blocks=300)
    together = attend(case, is_invariant=True)

    sequence = int(np.searchsorted(np.cumsum(case.new), row, side="right"))
    position = case.contexts[sequence] - int(case.query_start[sequence + 1]) + row
    tables = case.block_tables[sequence : sequence + 1], torch.tensor([0, 1]).int(), torch.tensor([position + 1]).int()
    step = Plan(*tables, is_invariant=True)
    alone = paged_attention(case.query[row : row + 1], case.layer, *tables, scale=0.25, plan=step)

    assert torch.equal(alone[0], together[row])


LENGTHS = st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 5) | st.integers(0, 70)), min_size=1, max_size=300)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, window=st.sampled_from([None, 500]), num_kv_heads=st.sampled_from([1, 3, 8, 400]))
def test_every_program_owns_what_no_other_one_owns_and_together_they_own_all(
    lengths: list[tuple[int, int]], window: int | None, num_kv_heads: int
) -> None:
    contexts, new = zip(*lengths, strict=True)
    decode, prefill = Tiling(16, 4, 64, 4, 1), Tiling(64, 16, 64, 4, 1)
    query_start = torch.tensor([0, *new]).cumsum(0).int()
    tensors = torch.zeros(len(new), 1).int(), query_start, torch.tensor(contexts).int()
    query, cache = torch.zeros(sum(new), num_kv_heads, 1), torch.zeros(1, 2, 8, num_kv_heads, 1)

    for query_lens in (None, new):
        works = Plan(*tensors, query_lens=query_lens).works(query, cache, window, decode, prefill)
        found = [item for work in works for item in work.items.tolist() if item[0] >= 0]
        tiles = {int(work.num_split > 0): int(work.split_tiles) for work in works if work.num_split}
        expected = list(_programs(lengths, window, tiles.get(1, 1)))
        assert sorted(found) == sorted(expected)
        for work in works:
            several = [index for index, item in enumerate(work.items.tolist()) if item[0] >= 0 and item[2] > 1]
            assert not work.num_split or max(several, default=-1) < work.num_split


def _programs(lengths: list[tuple[int, int]], window: int | None, split_tiles: int) -> Iterator[list[int]]:
    for sequence, (context, new) in enumerate(lengths):
        first = 0 if window is None else max(0, context - new - window + 1)
        count = -(-new // 16)
        if 0 < new <= 4:
            count = max(1, -(-(-(-context // 64) - first // 64) // split_tiles))
        yield from ([sequence, index, count] for index in range(count))


def test_one_long_sequence_among_many_short_ones_is_split() -> None:
    contexts = [64] * 40 + [20_000]
    tensors = torch.zeros(41, 1).int(), torch.arange(42).int(), torch.tensor(contexts).int()
    decode = Tiling(16, 4, 64, 4, 1)

    (work,) = Plan(*tensors, query_lens=[1] * 41).works(torch.zeros(41, 2, 1), torch.zeros(1, 2, 8, 2, 1), None, decode, decode)

    items = work.items.tolist()
    assert max(item[2] for item in items if item[0] == 40) >= 8
    assert {item[2] for item in items if 0 <= item[0] < 40} == {1}
