"""Moves of whole blocks in Triton, under its interpreter, against torch's own."""

import mmap

import pytest
import torch
from torch import Tensor

from kernels.triton.blocks import copy_blocks, gather_blocks, scatter_blocks

SOURCES, TARGETS = torch.tensor([3, 1, 8]), torch.tensor([2, 9, 4])
sizes = pytest.mark.parametrize("num_words", [1, 17, 2048, 2049])


def pool(num_words: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (10, num_words))


@sizes
def test_blocks_are_copied_within_the_pool(num_words: int) -> None:
    blocks = pool(num_words)
    expected = blocks.index_copy(0, TARGETS, blocks.index_select(0, SOURCES))

    copy_blocks(blocks, SOURCES, TARGETS)

    assert torch.equal(blocks, expected)


@sizes
def test_blocks_are_gathered_into_the_staging_area(num_words: int) -> None:
    blocks, staging = pool(num_words), torch.zeros(3, num_words, dtype=torch.int64)

    gather_blocks(blocks, SOURCES, staging)

    assert torch.equal(staging, blocks.index_select(0, SOURCES))


@sizes
def test_blocks_are_scattered_from_the_staging_area(num_words: int) -> None:
    blocks, staging = pool(num_words), pool(num_words)[:3]
    expected = blocks.index_copy(0, TARGETS, staging)

    scatter_blocks(staging, blocks, TARGETS)

    assert torch.equal(blocks, expected)


def test_rows_of_a_wider_tensor_are_copied() -> None:
    wide = pool(40)
    expected = wide.clone()
    expected[TARGETS, 4:21] = wide[SOURCES, 4:21]

    copy_blocks(wide[:, 4:21], SOURCES, TARGETS)

    assert torch.equal(wide, expected)


def test_rows_beyond_two_thousand_million_words_are_copied() -> None:
    unreserved = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE: memory that nobody touches is never there
    storage = torch.frombuffer(mmap.mmap(-1, 70_000 * 32_000 * 8, unreserved), dtype=torch.int64)
    far = storage.as_strided((70_000, 3), (32_000, 1))
    far[69_999] = torch.tensor([1, 2, 3])

    copy_blocks(far, torch.tensor([69_999]), torch.tensor([68_000]))

    assert far[68_000].tolist() == [1, 2, 3]


def test_no_moves_change_nothing() -> None:
    blocks = pool(5)
    expected = blocks.clone()
    none = torch.zeros(0, dtype=torch.int64)

    copy_blocks(blocks, none, none)

    assert torch.equal(blocks, expected)
