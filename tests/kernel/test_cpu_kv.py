"""Keys and values lie where kernels/cpu/kv.py says, and what does not fit there lies where the reference has it."""

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import kv
from kernels.reference import Plan

NUM_BLOCKS = 6


def vectors(tokens: int, heads: int, head_dim: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed))


def empty(block_size: int, heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A layer inside of blocks of three."""
    return torch.full((NUM_BLOCKS, 3, 2, block_size, heads, head_dim), torch.nan, dtype=dtype)[:, 1]


def in_order(layer: Tensor) -> Tensor:
    """What kernels/cpu/kv.py has laid out, in the order of the reference."""
    blocks, _, block_size, heads, head_dim = layer.shape
    keys = layer[:, 0].reshape(blocks, heads, block_size // 16, head_dim, 16).permute(0, 2, 4, 1, 3).reshape(layer[:, 0].shape)
    values = layer[:, 1].reshape(blocks, heads, block_size, head_dim).transpose(1, 2)
    return torch.stack((keys, values), dim=1)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 64), (2, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4, 5, 31])
def test_what_is_written_is_that_of_the_reference_in_another_order(
    block_size: int, heads: int, head_dim: int, dtype: torch.dtype, tokens: int
) -> None:
    key, value = vectors(tokens, heads, head_dim), vectors(tokens, heads, head_dim, seed=1)
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=torch.Generator().manual_seed(2))[:tokens]
    layer, expected = empty(block_size, heads, head_dim, dtype), empty(block_size, heads, head_dim, dtype)

    kv.write_kv(key, value, layer, slots)

    reference.write_kv(key, value, expected, slots)
    assert torch.equal(in_order(layer).nan_to_num(7), expected.nan_to_num(7))


def test_a_token_without_a_slot_is_not_written() -> None:
    layer, expected = empty(16, 2, 16), empty(16, 2, 16)
    key, slots = vectors(3, 2, 16), torch.tensor([40, -1, 17])

    kv.write_kv(key, key, layer[1:], slots)  # the block before is where -1 would lie

    reference.write_kv(key[[0, 2]], key[[0, 2]], expected[1:], slots[[0, 2]])
    assert torch.equal(in_order(layer).nan_to_num(7), expected.nan_to_num(7))


def test_no_tokens_write_nothing() -> None:
    layer = empty(16, 2, 16)

    kv.write_kv(vectors(0, 2, 16), vectors(0, 2, 16), layer, torch.tensor([], dtype=torch.int64))

    assert layer.isnan().all()


def test_other_layers_of_a_block_are_left_as_they_are() -> None:
    blocks = torch.zeros(NUM_BLOCKS, 3, 2, 16, 2, 16)

    kv.write_kv(vectors(96, 2, 16), vectors(96, 2, 16), blocks[:, 1], torch.arange(96))

    assert not blocks[:, [0, 2]].any()
    assert blocks[:, 1].all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.4e38])
def test_what_is_not_finite_stays_so_in_bfloat16(bad: float) -> None:
    key = torch.full((1, 1, 16), bad)
    layer = empty(16, 1, 16, torch.bfloat16)

    kv.write_kv(key, key, layer, torch.tensor([0]))

    torch.testing.assert_close(in_order(layer)[0, :, 0, 0], key[0, 0].bfloat16().expand(2, -1), equal_nan=True)


def test_rows_may_be_views() -> None:
    packed = vectors(5, 9, 16)
    key, value, turned = packed[:, 2:4], packed[:, 6:8], vectors(5, 16, 2, seed=1).transpose(1, 2)
    for source in ((key, value), (turned, value)):
        layer, expected = empty(16, 2, 16), empty(16, 2, 16)
        kv.write_kv(*source, layer, torch.arange(5))
        reference.write_kv(*source, expected, torch.arange(5))
        assert torch.equal(in_order(layer).nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype"),
    [(8, 16, torch.float32), (16, 20, torch.float32), (16, 16, torch.float16), (16, 16, torch.int8)],
)
def test_what_does_not_fit_is_written_by_the_reference(block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    layers = [torch.zeros(NUM_BLOCKS, 2, block_size, 2, head_dim, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(NUM_BLOCKS, 2, block_size, 2) if dtype == torch.int8 else None for _ in range(2)]
    key, slots = vectors(7, 2, head_dim), torch.tensor([3, 9, -1, 12, 13, 14, 15])
    plan = Plan(torch.zeros(1, 1), torch.tensor([0, 7]), torch.tensor([7]), slots)

    kv.write_kv(key, key, layers[0], slots, plan, kv_scales=scales[0])

    assert not kv.fits(layers[0])
    reference.write_kv(key, key, layers[1], slots, kv_scales=scales[1])
    assert torch.equal(*layers)
    assert scales[0] is None or torch.equal(*scales)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF])
def test_no_number_becomes_one_when_it_is_rounded(bits: int) -> None:
    """Rounded as a number, the first would be infinity and the second -0."""
    key, layer = torch.full((1, 1, 16), bits, dtype=torch.int32).view(torch.float32), empty(16, 1, 16, torch.bfloat16)
    layer[0] = 0

    kv.write_kv(key, key, layer, torch.tensor([0]))

    assert in_order(layer)[0, :, 0].isnan().all()
