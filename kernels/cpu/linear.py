"""Linear layers on a processor: weights packed once, products in tiles that stay in registers.

    out[m, n] = sum_k x[m, k] * weight[n, k]  (+ bias[n]) (+ residual[m, n])

Weights keep the model's dtype, 16 columns side by side for each k, and are widened as they are read; activations and sums are
float32. A piece of work is 64 columns for so many rows as stay in the second-level cache; threads take pieces as they get free.
A sum runs over k in order, so a row's result has the same bits in any batch. The twin is `layers.linear`.

In int8, a column of weights is rounded to whole numbers up to 127 with a scale of its own, as `reference.quantise` says, and a
row of activations likewise to numbers up to 1,023, since they are multiplied as 16 bits anyway; products are summed exactly.
With activations up to 127 SmolLM2-135M's perplexity rises by 1.6 to 7.7 % instead of -0.2 to 2.9 (docs/kernels.md).
"""

import torch
import torch.nn.functional as F
from numba import njit, types
from torch import Tensor

from kernels.cpu import threads
from kernels.cpu.vectors import (
    BFLOAT16,
    FLOAT32,
    INT8,
    WIDTH,
    absolute,
    fetch_add,
    largest,
    load,
    maximum_or_nan,
    mul,
    product,
    put,
    splat,
    store_i16,
    word,
)
from kernels.reference import quantise

PANELS = 4
"""Panels of 16 columns in a piece of work: the sums of four panels keep both multipliers busy even with a single row."""
CACHED_BYTES = 256 << 10
"""Of activations that a piece goes over for each panel: half a second-level cache of 512 KiB."""
_TALLEST = 6
"""Rows of the largest tile: 12 sums in registers of 8 numbers, of 16 there are."""
PLUS_WORD, WEIGHT_WORD, SCALE_WORD = 3, 7, 15
"""Where an operation's arguments name what differs between layers."""
_ROWS = 8
"""Rows of a piece of work where each row is worked on by itself."""
_MOST = 1023
"""Largest rounded activation; fewer where a sum over a long row would not fit 32 bits."""
_AHEAD = 1024
"""Bytes of each panel that are asked for before they are read, where rows are few."""
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

_product1, _product2, _product3 = product(1, 4), product(2, 2), product(3, 2)
_product4, _product5, _product6 = product(4, 1), product(5, 1), product(6, 1)


@njit
def _tiles(kind, rows, c, c_row, plus, plus_row, a, a_row, b, step, k, a_scale, b_scale):
    """A piece of work: tiles of six rows, then what is left in as large ones as possible."""
    panel = k * step
    sixes, left = rows // _TALLEST, rows % _TALLEST
    if left == 4:
        left = 0
    elif sixes and left == 1:  # 7 is 4 + 3 and 8 is 4 + 4: small tiles leave the multipliers idle
        sixes, left = sixes - 1, 3
    elif sixes and left == 2:
        sixes, left = sixes - 1, 0
    for index in range(PANELS):
        row, b_at, column = 0, b + index * panel, 4 * WIDTH * index
        more, scale = plus + column if plus else 0, b_scale + column
        while row < rows - left or (left == 5 and row < rows):
            at, onto, from_, of_row = c + column + row * c_row, more + row * plus_row, a + row * a_row, a_scale + 4 * row
            if row < sixes * _TALLEST:
                _product6(kind, at, c_row, onto, plus_row, from_, a_row, b_at, step, panel, k, of_row, scale, 0, 0)
                row += _TALLEST
            elif row < rows - left:
                _product4(kind, at, c_row, onto, plus_row, from_, a_row, b_at, step, panel, k, of_row, scale, 0, 0)
                row += 4
            else:
                _product5(kind, at, c_row, onto, plus_row, from_, a_row, b_at, step, panel, k, of_row, scale, 0, 0)
                row += 5
    if 0 < left < 4:
        row = rows - left
        more = plus + row * plus_row if plus else 0
        _small_tiles(kind, left, c + row * c_row, c_row, more, plus_row, a + row * a_row, a_row,
                     b, step, k, a_scale + 4 * row, b_scale)  # fmt: skip


