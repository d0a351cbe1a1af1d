"""Whole KV blocks on the move: within the device's pool, and between it and a staging area for the host.

Relies on blocks that are rows of int64 words, as engine/kv_cache.py lays them out. Which block goes where, and the road between
staging and host memory, are left to the engine. The twins are in kernels/blocks.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.specialisation import Specialisation

# Words of a row that one program copies: 16 KiB. Untuned.
_WORDS = 2048
_OPTIONS = {"num_warps": 4}


@triton.jit(do_not_specialize_on_alignment=["source_rows", "target_rows"])  # of which there may be any number
def copy_rows_kernel(source, target, source_rows, target_rows, num_words, source_stride, target_stride, words: tl.constexpr):
    # target[target_rows[i], w] = source[source_rows[i], w]; without row numbers, row i.
    # A program owns `words` words of one row; rows are contiguous, their offsets int64. The mask guards the end of a row.
    pair = tl.program_id(0).to(tl.int64)
    source_row = pair
    target_row = pair
    if source_rows is not None:
        source_row = tl.load(source_rows + pair)
    if target_rows is not None:
        target_row = tl.load(target_rows + pair)
    word = tl.program_id(1) * words + tl.arange(0, words)
    is_word = word < num_words
    copied = tl.load(source + source_row * source_stride + word, mask=is_word)
    tl.store(target + target_row * target_stride + word, copied, mask=is_word)


def copy_blocks(blocks: Tensor, sources: Tensor, targets: Tensor) -> None:
    """As `kernels.blocks.copy_blocks`, in one launch."""
    _copy_rows(blocks, blocks, sources, targets)


def gather_blocks(blocks: Tensor, sources: Tensor, staging: Tensor) -> None:
    """As `kernels.blocks.gather_blocks`."""
    _copy_rows(blocks, staging, sources, None)


def scatter_blocks(staging: Tensor, blocks: Tensor, targets: Tensor) -> None:
    """As `kernels.blocks.scatter_blocks`."""
    _copy_rows(staging, blocks, None, targets)


def _copy_rows(source: Tensor, target: Tensor, source_rows: Tensor | None, target_rows: Tensor | None) -> None:
    assert source.dtype == target.dtype == torch.int64
    assert source.stride(1) == target.stride(1) == 1
    rows = source_rows if source_rows is not None else target_rows
    assert rows is not None
    num_words = source.shape[1]
    grid = (len(rows), triton.cdiv(num_words, _WORDS))
    strides = source.stride(0), target.stride(0)
    copy_rows_kernel[grid](source, target, source_rows, target_rows, num_words, *strides, words=_WORDS, **_OPTIONS)


def specialisations() -> list[Specialisation]:
    """Within the pool, out of it and into it."""
    return [_specialisation(*pair) for pair in (("copy", True, True), ("gather", True, False), ("scatter", False, True))]


def _specialisation(name: str, has_source_rows: bool, has_target_rows: bool) -> Specialisation:
    signature = {"source": "*i64", "target": "*i64"} | dict.fromkeys(("num_words", "source_stride", "target_stride"), "i32:16")
    constexprs: dict[str, int | None] = {"words": _WORDS}
    for rows, is_there in (("source_rows", has_source_rows), ("target_rows", has_target_rows)):
        if is_there:
            signature[rows] = "*i64"
        else:
            constexprs[rows] = None
    return Specialisation(name, copy_rows_kernel, signature, constexprs, _OPTIONS)
