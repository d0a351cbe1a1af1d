"""The KV cache's tensor, and how many blocks of it fit in memory.

One tensor for all layers, `[num_blocks + 1, num_layers, 2, block_size, num_kv_heads, head_dim]`, so that a block moves in one
piece; layers see strided views of it. Block 0 is the null block that padding points at. Which block belongs to whom is
`BlockPool`'s business; measuring memory is the runner's.
"""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import OutOfMemory
from engine.geometry import ModelGeometry

GIB = 1 << 30
MIB = 1 << 20
# Without --kv-blocks and --kv-memory a CPU worker takes a quarter of what is free and at most 4 GiB: the machine stays usable.
CPU_FRACTION, CPU_MOST_BYTES = 0.25, 4 * GIB
# On a GPU the rest is for fragmentation and for what libraries allocate later.
GPU_FRACTION = 0.9


def kv_bytes_per_token(geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """Bytes of one position's keys and values over all layers."""
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * dtype.itemsize


class KVCache:
    """The tensor and its views per layer. Uninitialised: only what was written may be read."""

    def __init__(
        self, geometry: ModelGeometry, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate `num_blocks` usable blocks and the null block."""
        shape = (num_blocks + 1, geometry.num_layers, 2, block_size, geometry.num_kv_heads, geometry.head_dim)
        self.tensor = torch.empty(shape, dtype=dtype, device=device)
        self.layers = self.tensor.unbind(1)
        """Per layer a view `[num_blocks + 1, 2, block_size, num_kv_heads, head_dim]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What was measured after loading, and what a position costs, in bytes; from it follows how many blocks fit."""

    device: str
    total_bytes: int
    free_bytes: int
    """Free with the weights loaded."""
    weights_bytes: int
    activation_bytes: int
    """Peak of one step beside weights and cache."""
    token_bytes: int
    block_size: int
    max_model_len: int
    """The model's limit, or the shorter one that was asked for."""

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def num_blocks(self, config: EngineConfig, max_slots: int) -> int:
        """Usable blocks: what was asked for, or the default for the device.

        Raises:
            OutOfMemory: what was asked for does not fit, or the explicit `max_model_len` does not fit in the blocks.
        """
        room = self.free_bytes - self.activation_bytes
        most = room // self.block_bytes - 1  # the null block takes one
        blocks = self._wanted(config, max_slots, room)
        if not 1 <= blocks <= most:
            raise OutOfMemory(self._misfit(config, blocks, most))
        if config.max_model_len is not None and blocks * self.block_size < config.max_model_len:
            needed = -(-config.max_model_len // self.block_size)
            raise OutOfMemory(
                f"max_model_len: {config.max_model_len} tokens need {needed} KV blocks and there are {blocks}; "
                f"the largest max_model_len that works is {blocks * self.block_size}, "
                f"or raise the KV memory to {(needed + 1) * self.block_bytes / MIB:.0f} MiB\n{self.table(blocks)}"
            )
        return blocks

    def table(self, num_blocks: int) -> str:
        """Lines for people: where the memory goes, and what the cache holds."""
        tokens = num_blocks * self.block_size
        rows = (
            ("total", self.total_bytes, self.device),
            ("weights", self.weights_bytes, ""),
            ("free after loading", self.free_bytes, ""),
            ("peak activations", self.activation_bytes, ""),
            ("KV cache", (num_blocks + 1) * self.block_bytes, f"{num_blocks} blocks of {self.block_size} = {tokens} tokens"),
        )
        lines = [f"{name:<18} {size / MIB:>10.1f} MiB  {note}".rstrip() for name, size, note in rows]
        longest = min(tokens, self.max_model_len)
        return "\n".join([*lines, f"{'per token':<18} {self.token_bytes:>10} B    longest sequence {longest} tokens"])

    def _wanted(self, config: EngineConfig, max_slots: int, room: int) -> int:
        if config.kv_blocks is not None:
            return config.kv_blocks
        if config.kv_memory is not None:
            share = config.kv_memory <= 1
            size = min(int(config.kv_memory * self.free_bytes), room) if share else int(config.kv_memory)
            return size // self.block_bytes - 1
        if self.device != "cpu":
            return int(GPU_FRACTION * self.free_bytes - self.activation_bytes) // self.block_bytes - 1
        size = min(int(CPU_FRACTION * self.free_bytes), CPU_MOST_BYTES, room)
        useful = max_slots * -(-self.max_model_len // self.block_size)
        return min(size // self.block_bytes - 1, useful)

    def _misfit(self, config: EngineConfig, blocks: int, most: int) -> str:
        option = "kv_blocks" if config.kv_blocks is not None else "kv_memory"
        asked = f"{config.kv_blocks if option == 'kv_blocks' else config.kv_memory or 'default'}"
        if most < 1:
            what = "no KV block fits beside weights and activations"
            remedy = "free memory on the device, lower token_budget or max_slots, or serve a smaller model"
        elif blocks < 1:
            what = f"holds no block of {self.block_bytes} bytes beside the null block"
            remedy = f"raise it to at least {2 * self.block_bytes} bytes, or leave it out"
        else:
            what = f"{blocks} blocks are asked for and at most {most} fit"
            remedy = f"lower it, to kv_blocks {most} at most; the largest max_model_len is then " + str(
                min(most * self.block_size, self.max_model_len)
            )
        return f"{option}: {asked}: {what}; {remedy}\n{self.table(max(blocks, 0))}"
