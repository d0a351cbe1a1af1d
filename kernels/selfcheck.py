"""Holds what kernels/dispatch.py offers on this machine against the twins, and says what torch finds: one JSON line.

    python -P -m kernels.selfcheck
    {"torch": "2.13.0", "cuda": "13.0", "gpus": ["..."], "kernels": [{"name": ..., "device": ..., "error": ..., "limit": ...}]}

`error` is the largest difference from the reference on the CPU, in float32 over a small ragged batch of order 1; text where an
implementation failed. A program of its own, so that whoever asks needs no torch.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from kernels.dispatch import AttentionKernels, attention_kernels
from kernels.reference import paged_attention, write_kv

LIMIT = 1e-4
"""Rounding is some 1e-6; a GPU that multiplies in TF32 is at 1e-3, and no longer the reference."""
CONTEXTS = (1, 23, 40, 17, 130)
NEW = (1, 1, 13, 17, 1)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16


def report() -> dict[str, Any]:
    """All there is to say."""
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    chosen = [(device, attention_kernels(device)) for device in devices]
    chosen.append((devices[0], attention_kernels(devices[0], batch_invariant=True)))
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(device) for device in devices[1:]],
        "kernels": [
            {"name": kernels.name, "device": str(device), "limit": LIMIT, "error": _error(kernels, device)}
            for device, kernels in chosen
        ],
    }


def _error(kernels: AttentionKernels, device: torch.device) -> float | str:
    try:
        difference = (_attended(kernels, device) - _expected()).abs().max()
        return float(difference)
    except Exception as error:  # noqa: BLE001 - of every kind, where a driver or a compiler fails
        return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, values of all sequences one after the other, and the slots of the keys."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(sum(NEW), NUM_HEADS, HEAD_DIM, generator=generator)
    key, value = (torch.randn(sum(CONTEXTS), NUM_KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    tables = _tables()
    slots = [
        tables[i, torch.arange(n) // BLOCK_SIZE] * BLOCK_SIZE + torch.arange(n) % BLOCK_SIZE for i, n in enumerate(CONTEXTS)
    ]
    return query, key, value, torch.cat(slots)


def _tables() -> Tensor:
    """Blocks in descending order, so that no sequence lies in one piece."""
    width = -(-max(CONTEXTS) // BLOCK_SIZE)
    return torch.arange(len(CONTEXTS) * width - 1, -1, -1).view(len(CONTEXTS), width)


def _places(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables, starts of the sequences' rows, lengths of their contexts."""
    starts = torch.tensor([0, *NEW]).cumsum(0)
    tables, starts, contexts = (tensor.int().to(device) for tensor in (_tables(), starts, torch.tensor(CONTEXTS)))
    return tables, starts, contexts


def _cache(device: torch.device) -> Tensor:
    """NaN where no key is, which nobody may read."""
    return torch.full((_tables().numel(), 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), torch.nan, device=device)


def _attended(kernels: AttentionKernels, device: torch.device) -> Tensor:
    query, key, value, slots = (tensor.to(device) for tensor in _batch())
    cache, places = _cache(device), _places(device)
    plan = kernels.plan(*places, slots)
    kernels.write_kv(key, value, cache, slots, plan)
    return kernels.paged_attention(query, cache, *places, scale=HEAD_DIM**-0.5, plan=plan).cpu()


def _expected() -> Tensor:
    query, key, value, slots = _batch()
    cache = _cache(torch.device("cpu"))
    write_kv(key, value, cache, slots)
    return paged_attention(query, cache, *_places(cache.device), scale=HEAD_DIM**-0.5)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report()) + "\n")
