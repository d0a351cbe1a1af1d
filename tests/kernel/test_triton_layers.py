"""Norm, activation and rotary positions in Triton equal their twins, under the interpreter: odd shapes, slices, broken rows."""

import pytest
import torch
from torch import Tensor

from kernels import layers
from kernels.triton import activation, norm, rotary

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # numpy interprets, and warns of inf - inf

SHAPES = [(1, 1), (1, 7), (3, 64), (17, 131), (5, 576), (2, 1024), (2, 1031)]
ONE_BYTE = [torch.int8, torch.float8_e4m3fn]
HALF = [torch.float16, torch.bfloat16]
# One unit in the last place of the result, whose fp32 value the two may round differently.
ULP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=ULP[expected.dtype], atol=2e-6, equal_nan=True)


def assert_norm_equal(hidden: Tensor, weight: Tensor, residual: Tensor | None = None, offset: float = 0.0) -> None:
    found = norm.rms_norm(hidden, weight, 1e-6, residual=residual, offset=offset)
    expected = layers.rms_norm(hidden, weight, 1e-6, residual=residual, offset=offset)
    for part, expected_part in zip(found, expected, strict=True):
        assert_equal(part, expected_part)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_equals_its_twin(shape: tuple[int, int], has_residual: bool) -> None:
    assert_norm_equal(random(*shape), random(shape[1], seed=1), random(*shape, seed=2) if has_residual else None, offset=1.0)


@pytest.mark.parametrize("dtype", HALF)
def test_norm_in_16_bits_is_of_the_sum_before_it_is_rounded(dtype: torch.dtype) -> None:
    assert_norm_equal(random(9, 96, dtype=dtype), random(96, dtype=dtype, seed=1), random(9, 96, dtype=dtype, seed=2))


def test_norm_without_a_residual_gives_its_input_back() -> None:
    hidden = random(3, 8)
    assert norm.rms_norm(hidden, random(8), 1e-6)[1] is hidden


@pytest.mark.parametrize("hidden", [random(6, 40)[::2, 5:18], random(13, 6).T], ids=["slice", "transposed"])
def test_norm_takes_rows_of_a_larger_tensor(hidden: Tensor) -> None:
    assert_norm_equal(hidden, random(13, seed=1), random(len(hidden), 26, seed=2)[:, ::2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_row_breaks_no_other_row_of_a_norm(bad: float) -> None:
    hidden = random(5, 24)  # five rows of one program
    hidden[2, 3] = bad
    found, _ = norm.rms_norm(hidden, random(24, seed=1), 1e-6)
    assert found.isfinite().all(1).tolist() == [row != 2 for row in range(5)]
    assert_norm_equal(hidden, random(24, seed=1))


def test_norm_of_no_rows_is_empty() -> None:
    assert [part.shape for part in norm.rms_norm(random(0, 8), random(8), 1e-6, residual=random(0, 8))] == [(0, 8)] * 2


def test_a_rows_norm_does_not_depend_on_its_neighbours() -> None:
    hidden, weight = random(17, 96), random(96, seed=1)
    together, _ = norm.rms_norm(hidden, weight, 1e-6)
    alone = [norm.rms_norm(row.unsqueeze(0), weight, 1e-6)[0] for row in hidden]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 1), (9, 3, 20), (4, 2, 64), (2, 1, 1031)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_norms_of_single_heads_equal_their_twin(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    size = (num_heads + 2 * num_kv_heads) * head_dim
    wide = random(5, size + 3, dtype=dtype)
    weights = random(head_dim, dtype=dtype, seed=1), random(head_dim, dtype=dtype, seed=2)
    expected = layers.norm_heads(wide[:, :size], *weights, 1e-6, num_kv_heads)

    found = norm.norm_heads(wide[:, :size], *weights, 1e-6, num_kv_heads)

    assert_equal(found, expected)
    assert torch.equal(wide, torch.cat((found, random(5, size + 3, dtype=dtype)[:, size:]), 1)), "not in place"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_the_activation_equals_its_twin(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype) * 4
    assert_equal(activation.silu_and_mul(gate_up), layers.silu_and_mul(gate_up))


def test_the_activation_takes_what_is_not_finite_or_far_from_zero_as_its_twin_does() -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e38, -1e38, -200.0])
    gate_up = torch.cartesian_prod(values, values).T.reshape(1, -1)
    assert_equal(activation.silu_and_mul(gate_up), layers.silu_and_mul(gate_up))


@pytest.mark.parametrize("gate_up", [random(6, 40)[::2, 5:19], random(14, 6).T, random(0, 6)], ids=["slice", "turned", "none"])
def test_the_activation_takes_rows_of_a_larger_tensor_and_none(gate_up: Tensor) -> None:
    assert_equal(activation.silu_and_mul(gate_up), layers.silu_and_mul(gate_up))


