"""Keys and values in int8: what is lost by rounding, and that attention over them equals the definition over what is kept."""

from typing import Any

import pytest
import torch

from kernels.reference import Plan, quantise, write_kv
from tests.support.paged_case import MIXED, Case, assert_close


@pytest.mark.parametrize("head_dim", [1, 63, 64, 80])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_comes_back_within_half_a_step_of_its_vectors_largest(head_dim: int, size: float, dtype: torch.dtype) -> None:
    vectors = (torch.randn(50, 3, head_dim, generator=torch.Generator().manual_seed(0)) * size).to(dtype)

    numbers, scales = quantise(vectors)

    assert scales.shape == (50, 3)
    steps = vectors.double().abs().amax(-1, keepdim=True) / 127
    error = (numbers.double() * scales.double().unsqueeze(-1) - vectors.double()).abs()
    assert (error <= steps * 0.50001).all()


def test_the_largest_number_becomes_127_whatever_its_sign() -> None:
    numbers, _ = quantise(torch.tensor([[0.5, -2.0], [3.0, 0.0]]))

    assert numbers.tolist() == [[32, -127], [127, 0]]


def test_zeros_stay_zeros() -> None:
    numbers, scales = quantise(torch.zeros(2, 5))

    assert not numbers.any()
    assert not scales.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_come_back_as_numbers(bad: float) -> None:
    numbers, scales = quantise(torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]]))

    given_back = numbers * scales.unsqueeze(-1)

    assert not given_back[0].isfinite().any()
    assert given_back[1].isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 5},
        {"softcap": 1.5},
        {"sinks": torch.tensor([-1.0, 0.0, 2.0, 5.0]), "softcap": 2.0, "sliding_window": 8},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_mixed_batch_equals_the_definition(options: dict[str, Any]) -> None:
    case = Case(**MIXED, is_int8=True)

    assert_close(case.paged(**options), case.written_out(**options))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3)])
@pytest.mark.parametrize("head_dim", [1, 33, 80])
def test_any_number_and_size_of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    case = Case([19, 11], [1, 6], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, is_int8=True)

    assert_close(case.paged(), case.written_out())


def test_a_model_in_bfloat16_gets_bfloat16() -> None:
    case = Case(**MIXED, dtype=torch.bfloat16, is_int8=True)

    output = case.paged()

    assert output.dtype == torch.bfloat16
    assert_close(output, case.written_out(), tolerance=2e-2)


def test_a_key_that_is_not_finite_spoils_its_own_sequence_and_head_only() -> None:
    case = Case([9, 12], [1, 2], is_int8=True)
    exact = case.written_out()
    key, value = case.keys[0][4:5].clone(), case.values[0][4:5].clone()
    key[0, 1, 3] = torch.nan

    write_kv(key, value, case.layer, case.slots(0)[4:5], kv_scales=case.scales)
    output = case.paged()

    assert output[0, 2:].isnan().all()  # the query heads of KV head 1
    assert_close(output[0, :2], exact[0, :2])
    assert_close(output[1:], exact[1:])


@pytest.mark.parametrize("has_plan", [False, True])
def test_numbers_and_scales_go_to_their_slots_and_nowhere_else(has_plan: bool) -> None:
    slots = torch.tensor([9, -1, 39, 16])
    plan = Plan(torch.zeros(0, 1), torch.zeros(1), torch.zeros(0), slots) if has_plan else None
    layer, scales = torch.full((5, 3, 2, 8, 2, 4), -128, dtype=torch.int8)[:, 1], torch.full((5, 3, 2, 8, 2), torch.nan)[:, 1]
    key, value = torch.randn(2, 4, 2, 4)

    write_kv(key, value, layer, slots, plan, kv_scales=scales)

    for token, (block, offset) in {0: (1, 1), 2: (4, 7), 3: (2, 0)}.items():
        for part, new in enumerate((key, value)):
            numbers, scale = quantise(new[token])
            assert torch.equal(layer[block, part, offset], numbers)
            assert torch.equal(scales[block, part, offset], scale)
    assert scales.isfinite().sum() == 3 * 2 * 2
    assert (layer != -128).sum() == 3 * 2 * 2 * 4
