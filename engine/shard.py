"""The part of a model that one of several processes computes: some of the heads and features of every layer.

Relies on transformers' tensor-parallel plans, which say what is cut and where parts are summed, and on torch.distributed for
the sums. Leaves starting and leading the other processes to parallel.py; the whole model is a part like any other, `WHOLE`.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.errors import ModelUnsupported

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long one process waits in a sum for another that lives: the slowest may read its weights from a cold disk."""
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size`."""

    rank: int = 0
    size: int = 1
    agree: Callable[[int], int] = int
    """The least of what all parts call it with: every part calls it, in the same order."""

    def place(self, device: str) -> str:
        """Where this part lives: all on the CPU, or on consecutive GPUs from the one that `device` names."""
        kind, _, index = device.partition(":")
        return (
            f"cuda:{int(index or 0) + self.rank}" if kind == "cuda" and self.size > 1 and (index or "0").isdigit() else device
        )

    def join(self, store: Path, device: torch.device) -> None:
        """Meet the other parts through the file `store`. Blocks until all are there."""
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # transformers takes the GPU from it
        if device.type == "cpu":
            loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # else it looks for an address of the host's name
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=dist.FileStore(str(store), self.size),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.size,
            timeout=JOIN_TIMEOUT,
        )

    def loading_options(self) -> dict[str, Any]:
        """Keywords for `from_pretrained` that make it load this part only, where `join` was told to live."""
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=self.size)}

    def kv_heads(self, text_config: Any) -> int:
        """Key/value heads that this part computes and caches.

        Args:
            text_config: transformers' configuration of the decoder.

        Raises:
            ModelUnsupported: transformers has no plan for the model, or its heads do not divide.
        """
        heads: int = text_config.num_attention_heads
        kv_heads: int = getattr(text_config, "num_key_value_heads", None) or heads
        if self.size == 1:
            return kv_heads
        plan: dict[str, str] = getattr(text_config, "base_model_tp_plan", None) or {}
        if not plan:
            why, remedy = f"transformers has no tensor-parallel plan for {text_config.model_type}", "use 1"
        elif not any(name.endswith(_KEY_PROJECTIONS) and style == "colwise" for name, style in plan.items()):
            return kv_heads  # this model's parts all compute all heads
        elif heads % self.size or kv_heads % self.size:
            fitting = [str(size) for size in range(1, kv_heads + 1) if not heads % size and not kv_heads % size]
            why = f"the model has {heads} attention heads and {kv_heads} key/value heads, which do not divide by it"
            remedy = f"use {' or '.join(fitting)}"
        else:
            return kv_heads // self.size
        raise ModelUnsupported(f"tensor_parallel: {self.size}: {why}; {remedy}")


WHOLE = Shard()
"""The part that is everything."""


def weights_bytes(model: Any) -> int:
    """Bytes of the weights that this process holds."""
    from torch.distributed.tensor import DTensor

    return sum((weight.to_local() if isinstance(weight, DTensor) else weight).nbytes for weight in model.parameters())