@njit
def _small_tiles(kind, rows, c, c_row, plus, plus_row, a, a_row, b, step, k, a_scale, b_scale):
    """One to three rows, several panels at once."""
    panel = k * step
    if rows == 1:
        _product1(kind, c, c_row, plus, plus_row, a, a_row, b, step, panel, k, a_scale, b_scale, _AHEAD, _AHEAD)
        return
    for index in range(0, PANELS, 2):
        at, b_at, scale = c + 4 * WIDTH * index, b + index * panel, b_scale + 4 * WIDTH * index
        more = plus + 4 * WIDTH * index if plus else 0
        if rows == 2:
            _product2(kind, at, c_row, more, plus_row, a, a_row, b_at, step, panel, k, a_scale, scale, _AHEAD, _AHEAD)
        else:
            _product3(kind, at, c_row, more, plus_row, a, a_row, b_at, step, panel, k, a_scale, scale, _AHEAD, _AHEAD)


@njit
def multiply(args):
    """The operation MULTIPLY; its arguments are those of `PackedLinear.words`."""
    out, out_row, plus, plus_row, x, x_row = (
        word(args, 1), word(args, 2), word(args, 3), word(args, 4), word(args, 5), word(args, 6)
    )  # fmt: skip
    weight, num_rows, groups, k, step, kind = (
        word(args, 7), word(args, 8), word(args, 9), word(args, 10), word(args, 11), word(args, 12)
    )  # fmt: skip
    chunk, x_scale, scale = word(args, 13), word(args, 14), word(args, 15)
    pieces = groups * ((num_rows + chunk - 1) // chunk)
    while True:
        piece = fetch_add(args, 1)
        if piece >= pieces:
            break
        row, column = piece // groups * chunk, piece % groups * PANELS * WIDTH
        more = plus + row * plus_row + 4 * column if plus else 0
        _tiles(
            kind, min(chunk, num_rows - row), out + row * out_row + 4 * column, out_row, more, plus_row, x + row * x_row, x_row,
            weight + column * k * step // WIDTH, step, k, x_scale + 4 * row, scale + 4 * column,
        )  # fmt: skip


@njit
def round_row(source, target, scale, size):
    """`size` float32 become int16, the largest of them `most`, with a scale."""
    bound = min(_MOST, 2147483647 // (127 * size))
    most = splat(types.float32(0))
    for at in range(0, 4 * size, 4 * WIDTH):
        most = maximum_or_nan(most, absolute(load(source + at)))
    step = largest(most) / types.float32(bound)
    put(scale, step)
    inverse = splat(types.float32(1) / step if step > 0 else types.float32(0))
    for at in range(0, 4 * size, 4 * WIDTH):
        store_i16(target + at // 2, mul(load(source + at), inverse))


@njit
def round_rows(args):
    """The operation QUANTISE; its arguments are those of `round_words`."""
    x, x_row, numbers, scales = word(args, 1), word(args, 2), word(args, 3), word(args, 4)
    num_rows, size = word(args, 5), word(args, 6)
    while True:
        start = fetch_add(args, 1) * _ROWS
        if start >= num_rows:
            break
        for row in range(start, min(start + _ROWS, num_rows)):
            round_row(x + row * x_row, numbers + 2 * row * size, scales + 4 * row, size)


class PackedLinear:
    """A linear layer whose weights were packed for this processor."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, is_int8: bool = False) -> None:
        """Pack `weight` `[out, in]`, float32 or bfloat16; `bias` `[out]`."""
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else _padded(bias.float())
        self._scales = None
        self._kind = INT8 if is_int8 else _KINDS[weight.dtype]
        if is_int8:
            weight, scales = quantise(F.pad(weight, (0, -self.in_features % WIDTH)))
            self._scales = _padded(scales)
        self._weight = _pack(_padded(weight), 2 if is_int8 else 1)
        self._chunk = max(_TALLEST, CACHED_BYTES // (4 * self.in_features) // _TALLEST * _TALLEST)

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """`x` `[T, in]` of any float dtype, `residual` `[T, out]` float32 -> `[T, out]` float32."""
        out = torch.empty((len(x), self.padded_out))
        x = x if x.dtype == torch.float32 and x.stride(1) == 1 else x.float().contiguous()
        scales = None
        if self.is_int8:
            x, scales = quantise_rows(F.pad(x, (0, -self.in_features % WIDTH)))
        plus = self._plus(residual)  # held, as the operation knows addresses only
        words = self.words(x, scales, plus, out)
        threads.run(threads.MULTIPLY, *words, pieces=len(self._weight) * -(-len(x) // self._chunk))
        return out if out.shape[1] == self.out_features else out[:, : self.out_features]

    @property
    def padded_out(self) -> int:
        """Columns of a row of the output, padding included."""
        return len(self._weight) * PANELS * WIDTH

    @property
    def is_int8(self) -> bool:
        """Whether activations have to be rounded first."""
        return self._kind == INT8

    @property
    def places(self) -> tuple[int, int, int]:
        """Addresses of the weights, of their scales and of the bias, 0 where there are none."""
        scales, bias = (0 if tensor is None else tensor.data_ptr() for tensor in (self._scales, self._bias))
        return self._weight.data_ptr(), scales, bias

    def words(self, x: Tensor, x_scales: Tensor | None, plus: Tensor | None, out: Tensor) -> tuple[int, ...]:
        """Arguments of the operation; `x` is rounded in int8, `plus` as wide as `out`, a row of stride 0 for all of them."""
        return (
            *(out.data_ptr(), 4 * out.stride(0)),
            *((0, 0) if plus is None else (plus.data_ptr(), 4 * plus.stride(0))),
            *(x.data_ptr(), x.element_size() * x.stride(0), self._weight.data_ptr(), len(x), len(self._weight)),
            *(self._weight.shape[2], self._weight.stride(2) * self._weight.element_size(), self._kind, self._chunk),
            *(0 if x_scales is None else x_scales.data_ptr(), 0 if self._scales is None else self._scales.data_ptr()),
        )

    def _plus(self, residual: Tensor | None) -> Tensor | None:
        """What is added to the product, as wide as the padded weights."""
        if residual is None:
            return None if self._bias is None else self._bias.expand(1, -1).as_strided((1, len(self._bias)), (0, 1))
        if self.out_features % (PANELS * WIDTH):
            residual = _padded(residual.T).T.contiguous()
        return residual if self._bias is None else residual + self._bias


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of `x` `[T, K]` float32, K a multiple of 16: numbers `[T, K]` int16, and scales `[T]` float32."""
    numbers, scales = torch.empty(x.shape, dtype=torch.int16), torch.empty(len(x))
    threads.run(threads.QUANTISE, *round_words(x, numbers, scales), pieces=-(-len(x) // _ROWS))
    return numbers, scales


def round_words(x: Tensor, numbers: Tensor, scales: Tensor) -> tuple[int, ...]:
    """Arguments of the operation."""
    return x.data_ptr(), 4 * x.stride(0), numbers.data_ptr(), scales.data_ptr(), *x.shape


def _padded(columns: Tensor) -> Tensor:
    """With zeros behind, up to whole groups of panels."""
    missing = -len(columns) % (PANELS * WIDTH)
    return torch.cat((columns, columns.new_zeros((missing, *columns.shape[1:])))) if missing else columns


def _pack(weight: Tensor, pair: int) -> Tensor:
    """`[out, in]` -> `[groups, panels, in / pair, 16, pair]`."""
    panels = weight.view(-1, PANELS, WIDTH, weight.shape[1] // pair, pair)
    return panels.transpose(2, 3).contiguous()
