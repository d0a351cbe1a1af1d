"""Norm, activation and rotary positions on a processor equal their twins: odd shapes, slices, extreme values, any batch."""

import math

import pytest
import torch
from torch import Tensor

from kernels import layers
from kernels.cpu import kv
from kernels.cpu import layers as cpu

SHAPES = [(1, 16), (3, 64), (5, 576), (13, 96), (0, 32), (4, 20), (3, 7)]  # the last two are left to the twin


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_equals_its_twin(shape: tuple[int, int], has_residual: bool, offset: float) -> None:
    hidden, weight, residual = random(*shape), random(shape[1], seed=1), random(*shape, seed=2) if has_residual else None

    found = cpu.rms_norm(hidden, weight, 1e-5, residual=residual, offset=offset)

    for part, expected in zip(found, layers.rms_norm(hidden, weight, 1e-5, residual=residual, offset=offset), strict=True):
        assert_equal(part, expected)


def test_norm_takes_rows_of_a_larger_tensor() -> None:
    hidden, residual, weight = random(9, 48)[::2, 16:32], random(5, 64, seed=1)[:, 32:48], random(16, seed=2)
    for part, expected in zip(
        cpu.rms_norm(hidden, weight, 1e-6, residual=residual),
        layers.rms_norm(hidden, weight, 1e-6, residual=residual),
        strict=True,
    ):
        assert_equal(part, expected)


@pytest.mark.parametrize("scale", [0.0, 1e-18, 1e15])
def test_norm_of_extreme_rows(scale: float) -> None:
    hidden, weight = random(3, 32) * scale, random(32, seed=1)
    assert_equal(cpu.rms_norm(hidden, weight, 1e-6)[0], layers.rms_norm(hidden, weight, 1e-6)[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_row_breaks_no_other_row_of_a_norm(bad: float) -> None:
    hidden, weight = random(6, 32), random(32, seed=1)
    whole = cpu.rms_norm(hidden, weight, 1e-6)[0]
    hidden[2, 3] = bad

    found = cpu.rms_norm(hidden, weight, 1e-6)[0]

    assert found[2].isnan().any()
    assert torch.equal(found[[0, 1, 3, 4, 5]], whole[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("rows", [1, 4, 5, 13])
@pytest.mark.parametrize("size", [16, 96, 100])
def test_silu_and_mul_equals_its_twin(rows: int, size: int) -> None:
    gate_up = random(rows, 2 * size) * 4
    assert_equal(cpu.silu_and_mul(gate_up), layers.silu_and_mul(gate_up))


def test_silu_and_mul_takes_rows_of_a_larger_tensor() -> None:
    gate_up = random(7, 96)[:, 16:80]
    assert_equal(cpu.silu_and_mul(gate_up), layers.silu_and_mul(gate_up))


@pytest.mark.parametrize("gate", [0.0, -0.0, 1e-30, 20.0, 88.0, 1e4, 1e38, torch.inf, torch.nan])
def test_silu_of_large_gates_is_the_gate(gate: float) -> None:
    found = cpu.silu_and_mul(torch.tensor([[gate] * 16 + [1.5] * 16]))
    assert_equal(found, torch.full((1, 16), 1.5 * gate if gate >= 20 or gate != gate else gate * 0.75))


@pytest.mark.parametrize("gate", [-20.0, -87.0, -88.0, -100.0, -1e4])
def test_silu_of_very_negative_gates_vanishes(gate: float) -> None:
    found = cpu.silu_and_mul(torch.tensor([[gate] * 16 + [1.0] * 16]))

    # e^-x counts as e^87 beyond 87: what is left is x / e^87, far below what a sum of order 1 can hold
    most = max(abs(gate) * math.exp(-min(-gate, 87.0)), 1e-30)
    assert (found <= 0).all()
    assert found.abs().max().item() <= most * 1.001


def case(tokens: int, heads: int, kv_heads: int, head_dim: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q/k/v, cosines, sines, slots; one token is not written."""
    angles = random(tokens, size // 2, seed=1).repeat(1, 2) * 3
    slots = torch.randperm(160, generator=torch.Generator().manual_seed(2))[:tokens]
    slots[tokens // 2] = -1
    return random(tokens, (heads + 2 * kv_heads) * head_dim), angles.cos(), angles.sin(), slots


@pytest.mark.parametrize(("head_dim", "size"), [(16, 16), (64, 64), (64, 32), (80, 32), (80, 20), (128, 128), (48, 48)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_turns_queries_and_keys_and_writes(
    head_dim: int, size: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    qkv, cos, sin, slots = case(13, heads, kv_heads, head_dim, size)
    layer, expected_layer = (torch.full((11, 2, 16, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in range(2))
    query, key, value = layers.rotate(qkv, cos, sin, kv_heads, head_dim)
    kv.write_kv(key, value, expected_layer[1:], slots)

    found = kv.rotate_and_write_kv(qkv, cos, sin, layer[1:], slots)  # the block before is where a slot of -1 would lie

    assert_equal(found, query)
    torch.testing.assert_close(
        layer, expected_layer, rtol=2**-7 if dtype == torch.bfloat16 else 2e-6, atol=2e-6, equal_nan=True
    )


@pytest.mark.parametrize("block_size", [8])
def test_what_does_not_fit_is_rotated_by_the_twin(block_size: int) -> None:
    qkv, cos, sin, slots = case(13, 4, 2, 64, 64)
    layer, expected_layer = (torch.full((20, 2, block_size, 2, 64), torch.nan) for _ in range(2))

    found = kv.rotate_and_write_kv(qkv, cos, sin, layer, slots)

    assert torch.equal(found, layers.rotate_and_write_kv(qkv, cos, sin, expected_layer, slots))
    assert torch.equal(layer.nan_to_num(), expected_layer.nan_to_num())


def test_rows_have_the_same_bits_in_any_batch() -> None:
    hidden, weight = random(13, 96), random(96, seed=1)
    gate_up = random(13, 192, seed=2)
    norms, opened = cpu.rms_norm(hidden, weight, 1e-6)[0], cpu.silu_and_mul(gate_up)
    for i in range(13):
        assert torch.equal(cpu.rms_norm(hidden[i : i + 1], weight, 1e-6)[0], norms[i : i + 1])
        assert torch.equal(cpu.silu_and_mul(gate_up[i : i + 1]), opened[i : i + 1])


def test_16_bits_are_left_to_the_twins() -> None:
    hidden, weight = random(3, 32).bfloat16(), random(32, seed=1).bfloat16()
    assert torch.equal(cpu.rms_norm(hidden, weight, 1e-6)[0], layers.rms_norm(hidden, weight, 1e-6)[0])
    assert torch.equal(cpu.silu_and_mul(hidden), layers.silu_and_mul(hidden))


def test_the_twin_of_rotation_is_the_rotation_of_transformers() -> None:
    """Against the formula for one pair, so that both cannot be wrong alike."""
    qkv, cos, sin, slots = case(3, 1, 1, 16, 16)
    layer = torch.full((10, 2, 16, 1, 16), torch.nan)

    query = layers.rotate_and_write_kv(qkv, cos, sin, layer, slots)

    first, second = qkv[2, 3], qkv[2, 11]
    assert_equal(query[2, 0, 3], first * cos[2, 3] - second * sin[2, 3])
    assert_equal(query[2, 0, 11], second * cos[2, 3] + first * sin[2, 3])
