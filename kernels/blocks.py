"""Whole KV blocks on the move, in plain torch: the specification of kernels/triton/blocks.py.

Blocks are rows of int64 words. Which one goes where is decided in the engine, which implementation moves it in
kernels/dispatch.py.
"""

import torch
from torch import Tensor


def copy_blocks(blocks: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy blocks within a pool: `blocks[targets] = blocks[sources]`.

    Args:
        blocks: `[num_blocks, words]` int64.
        sources: `[n]` int64.
        targets: `[n]` int64, no block twice and none that is a source of another.
    """
    blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def gather_blocks(blocks: Tensor, sources: Tensor, staging: Tensor) -> None:
    """Copy blocks out: `staging[i] = blocks[sources[i]]`.

    Args:
        blocks: `[num_blocks, words]` int64.
        sources: `[n]` int64.
        staging: `[n, words]` int64.
    """
    torch.index_select(blocks, 0, sources, out=staging)


def scatter_blocks(staging: Tensor, blocks: Tensor, targets: Tensor) -> None:
    """Copy blocks in: `blocks[targets[i]] = staging[i]`.

    Args:
        staging: `[n, words]` int64.
        blocks: `[num_blocks, words]` int64.
        targets: `[n]` int64, no block twice.
    """
    blocks.index_copy_(0, targets, staging)
