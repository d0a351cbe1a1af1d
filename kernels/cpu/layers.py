"""Norms and gated activations on a processor, in one pass over a row; the twins are those of kernels/layers.py.

Activations are float32 here, whatever the weights are: what a layer hands on is not rounded to bfloat16.
"""

import struct

import torch
from numba import njit, types
from torch import Tensor

from kernels import layers
from kernels.cpu import threads
from kernels.cpu.linear import round_row
from kernels.cpu.vectors import WIDTH, add, as_float, div, exp, fetch_add, fma, load, mul, splat, store, sub, total, word

WEIGHT_WORD = 5
"""Where an operation's arguments name what differs between layers."""
_ROWS = 4
"""Rows of a piece of work."""


@njit
def rms_norm_rows(args):
    """The operation RMS_NORM; its arguments are those of `norm_words`."""
    hidden, hidden_row, residual, residual_row = word(args, 1), word(args, 2), word(args, 3), word(args, 4)
    weight, out, summed, rows, size, eps = (
        word(args, 5),
        word(args, 6),
        word(args, 7),
        word(args, 8),
        word(args, 9),
        word(args, 10),
    )
    numbers, scales = word(args, 11), word(args, 12)
    while True:
        start = fetch_add(args, 1) * _ROWS
        if start >= rows:
            break
        for row in range(start, min(start + _ROWS, rows)):
            source, target = hidden + row * hidden_row, out + 4 * row * size
            squares = splat(types.float32(0))
            if residual:
                for at in range(0, 4 * size, 4 * WIDTH):
                    x = add(load(source + at), load(residual + row * residual_row + at))
                    store(summed + 4 * row * size + at, x)
                    squares = fma(x, x, squares)
                source = summed + 4 * row * size
            else:
                for at in range(0, 4 * size, 4 * WIDTH):
                    x = load(source + at)
                    squares = fma(x, x, squares)
            factor = splat(types.float32(1) / types.float32((total(squares) / types.float32(size) + as_float(eps)) ** 0.5))
            for at in range(0, 4 * size, 4 * WIDTH):
                store(target + at, mul(mul(load(source + at), factor), load(weight + at)))
            if numbers:
                round_row(target, numbers + 2 * row * size, scales + 4 * row, size)


@njit
def silu_and_mul_rows(args):
    """The operation SILU_AND_MUL; its arguments are those of `silu_words`."""
    gates, gates_row, out, rows, size = word(args, 1), word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    numbers, scales = word(args, 6), word(args, 7)
    while True:
        start = fetch_add(args, 1) * _ROWS
        if start >= rows:
            break
        one, zero = splat(types.float32(1)), splat(types.float32(0))
        for row in range(start, min(start + _ROWS, rows)):
            source, target = gates + row * gates_row, out + 4 * row * size
            for at in range(0, 4 * size, 4 * WIDTH):
                gate = load(source + at)
                opened = div(gate, add(one, exp(sub(zero, gate))))
                store(target + at, mul(opened, load(source + 4 * size + at)))
            if numbers:
                round_row(target, numbers + 2 * row * size, scales + 4 * row, size)


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `layers.rms_norm`, for float32; `weight` float32, to which `offset` is added at each call unless it is 0."""
    rows, size = hidden.shape
    if size % WIDTH or hidden.dtype != torch.float32 or weight.dtype != torch.float32:
        return layers.rms_norm(hidden, weight, eps, residual=residual, offset=offset)
    weight = weight + offset if offset else weight
    out = torch.empty((rows, size))
    summed = hidden if residual is None else torch.empty((rows, size))
    threads.run(threads.RMS_NORM, *norm_words(hidden, residual, weight, eps, out, summed), pieces=-(-rows // _ROWS))
    return out, summed


def norm_words(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    summed: Tensor,
    rounded: tuple[Tensor, Tensor] | None = None,
) -> tuple[int, ...]:
    """Arguments of the operation; `rounded` numbers and scales are for the result as `linear.quantise_rows` makes them."""
    return (
        *(hidden.data_ptr(), 4 * hidden.stride(0)),
        *((0, 0) if residual is None else (residual.data_ptr(), 4 * residual.stride(0))),
        *(weight.data_ptr(), out.data_ptr(), summed.data_ptr(), *hidden.shape),
        struct.unpack("i", struct.pack("f", eps))[0],
        *_addresses(rounded),
    )


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As `layers.silu_and_mul`, for float32."""
    rows, size = len(gate_up), gate_up.shape[1] // 2
    if size % WIDTH or gate_up.dtype != torch.float32:
        return layers.silu_and_mul(gate_up)
    out = torch.empty((rows, size))
    threads.run(threads.SILU_AND_MUL, *silu_words(gate_up, out), pieces=-(-rows // _ROWS))
    return out


def silu_words(gate_up: Tensor, out: Tensor, rounded: tuple[Tensor, Tensor] | None = None) -> tuple[int, ...]:
    """Arguments of the operation; `rounded` as for `norm_words`."""
    return gate_up.data_ptr(), 4 * gate_up.stride(0), out.data_ptr(), *out.shape, *_addresses(rounded)


def _addresses(rounded: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    return (0, 0) if rounded is None else (rounded[0].data_ptr(), rounded[1].data_ptr())
