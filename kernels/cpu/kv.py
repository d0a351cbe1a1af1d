"""Where keys and values lie in a block on a processor, and how they get there; the twins are in reference.py and layers.py.

A layer of a block holds as many numbers as elsewhere, in another order:

    keys    [num_kv_heads, block_size / 16, head_dim, 16]   so that the scores of 16 positions are one vector
    values  [num_kv_heads, block_size, head_dim]

so kernels/cpu/attention.py alone may read what is written here. Layers that do not `fit` are left to the reference, both ways.
"""

from typing import Any

import torch
from numba import njit
from torch import Tensor

from kernels import layers, reference
from kernels.cpu import threads
from kernels.cpu.vectors import (
    BFLOAT16,
    FLOAT32,
    WIDTH,
    add,
    fetch_add,
    get,
    load,
    mul,
    put,
    put_bf16,
    store,
    store_bf16,
    sub,
    word,
    word32,
)

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
LAYER_WORD = 7
"""Where an operation's arguments name what differs between layers."""
_ROWS = 4
"""Tokens of a piece of work."""


def fits(kv_cache_layer: Tensor) -> bool:
    """Whether the kernels here compute on such a layer of the KV cache."""
    _, _, block_size, _, head_dim = kv_cache_layer.shape
    return kv_cache_layer.dtype in KINDS and block_size % WIDTH == 0 and head_dim % WIDTH == 0


