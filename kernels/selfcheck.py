"""Holds what kernels/dispatch.py offers on this machine against the twins, and says what torch finds: one JSON line.

    python -P -m kernels.selfcheck
    {"torch": "2.13.0", "cuda": "13.0", "gpus": ["..."], "kernels": [{"name": ..., "device": ..., "error": ..., "limit": ...}]}

`error` is the largest difference from the reference on the CPU, in float32 over a small ragged batch of order 1; text where an
implementation failed. A GPU is tried in bfloat16 and with a cache of one byte a number as well, since each of them is another
kernel; what these are held to begins with the rounded inputs. A program of its own, so that whoever asks needs no torch.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import REFERENCE_LAYERS, AttentionKernels, LayerKernels, attention_kernels, layer_kernels
from kernels.reference import HostLengths, paged_attention, write_kv


class Format(NamedTuple):
    """What is computed with, and what is cached."""

    name: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    limit: float


FLOAT32 = Format("", torch.float32, torch.float32, 1e-4)
"""Rounding is some 1e-6; a GPU that multiplies in TF32 is at 1e-3, and no longer the reference."""
ON_A_GPU = (
    Format(" bfloat16", torch.bfloat16, torch.bfloat16, 3e-2),
    Format(" int8", torch.bfloat16, torch.int8, 5e-2),
    Format(" fp8", torch.bfloat16, torch.float8_e4m3fn, 5e-2),
)
"""Results are of order 1 and rounded to 8 bits, 4e-3 each, as are the weights."""
CONTEXTS = (1, 23, 40, 17, 130)
NEW = (1, 1, 13, 17, 1)
LAYER_SLOTS = (5, 80, 31, -1, 32, 33, 7)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16


def report() -> dict[str, Any]:
    """All there is to say."""
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    chosen = [(attention_kernels(device), device, FLOAT32) for device in devices]
    chosen += [(kernels, device, form) for kernels, device, _ in chosen[1:] for form in ON_A_GPU]
    chosen.append((attention_kernels(devices[0], batch_invariant=True), devices[0], FLOAT32))
    layers = [(layer_kernels(device), device) for device in devices]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(device) for device in devices[1:]],
        "kernels": [
            *(
                _row(kernels.name + form.name, device, form.limit, error_of(kernels, device, form))
                for kernels, device, form in chosen
            ),
            *(
                _row(f"{kernels.name} layers", device, FLOAT32.limit, layer_error(kernels, device))
                for kernels, device in layers
            ),
        ],
    }


def error_of(kernels: AttentionKernels, device: torch.device, form: Format) -> float | str:
    """The largest difference of attention, or what went wrong."""
    return _largest(lambda: _attended(kernels, device, form) - _expected(form))


def layer_error(kernels: LayerKernels, device: torch.device) -> float | str:
    """The largest difference of what layers are made of, or what went wrong."""
    return _largest(lambda: _layered(kernels, device) - _layered(REFERENCE_LAYERS, torch.device("cpu")))


def _row(name: str, device: torch.device, limit: float, error: float | str) -> dict[str, Any]:
    return {"name": name, "device": str(device), "limit": limit, "error": error}


def _largest(difference: Callable[[], Tensor]) -> float | str:
    try:
        return float(difference().abs().max())
    except Exception as error:  # noqa: BLE001 - of every kind, where a driver or a compiler fails
        return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _layered(kernels: LayerKernels, device: torch.device) -> Tensor:
    """All that the parts of a layer make of random numbers, one after the other."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    num_tokens, width = len(LAYER_SLOTS), 2 * HEAD_DIM
    hidden, residual = draw(num_tokens, width), draw(num_tokens, width)
    product = kernels.linear(draw(width, width) * width**-0.5, draw(width))(hidden, residual=residual)
    normed = kernels.rms_norm(hidden, draw(width), 1e-6, residual=residual)
    opened = kernels.silu_and_mul(draw(num_tokens, 2 * width))
    angles = draw(num_tokens, HEAD_DIM // 2).repeat(1, 2)
    qkv, slots = draw(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM), torch.tensor(LAYER_SLOTS, device=device)
    qkv = kernels.norm_heads(qkv, draw(HEAD_DIM), draw(HEAD_DIM), 1e-6, NUM_KV_HEADS)
    query = kernels.rotate_and_write_kv(qkv, angles.cos(), angles.sin(), _cache(device, torch.float32)[0], slots)
    return torch.cat([part.flatten() for part in (product, *normed, opened, qkv, query)]).cpu()


def _batch(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, values of all sequences one after the other in `dtype`, and the slots of the keys."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(sum(NEW), NUM_HEADS, HEAD_DIM, generator=generator)
    key, value = (torch.randn(sum(CONTEXTS), NUM_KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    tables = _tables()
    slots = [
        tables[i, torch.arange(n) // BLOCK_SIZE] * BLOCK_SIZE + torch.arange(n) % BLOCK_SIZE for i, n in enumerate(CONTEXTS)
    ]
    return query.to(dtype), key.to(dtype), value.to(dtype), torch.cat(slots)


def _tables() -> Tensor:
    """Blocks in descending order, so that no sequence lies in one piece."""
    width = -(-max(CONTEXTS) // BLOCK_SIZE)
    return torch.arange(len(CONTEXTS) * width - 1, -1, -1).view(len(CONTEXTS), width)


def _places(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables, starts of the sequences' rows, lengths of their contexts."""
    starts = torch.tensor([0, *NEW]).cumsum(0)
    tables, starts, contexts = (tensor.int().to(device) for tensor in (_tables(), starts, torch.tensor(CONTEXTS)))
    return tables, starts, contexts


def _cache(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A cache and its scales, if it has any: NaN where no key is, which nobody may read."""
    shape = (_tables().numel(), 2, BLOCK_SIZE, NUM_KV_HEADS)
    if dtype.itemsize > 1:
        return torch.full((*shape, HEAD_DIM), torch.nan, dtype=dtype, device=device), None
    return torch.zeros((*shape, HEAD_DIM), dtype=dtype, device=device), torch.full(shape, torch.nan, device=device)


def _attended(kernels: AttentionKernels, device: torch.device, form: Format) -> Tensor:
    query, key, value, slots = (tensor.to(device) for tensor in _batch(form.dtype))
    (cache, scales), places = _cache(device, form.kv_dtype), _places(device)
    plan = kernels.plan(*places, slots, HostLengths(np.cumsum([0, *NEW]), np.array(CONTEXTS)))
    kernels.write_kv(key, value, cache, slots, plan, kv_scales=scales)
    return kernels.paged_attention(query, cache, *places, scale=HEAD_DIM**-0.5, plan=plan, kv_scales=scales).cpu().float()


def _expected(form: Format) -> Tensor:
    query, key, value, slots = _batch(form.dtype)
    cache, scales = _cache(torch.device("cpu"), form.kv_dtype)
    write_kv(key, value, cache, slots, kv_scales=scales)
    places = _places(cache.device)
    return paged_attention(query.float(), cache, *places, scale=HEAD_DIM**-0.5, kv_scales=scales)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report()) + "\n")