class Rotation:
    """New tokens of a layer whose cache is a slice of a larger one and holds 99 wherever nothing was written."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, turned: int, slots: list[int], dtype: torch.dtype) -> None:
        self.qkv = random(len(slots), (heads + 2 * kv_heads) * head_dim + 3, dtype=dtype)[:, 1:-2]
        angles = random(len(slots), turned // 2, seed=1) * 9
        self.cos, self.sin = torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin()
        self.slots = torch.tensor(slots, dtype=torch.int64)
        self.shape = (5, 3, 2, 8, kv_heads)
        self.head_dim = head_dim

    def run(self, implementation, cache: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """The queries, the whole cache and, in int8, its scales."""
        layers_ = torch.full((*self.shape, self.head_dim), 99).to(cache)
        scales = torch.full(self.shape, 99.0)[:, 1] if cache in ONE_BYTE else None
        query = implementation(self.qkv, self.cos, self.sin, layers_[:, 1], self.slots, kv_scales=scales)
        return query, layers_, scales

    def assert_equal(self, cache: torch.dtype) -> None:
        found = self.run(rotary.rotate_and_write_kv, cache)
        expected = self.run(layers.rotate_and_write_kv, cache)
        for part, expected_part in zip(found, expected, strict=True):
            if expected_part is None:
                assert part is None
            elif expected_part.dtype in ONE_BYTE:
                assert torch.equal(part.view(torch.uint8), expected_part.view(torch.uint8))
            else:
                assert_equal(part, expected_part)


HEADS = [(4, 2, 16, 16), (9, 3, 64, 64), (1, 1, 2, 2), (3, 1, 80, 20), (2, 2, 10, 6), (71, 1, 64, 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "turned"), HEADS)
@pytest.mark.parametrize("cache", [torch.float32, *ONE_BYTE])
def test_rotation_and_write_equal_their_twin(heads, kv_heads, head_dim, turned, cache) -> None:
    Rotation(heads, kv_heads, head_dim, turned, [3, 39, 0, 17, 16], torch.float32).assert_equal(cache)


@pytest.mark.parametrize("dtype", HALF)
def test_rotation_and_write_in_16_bits_equal_their_twin(dtype: torch.dtype) -> None:
    Rotation(4, 2, 16, 12, [3, 39, 0], dtype).assert_equal(dtype)


@pytest.mark.parametrize("cache", [torch.int8, torch.float32])
def test_keys_are_rounded_to_16_bits_before_they_are_cached(cache: torch.dtype) -> None:
    Rotation(4, 2, 16, 12, [3, 39, 0], torch.float16).assert_equal(cache)


@pytest.mark.parametrize("cache", [torch.float32, torch.int8])
def test_a_token_without_a_slot_is_turned_and_not_written(cache: torch.dtype) -> None:
    rotation = Rotation(4, 2, 16, 16, [-1, 8, -1], torch.float32)
    _, written, _ = rotation.run(rotary.rotate_and_write_kv, cache)
    assert (written != 99).any(-1).nonzero()[:, [0, 1, 3]].unique(dim=0).tolist() == [[1, 1, 0]]
    rotation.assert_equal(cache)


def test_no_tokens_give_no_queries() -> None:
    query, written, _ = Rotation(4, 2, 16, 16, [], torch.float32).run(rotary.rotate_and_write_kv, torch.float32)
    assert query.shape == (0, 4, 16)
    assert (written == 99).all()


def test_blocks_beyond_two_to_the_31_numbers_are_written_where_they_are() -> None:
    num_blocks = 70_000
    cache = torch.empty(num_blocks, 2, 16, 1, 1024, dtype=torch.int8)  # memory that nobody touches is not taken
    scales = torch.empty(num_blocks, 2, 16, 1)
    qkv, cos, slot = random(1, 3 * 1024), torch.ones(1, 2), torch.tensor([num_blocks * 16 - 1])
    rotary.rotate_and_write_kv(qkv, cos, torch.zeros(1, 2), cache, slot, kv_scales=scales)
    assert cache[-1, :, -1, 0].abs().amax(1).tolist() == [127, 127]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 1, 5], ids=["first half", "second half", "not turned"])
def test_a_vector_that_is_not_finite_does_not_come_back_as_numbers(bad: float, place: int) -> None:
    rotation = Rotation(1, 1, 6, 2, [0, 1], torch.float32)
    rotation.qkv[0, 6 + place] = bad  # a key
    rotation.qkv[1, 12 + place] = bad  # a value
    _, written, scales = rotation.run(rotary.rotate_and_write_kv, torch.int8)
    given_back = (written[0, 1, :, :2] * scales[0, :, :2].unsqueeze(-1)).flatten(2)
    assert given_back.isfinite().any(-1).tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("size", [0.0, 1e-38])
@pytest.mark.parametrize("cache", ONE_BYTE)
def test_vectors_of_next_to_nothing_are_rounded_as_the_twin_rounds_them(size: float, cache: torch.dtype) -> None:
    rotation = Rotation(1, 1, 6, 2, [0], torch.float32)
    rotation.qkv.mul_(size)
    rotation.assert_equal(cache)