@njit
def key_address(layer, block_bytes, table, position, head, head_dim, block_size, size):
    """The 16 keys among which `position` of a sequence is, as the first of them lie at each element of the head."""
    return _keys(
        layer + word32(table, position // block_size) * block_bytes, position % block_size, head, head_dim, block_size, size
    )


@njit
def value_address(layer, block_bytes, table, position, head, heads, head_dim, block_size, size):
    """The value at `position` of a sequence."""
    block = layer + word32(table, position // block_size) * block_bytes
    return _values(block, position % block_size, head, heads, head_dim, block_size, size)


@njit
def _keys(block, place, head, head_dim, block_size, size):
    return block + (head * (block_size // WIDTH) + place // WIDTH) * head_dim * WIDTH * size


@njit
def _values(block, place, head, heads, head_dim, block_size, size):
    return block + ((heads + head) * block_size + place) * head_dim * size


@njit
def _store_key(kind, key, block, place, head, head_dim, block_size):
    size = 2 if kind == BFLOAT16 else 4
    target = _keys(block, place, head, head_dim, block_size, size) + place % WIDTH * size
    for at in range(head_dim):
        if kind == BFLOAT16:
            put_bf16(target + at * WIDTH * size, get(key + 4 * at))
        else:
            put(target + at * WIDTH * size, get(key + 4 * at))


@njit
def _store_value(kind, value, block, place, head, heads, head_dim, block_size):
    target = _values(block, place, head, heads, head_dim, block_size, 2 if kind == BFLOAT16 else 4)
    for at in range(0, head_dim, WIDTH):
        if kind == BFLOAT16:
            store_bf16(target + 2 * at, load(value + 4 * at))
        else:
            store(target + 4 * at, load(value + 4 * at))


@njit
def write(args):
    """The operation WRITE: `write_kv`."""
    key, key_row, key_head, value, value_row, value_head = (
        word(args, 1), word(args, 2), word(args, 3), word(args, 4), word(args, 5), word(args, 6)
    )  # fmt: skip
    layer, block_bytes, slots, tokens = word(args, 7), word(args, 8), word(args, 9), word(args, 10)
    heads, head_dim, block_size, kind = word(args, 11), word(args, 12), word(args, 13), word(args, 14)
    while True:
        start = fetch_add(args, 1) * _ROWS
        if start >= tokens:
            break
        for token in range(start, min(start + _ROWS, tokens)):
            slot = word(slots, token)
            if slot >= 0:
                block, place = layer + slot // block_size * block_bytes, slot % block_size
                for head in range(heads):
                    _store_key(kind, key + token * key_row + head * key_head, block, place, head, head_dim, block_size)
                    source = value + token * value_row + head * value_head
                    _store_value(kind, source, block, place, head, heads, head_dim, block_size)


@njit
def _rotate(source, target, cos, sin, size, head_dim):
    """`x cos + rotate_half(x) sin` over the first `size` elements, a multiple of 32; the rest is copied."""
    half = 2 * size
    for at in range(0, half, 4 * WIDTH):
        first, second = load(source + at), load(source + half + at)
        store(target + at, sub(mul(first, load(cos + at)), mul(second, load(sin + at))))
        store(target + half + at, add(mul(second, load(cos + half + at)), mul(first, load(sin + half + at))))
    for at in range(4 * size, 4 * head_dim, 4 * WIDTH):
        store(target + at, load(source + at))


@njit
def rotate_and_write(args):
    """The operation ROTATE_AND_WRITE; its arguments are those of `rotate_words`."""
    qkv, qkv_row, cos, sin, size = word(args, 1), word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    out, query_heads, scratch = word(args, 6), word(args, 15), word(args, 16)
    layer, block_bytes, slots, tokens = word(args, 7), word(args, 8), word(args, 9), word(args, 10)
    heads, head_dim, block_size, kind = word(args, 11), word(args, 12), word(args, 13), word(args, 14)
    key = scratch + 4 * head_dim * fetch_add(args + 8 * 17, 1)
    while True:
        start = fetch_add(args, 1) * _ROWS
        if start >= tokens:
            break
        for token in range(start, min(start + _ROWS, tokens)):
            row, angle = qkv + token * qkv_row, 4 * token * size
            for head in range(query_heads):
                target = out + 4 * (token * query_heads + head) * head_dim
                _rotate(row + 4 * head * head_dim, target, cos + angle, sin + angle, size, head_dim)
            slot = word(slots, token)
            if slot >= 0:
                block, place = layer + slot // block_size * block_bytes, slot % block_size
                for head in range(heads):
                    source = row + 4 * (query_heads + head) * head_dim
                    _rotate(source, key, cos + angle, sin + angle, size, head_dim)
                    _store_key(kind, key, block, place, head, head_dim, block_size)
                    source += 4 * heads * head_dim
                    _store_value(kind, source, block, place, head, heads, head_dim, block_size)


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache_layer: Tensor,
    slot_mapping: Tensor,
    plan: Any = None,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """As `reference.write_kv`, in the order of this module where the layer fits."""
    if not fits(kv_cache_layer):
        reference.write_kv(key, value, kv_cache_layer, slot_mapping, plan, kv_scales=kv_scales)
        return
    key, value = (tensor.float() if tensor.stride(-1) == 1 else tensor.float().contiguous() for tensor in (key, value))
    threads.run(
        threads.WRITE,
        *(key.data_ptr(), 4 * key.stride(0), 4 * key.stride(1)),
        *(value.data_ptr(), 4 * value.stride(0), 4 * value.stride(1)),
        *_place(kv_cache_layer, slot_mapping),
        pieces=-(-len(key) // _ROWS),
    )


def rotate_and_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache_layer: Tensor,
    slot_mapping: Tensor,
    plan: Any = None,
    *,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """As `layers.rotate_and_write_kv`, for `qkv` float32 in and queries float32 out."""
    size = cos.shape[-1]
    if not fits(kv_cache_layer):
        return layers.rotate_and_write_kv(qkv, cos, sin, kv_cache_layer, slot_mapping, plan, kv_scales=kv_scales)
    heads, head_dim = kv_cache_layer.shape[3:]
    if size % (2 * WIDTH):
        query, key, value = layers.rotate(qkv, cos, sin, heads, head_dim)
        write_kv(key, value, kv_cache_layer, slot_mapping)
        return query
    out = torch.empty((len(qkv), qkv.shape[1] // head_dim - 2 * heads, head_dim))
    angles = cos.float().contiguous(), sin.float().contiguous()
    scratch = torch.empty(torch.get_num_threads() * head_dim)
    words = rotate_words(qkv, angles, kv_cache_layer, slot_mapping, out, scratch)
    threads.run(threads.ROTATE_AND_WRITE, *words, pieces=-(-len(qkv) // _ROWS))
    return out


def rotate_words(
    qkv: Tensor, angles: tuple[Tensor, Tensor], kv_cache_layer: Tensor, slot_mapping: Tensor, out: Tensor, scratch: Tensor
) -> tuple[int, ...]:
    """Arguments of the operation; `angles` cosines and sines float32, `scratch` a head for each thread."""
    cos, sin = angles
    return (
        *(qkv.data_ptr(), 4 * qkv.stride(0), cos.data_ptr(), sin.data_ptr(), cos.shape[1], out.data_ptr()),
        *_place(kv_cache_layer, slot_mapping),
        *(out.shape[1], scratch.data_ptr(), 0),
    )


def _place(kv_cache_layer: Tensor, slot_mapping: Tensor) -> tuple[int, ...]:
    _, _, block_size, heads, head_dim = kv_cache_layer.shape
    block_bytes = kv_cache_layer.stride(0) * kv_cache_layer.element_size()
    pointers = kv_cache_layer.data_ptr(), block_bytes, slot_mapping.data_ptr(), len(slot_mapping)
    return *pointers, heads, head_dim, block_size, KINDS[kv_cache_layer.dtype]
