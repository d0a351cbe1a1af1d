"""Linear layers on a processor equal their twin: few rows and many, odd widths, int8, and bits that no batch changes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import layers
from kernels.cpu.linear import PackedLinear, quantise_rows
from kernels.reference import quantise

ROWS = [*range(1, 14), 64, 131]
MOST = 1023  # where a row is short enough for its sums
WIDTHS = [(64, 64), (1, 2), (31, 6), (65, 34), (211, 96), (192, 576)]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """In float64."""
    return (
        x.double() @ weight.double().T + (0 if bias is None else bias.double()) + (0 if residual is None else residual.double())
    )


def rounded(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Whole numbers up to `most`, and a scale for each row."""
    scales = x.abs().amax(-1) / most
    return (x * (1 / scales).unsqueeze(-1)).round(), scales


def assert_close(found: Tensor, expected: Tensor, in_features: int) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max().item() <= 1e-6 * in_features**0.5 * 4


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_rows(rows: int, dtype: torch.dtype, num_threads: int) -> None:
    x, weight = random(rows, 96), random(130, 96, seed=1).to(dtype)
    assert_close(PackedLinear(weight)(x), exact(x, weight), 96)


@pytest.mark.parametrize(("out_features", "in_features"), WIDTHS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_width_with_bias_and_residual(
    out_features: int, in_features: int, has_bias: bool, has_residual: bool, dtype: torch.dtype
) -> None:
    x, weight = random(7, in_features), random(out_features, in_features, seed=1).to(dtype)
    bias = random(out_features, seed=2).to(dtype) if has_bias else None
    residual = random(7, out_features, seed=3) if has_residual else None

    found = PackedLinear(weight, bias)(x, residual=residual)

    assert_close(found, exact(x, weight, bias, residual), in_features)
    twin = layers.linear(weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(found, twin(x, residual=residual), atol=1e-4, rtol=1e-5)


def test_a_residual_is_left_as_it_is() -> None:
    residual = random(5, 64)
    before = residual.clone()

    PackedLinear(random(64, 32, seed=1))(random(5, 32), residual=residual)

    assert torch.equal(residual, before)


@pytest.mark.parametrize("x", [random(9, 64)[::2], random(32, 9).T, random(9, 64)[:, 5:37]], ids=["rows", "turned", "columns"])
def test_rows_may_lie_in_a_larger_tensor(x: Tensor) -> None:
    weight = random(48, x.shape[1], seed=1)
    assert_close(PackedLinear(weight)(x), exact(x, weight), x.shape[1])


def test_rows_of_16_bits_are_widened() -> None:
    x, weight = random(3, 32).bfloat16(), random(64, 32, seed=1)
    assert_close(PackedLinear(weight)(x), exact(x, weight), 32)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_no_rows_yield_no_rows(kind: str) -> None:
    linear = PackedLinear(random(48, 32).to(torch.bfloat16 if kind == "bfloat16" else torch.float32), is_int8=kind == "int8")
    assert linear(random(0, 32)).shape == (0, 48)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(kind: str, has_bias: bool, num_threads: int) -> None:
    weight = random(200, 576).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    linear = PackedLinear(weight, random(200, seed=4) if has_bias else None, is_int8=kind == "int8")
    x, residual = random(131, 576, seed=1), random(131, 200, seed=2)
    alone = torch.cat([linear(x[i : i + 1], residual=residual[i : i + 1]) for i in range(131)])

    for rows in ROWS:
        assert torch.equal(linear(x[:rows], residual=residual[:rows]), alone[:rows]), rows
        assert torch.equal(linear(x[131 - rows :], residual=residual[131 - rows :]), alone[131 - rows :]), rows


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 32), (65, 90), (130, 576), (64, 1)])
def test_int8_is_the_product_of_rounded_numbers(rows: int, out_features: int, in_features: int, num_threads: int) -> None:
    x, weight, bias = random(rows, in_features), random(out_features, in_features, seed=1), random(out_features, seed=2)
    of_x, of_weight = rounded(x, MOST), quantise(weight)
    rounded_x, rounded_weight = (numbers.double() * scales.unsqueeze(-1) for numbers, scales in (of_x, of_weight))

    found = PackedLinear(weight, bias, is_int8=True)(x)

    assert (found.double() - exact(rounded_x, rounded_weight, bias)).abs().max().item() <= 1e-5 * in_features**0.5


@pytest.mark.parametrize("rows", [1, 8, 9, 40])
def test_rows_are_rounded_as_by_the_definition(rows: int, num_threads: int) -> None:
    x = random(rows, 96) * torch.logspace(-6, 6, rows).unsqueeze(1)
    numbers, scales = rounded(x, MOST)

    found, found_scales = quantise_rows(x)

    assert torch.equal(found_scales, scales)
    assert torch.equal(found.float(), numbers)


def test_the_largest_numbers_of_int8_do_not_overflow_a_sum() -> None:
    x, weight = torch.full((2, 40_000), 3.0), torch.full((64, 40_000), -2.0)
    torch.testing.assert_close(PackedLinear(weight, is_int8=True)(x), torch.full((2, 64), -6.0 * 40_000))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 17, 31])
def test_what_is_no_number_stays_visible_and_breaks_no_other_row(kind: str, bad: float, place: int) -> None:
    weight = random(64, 32).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    linear, x = PackedLinear(weight, is_int8=kind == "int8"), random(11, 32, seed=1)
    whole = linear(x)
    x[4, place] = bad

    found = linear(x)

    assert not found[4].isfinite().any()
    others = [row for row in range(11) if row != 4]
    assert torch.equal(found[others], whole[others])


def test_a_row_of_zeros_is_zero_in_int8() -> None:
    assert torch.equal(PackedLinear(random(64, 32), is_int8=True)(torch.zeros(3, 32)), torch.zeros(3, 64))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_stays_visible_in_int8(bad: float) -> None:
    weight = random(64, 32)
    weight[5, 3] = bad

    found = PackedLinear(weight, is_int8=True)(random(2, 32, seed=1))

    assert not found[:, 5].isfinite().any()
    assert found[:, :5].isfinite().all()
