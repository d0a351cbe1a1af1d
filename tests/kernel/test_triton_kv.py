"""The write of keys and values in Triton, under its interpreter, against its twin."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.triton.kv import write_kv

SLOTS = torch.tensor([9, -1, 39, 16])
ONE_BYTE = [torch.int8, torch.float8_e4m3fn]


def cache(dtype: torch.dtype, num_kv_heads: int, head_dim: int, num_blocks: int = 5) -> tuple[Tensor, Tensor | None]:
    """A layer of a cache of three, and its scales; poisoned."""
    shape = (num_blocks, 3, 2, 8, num_kv_heads)
    poison = -128 if dtype == torch.int8 else torch.nan
    scales = torch.full(shape, torch.nan)[:, 1] if dtype in ONE_BYTE else None
    return torch.full((*shape, head_dim), poison, dtype=dtype)[:, 1], scales


def assert_equals_twin(key: Tensor, value: Tensor, slots: Tensor, dtype: torch.dtype) -> None:
    ours, our_scales = cache(dtype, *key.shape[1:])
    theirs, their_scales = cache(dtype, *key.shape[1:])

    write_kv(key, value, ours, slots, kv_scales=our_scales)

    reference.write_kv(key, value, theirs, slots, kv_scales=their_scales)
    assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
    if our_scales is not None and their_scales is not None:
        assert torch.equal(our_scales.nan_to_num(-1), their_scales.nan_to_num(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *ONE_BYTE])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 1), (2, 16), (3, 80), (5, 64)])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> None:
    key, value = torch.randn(2, 4, num_kv_heads, head_dim).to(torch.float32 if dtype in ONE_BYTE else dtype)

    assert_equals_twin(key, value, SLOTS, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *ONE_BYTE])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_model_in_bfloat16_is_rounded_as_the_twin_rounds(dtype: torch.dtype, size: float) -> None:
    key, value = (torch.randn(2, 4, 2, 64) * size).bfloat16()

    assert_equals_twin(key, value, SLOTS, dtype)


@pytest.mark.parametrize("dtype", ONE_BYTE)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    key = torch.zeros(4, 2, 16)

    assert_equals_twin(key, key, SLOTS, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *ONE_BYTE])
def test_strided_new_keys_are_written(dtype: torch.dtype) -> None:
    key, value = torch.randn(2, 3, 4, 16).transpose(1, 2)

    assert_equals_twin(key, value, SLOTS, dtype)


def test_keys_that_are_strided_along_the_head_are_written() -> None:
    key = torch.randn(16, 4, 3).permute(1, 2, 0)

    assert_equals_twin(key, key, SLOTS, torch.float32)


@pytest.mark.parametrize("dtype", ONE_BYTE)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_come_back_as_numbers(bad: float, dtype: torch.dtype) -> None:
    key = torch.randn(4, 2, 16)
    key[0, 1, 3] = bad
    layer, scales = cache(dtype, 2, 16)

    with np.errstate(all="ignore"):
        write_kv(key, key, layer, SLOTS, kv_scales=scales)

    assert scales is not None
    given_back = layer[1, 0, 1].float() * scales[1, 0, 1].unsqueeze(-1)
    assert not given_back[1].isfinite().any()
    assert given_back[0].isfinite().all()


def test_every_number_of_fp8_and_all_between_two_are_rounded_as_torch_rounds() -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([numbers, middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e9))])
    key = torch.cat([near, -near]).view(1, -1, 1).expand(-1, -1, 2).clone()
    key[..., 1] = 448  # makes the scale 1
    layer, scales = torch.zeros(1, 2, 8, key.shape[1], 2, dtype=torch.float8_e4m3fn), torch.zeros(1, 2, 8, key.shape[1])

    write_kv(key, key, layer, torch.tensor([3]), kv_scales=scales)

    assert torch.equal(layer[0, 0, 3].view(torch.uint8), key[0].to(torch.float8_e4m3fn).view(torch.uint8))


def test_blocks_beyond_two_thousand_million_elements_are_addressed() -> None:
    storage = torch.empty(66_000 * 40_000, dtype=torch.int8)  # most of it is never touched
    far = storage.as_strided((66_000, 2, 8, 1, 4), (40_000, 32, 4, 4, 1))
    scales = torch.zeros(66_000, 2, 8, 1)
    key = torch.tensor([1.0, -2.0, 3.0, 127.0]).view(1, 1, 4)

    write_kv(key, -key, far, torch.tensor([65_999 * 8 + 5]), kv_scales=scales)

    assert far[65_999, 0, 5, 0].tolist() == [1, -2, 3, 127]
    assert far[65_999, 1, 5, 0].tolist() == [-1, 2, -3, -127]


def test_a_step_without_tokens_writes_nothing() -> None:
    layer, _ = cache(torch.float32, 2, 16)

    write_kv(torch.zeros(0, 2, 16), torch.zeros(0, 2, 16), layer, torch.zeros(0, dtype=torch.int64))

    assert layer.isnan().all()
