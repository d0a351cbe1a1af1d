"""From logits to token ids in Triton: the largest, uniform numbers, draws by inverse CDF; the twins are in kernels/sampling.py.

A row is cut into tiles of a fixed size, which are reduced by themselves and then, in the order of their ids, by one program per
row. So few rows fill a GPU too, nothing as large as the logits is written, and a row's result depends on the row alone: its
tiles and the order of its sums are those of the vocabulary. Truncation to top-k and top-p stays in torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.specialisation import Specialisation

# Logits of one tile, and rows of a program of `uniform`. Untuned: chosen without a GPU.
_TILE = 4096
_OPTIONS = {"num_warps": 8}
_ROWS = 128
_TILE_BLOCKS = (16, 64)
"""Sizes to which a row's number of tiles is rounded up, so that few kernels are compiled; more are a power of two."""


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.sampling.largest`, for float logits of any width and row stride."""
    logits = _with_unit_stride(logits)
    maxima, ids = _tile_maxima(logits)
    values = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    found = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _pick_largest[(len(logits),)](maxima, ids, values, found, maxima.shape[1], _tile_block(maxima.shape[1]), num_warps=1)
    return values.to(logits.dtype), found


def uniform(seed: Tensor, choice: Tensor, index: Tensor) -> Tensor:
    """As `kernels.sampling.uniform`, bit by bit, for contiguous tensors."""
    drawn = torch.empty(len(seed), dtype=torch.float64, device=seed.device)
    _uniform[(triton.cdiv(len(seed), _ROWS),)](seed, choice, index, drawn, len(seed), _ROWS)
    return drawn


def draw(logits: Tensor, temperature: Tensor, uniform: Tensor, *, min_p: Tensor | None = None) -> Tensor:
    """As `kernels.sampling.draw`; an id may be its neighbour where `uniform` falls within float32's rounding of an edge.

    The vectors are contiguous.
    """
    logits = _with_unit_stride(logits)
    found = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    maxima, _ = _tile_maxima(logits)
    num_tiles, block = maxima.shape[1], _tile_block(maxima.shape[1])
    sums = torch.empty(maxima.shape, dtype=torch.float64, device=logits.device)
    width = (logits.shape[1], logits.stride(0), num_tiles)
    _sum_tiles[(len(logits), num_tiles)](logits, temperature, min_p, maxima, sums, *width, _TILE, block, **_OPTIONS)
    grid = (len(logits),)
    _pick_drawn[grid](logits, temperature, min_p, uniform, maxima, sums, found, *width, _TILE, block, **_OPTIONS)
    return found


def specialisations() -> list[Specialisation]:
    """For vocabularies from 64k to 256k that are a multiple of 16, in fp32, with min-p and without."""
    tile, shape = {"tile": _TILE}, {"size": "i32:16", "stride": "i32:16", "num_tiles": "i32"}
    maxima = {"maxima_ptr": "*fp32", "ids_ptr": "*i64"}
    drawn = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32", "maxima_ptr": "*fp32", "sums_ptr": "*fp64"} | shape
    picked = drawn | {"uniform_ptr": "*fp64", "found_ptr": "*i64"}
    block = {"block": _TILE_BLOCKS[-1]}
    plain, with_min_p, least = tile | block | {"min_p_ptr": None}, tile | block, {"min_p_ptr": "*fp32"}
    largest_row = maxima | {"values_ptr": "*fp32", "found_ptr": "*i64", "num_tiles": "i32"}
    return [
        Specialisation("uniform", _uniform, _UNIFORM, {"rows": _ROWS}),
        Specialisation("find_maxima", _find_maxima, {"logits_ptr": "*fp32"} | maxima | shape, tile, _OPTIONS),
        Specialisation("pick_largest", _pick_largest, largest_row, block, {"num_warps": 1}),
        Specialisation("sum_tiles", _sum_tiles, drawn, plain, _OPTIONS),
        Specialisation("sum_tiles_min_p", _sum_tiles, drawn | least, with_min_p, _OPTIONS),
        Specialisation("pick_drawn", _pick_drawn, picked, plain, _OPTIONS),
        Specialisation("pick_drawn_min_p", _pick_drawn, picked | least, with_min_p, _OPTIONS),
    ]


@triton.jit
def _find_maxima(logits_ptr, maxima_ptr, ids_ptr, size, stride, num_tiles, tile: tl.constexpr):
    # A program owns one tile of one row: its largest value and the first id that has it; NaN is larger than all else.
    # maxima and ids [n, num_tiles]. The mask guards the row's end; what lies beyond is -inf and loses to every id by its place.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    x = tl.load(logits_ptr + row * stride + column, mask=column < size, other=float("-inf")).to(tl.float32)
    value, first = _first_largest(x, column)
    place = row * num_tiles + tl.program_id(1)
    tl.store(maxima_ptr + place, value)
    tl.store(ids_ptr + place, first.to(tl.int64))


@triton.jit
def _pick_largest(maxima_ptr, ids_ptr, values_ptr, found_ptr, num_tiles, block: tl.constexpr):
    # A program owns one row's tiles: the largest of their values, of the first tile that has it.
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, block)
    x = tl.load(maxima_ptr + row * num_tiles + index, mask=index < num_tiles, other=float("-inf"))
    value, first = _first_largest(x, index)
    tl.store(values_ptr + row, value)
    tl.store(found_ptr + row, tl.load(ids_ptr + row * num_tiles + first))


@triton.jit
def _first_largest(x, index):
    # The largest of x and the least index that has it; of x that hold NaN, NaN and the least index of one.
    is_nan = x != x
    value = tl.max(tl.where(is_nan, float("inf"), x), 0)
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    is_largest = tl.where(has_nan, is_nan, x == value)
    first = tl.min(tl.where(is_largest, index, 0x7FFFFFFF), 0)
    return tl.where(has_nan, float("nan"), value), first


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seed_ptr", "choice_ptr", "index_ptr"])
def _uniform(seed_ptr, choice_ptr, index_ptr, drawn_ptr, num_rows, rows: tl.constexpr):
    # 53 bits of Philox4x32-10 of key `seed` and counter (index, index >> 32, choice, 0). A program owns `rows` rows.
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    is_row = row < num_rows
    seed = tl.load(seed_ptr + row, mask=is_row, other=0)
    choice = tl.load(choice_ptr + row, mask=is_row, other=0).to(tl.uint32)
    index = tl.load(index_ptr + row, mask=is_row, other=0)
    high, low, _, _ = tl.philox(seed, index.to(tl.uint32), (index >> 32).to(tl.uint32), choice, choice * 0)
    bits = (high >> 5).to(tl.int64) * 67108864 + (low >> 6).to(tl.int64)
    tl.store(drawn_ptr + row, bits.to(tl.float64) * 1.1102230246251565e-16, mask=is_row)  # 2^-53


@triton.jit
def _sum_tiles(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    maxima_ptr,
    sums_ptr,
    size,
    stride,
    num_tiles,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    # A program owns one tile of one row: the sum of its weights in fp64, sums [n, num_tiles].
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    least, temperature, maximum = _scale(temperature_ptr, min_p_ptr, maxima_ptr, row, num_tiles, block)
    weights = _weights(logits_ptr + row * stride, index * tile + tl.arange(0, tile), size, temperature, maximum, least)
    tl.store(sums_ptr + row * num_tiles + index, tl.sum(weights, 0))


@triton.jit
def _pick_drawn(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    maxima_ptr,
    sums_ptr,
    found_ptr,
    size,
    stride,
    num_tiles,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    # The first id whose running weight exceeds uniform * total: the first such tile, then the first such id in it.
    #
    #     tiles   |    0    |    1    |    2    |        target = uniform * total
    #     before  0         s0     s0 + s1
    #
    # A program owns one row and reads one tile of it. Running sums are rounded, so both searches look only at what carries
    # weight, and take the last of these where none exceeds. A row of NaN has none: its id is the last.
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, block)
    sums = tl.load(sums_ptr + row * num_tiles + index, mask=index < num_tiles, other=0)
    running = tl.cumsum(sums, 0)
    target = tl.load(uniform_ptr + row) * tl.sum(tl.where(index == block - 1, running, 0), 0)
    chosen = _first_above(running, sums, target)
    before = tl.sum(tl.where(index == chosen - 1, running, 0), 0)
    least, temperature, maximum = _scale(temperature_ptr, min_p_ptr, maxima_ptr, row, num_tiles, block)
    column = tl.maximum(chosen, 0) * tile + tl.arange(0, tile)
    weights = _weights(logits_ptr + row * stride, column, size, temperature, maximum, least)
    place = _first_above(before + tl.cumsum(weights, 0), weights, target)
    tl.store(found_ptr + row, tl.where(place < 0, size - 1, chosen * tile + place).to(tl.int64))


@triton.jit
def _scale(temperature_ptr, min_p_ptr, maxima_ptr, row, num_tiles, block: tl.constexpr):
    # What turns a row's logits into weights: the least weight that counts, the temperature and the largest logit.
    least = 0.0
    if min_p_ptr is not None:
        least = tl.load(min_p_ptr + row)
    index = tl.arange(0, block)
    maxima = tl.load(maxima_ptr + row * num_tiles + index, mask=index < num_tiles, other=float("-inf"))
    maximum, _ = _first_largest(maxima, index)
    return least, tl.load(temperature_ptr + row), maximum


@triton.jit
def _weights(logits_ptr, column, size, temperature, maximum, least):
    # exp((x - maximum) / temperature) in fp32 as the twin has it, 0 below `least` and beyond the row's end; as fp64.
    x = tl.load(logits_ptr + column, mask=column < size, other=float("-inf")).to(tl.float32)
    x = x - maximum
    weights = tl.exp(tl.div_rn(x, tl.zeros_like(x) + temperature))
    return tl.where((column < size) & ~(weights < least), weights, 0).to(tl.float64)


@triton.jit
def _first_above(running, weights, target):
    # The first index that carries weight and whose running sum exceeds the target; else the last that carries weight, or -1.
    index = tl.arange(0, running.shape[0])
    has_weight = weights > 0
    first = tl.min(tl.where(has_weight & (running > target), index, running.shape[0]), 0)
    last = tl.max(tl.where(has_weight, index, -1), 0)
    return tl.where(first < running.shape[0], first, last)


_UNIFORM = {"seed_ptr": "*i64", "choice_ptr": "*i64", "index_ptr": "*i64", "drawn_ptr": "*fp64", "num_rows": "i32"}


def _tile_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each tile and its id, `[n, num_tiles]` float32 and int64."""
    num_tiles = triton.cdiv(logits.shape[1], _TILE)
    maxima = torch.empty(len(logits), num_tiles, dtype=torch.float32, device=logits.device)
    ids = torch.empty(maxima.shape, dtype=torch.int64, device=logits.device)
    shape = (logits.shape[1], logits.stride(0), num_tiles)
    _find_maxima[(len(logits), num_tiles)](logits, maxima, ids, *shape, _TILE, **_OPTIONS)
    return maxima, ids


def _tile_block(num_tiles: int) -> int:
    return next((block for block in _TILE_BLOCKS if num_tiles <= block), triton.next_power_of_2(num_tiles))


def _with_unit_stride(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()
