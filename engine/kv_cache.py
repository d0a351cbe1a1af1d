"""The KV cache's tensors, what moves between its blocks, and how many blocks fit in memory.

A block is a row of bytes that holds all layers, `[num_layers, 2, block_size, num_kv_heads, head_dim]`, and in int8 and fp8 its
scales behind them, `[num_layers, 2, block_size, num_kv_heads]` float32, so that a block moves in one piece; layers see strided
views. Block 0 is the null block that padding points at. Which block belongs to whom is `BlockPool`'s business; the road to host
memory is engine/host_pool.py's; measuring memory is the runner's.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.decision import Moves
from engine.errors import OutOfMemory
from engine.geometry import ModelGeometry
from engine.host_pool import HostPool, StreamedHostPool, columns
from engine.staging import staging_for
from engine.stats import MemoryCounts, MemoryRow, memory_line
from kernels.dispatch import block_kernels

GIB = 1 << 30
MIB = 1 << 20
# Without --kv-blocks and --kv-memory a CPU worker takes a quarter of what is free and at most 4 GiB: the machine stays usable.
CPU_FRACTION, CPU_MOST_BYTES = 0.25, 4 * GIB
# On a GPU the rest is for fragmentation and for what libraries allocate later.
GPU_FRACTION = 0.9
# Without --swap-blocks a GPU's worker takes a quarter of the free host memory and at most 4 GiB.
HOST_FRACTION, HOST_MOST_BYTES = 0.25, 4 * GIB
SCALE_DTYPE = torch.float32
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Of `EngineConfig.kv_dtype`, those with a scale for each token and head."""


def kv_bytes_per_token(geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """Bytes of one position's keys and values over all layers, with their scales where there are any."""
    vector_bytes = geometry.head_dim * dtype.itemsize + (SCALE_DTYPE.itemsize if dtype in KV_DTYPES.values() else 0)
    return 2 * geometry.num_layers * geometry.num_kv_heads * vector_bytes


class KVCache:
    """The blocks on the device and in host memory. Uninitialised: only what was written may be read."""

    def __init__(
        self,
        geometry: ModelGeometry,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        """Allocate `num_blocks` usable blocks, the null block, and `num_host_blocks` in host memory, page-locked for a GPU."""
        positions = (geometry.num_layers, 2, block_size, geometry.num_kv_heads)
        word = torch.int64  # block_size is a multiple of 8, and so is a block's size in bytes
        num_words = kv_bytes_per_token(geometry, dtype) * block_size // word.itemsize
        self.blocks = torch.empty((num_blocks + 1, num_words), dtype=word, device=device)
        """`[num_blocks + 1, words]` int64, a block a row. Filled with -1 every number of every dtype but int8 is NaN."""
        numbers = math.prod(positions) * geometry.head_dim * dtype.itemsize // word.itemsize
        self.tensor = self.blocks[:, :numbers].view(dtype).view(-1, *positions, geometry.head_dim)
        """`[num_blocks + 1, num_layers, 2, block_size, num_kv_heads, head_dim]`."""
        self.layers = self.tensor.unbind(1)
        """Per layer a view `[num_blocks + 1, 2, block_size, num_kv_heads, head_dim]`."""
        self.scales: tuple[Tensor | None, ...] = (None,) * geometry.num_layers
        """Per layer a view `[num_blocks + 1, 2, block_size, num_kv_heads]`, for one byte a number only."""
        if dtype in KV_DTYPES.values():
            self.scales = self.blocks[:, numbers:].view(SCALE_DTYPE).view(-1, *positions).unbind(1)
        pool = HostPool if device.type == "cpu" else StreamedHostPool
        self.host_pool = pool(self.blocks, num_host_blocks)
        self._staging = staging_for(device)

    def move(self, swapped_out: Moves, copied: Moves, swapped_in: Moves) -> None:
        """Move blocks in this order: out, copied, in. A freed block may be filled by what comes later.

        Args:
            swapped_out: (device block, host block).
            copied: (source, target), both on the device; no target is the source of another.
            swapped_in: (host block, device block).
        """
        if swapped_out:
            self.host_pool.swap_out(swapped_out)
        if copied:
            sources, targets = columns(copied, self._staging)
            block_kernels(self.blocks.device).copy(self.blocks, sources, targets)
        if swapped_in:
            self.host_pool.swap_in(swapped_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What was measured after loading, and what a position costs, in bytes; from it follows how many blocks fit."""

    device: str
    total_bytes: int
    free_bytes: int
    """Free with the weights loaded."""
    host_free_bytes: int
    """Free in the host's memory; on a CPU the same memory."""
    weights_bytes: int
    activation_bytes: int
    """Peak of one step beside weights and cache, scratch of its kernels included."""
    graph_bytes: int = 0
    """What decode graphs take for as long as the process lives."""
    graph_note: str = ""
    token_budget: int | None = None
    """Tokens of the step whose peak that is."""
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
        room = self.free_bytes - self.activation_bytes - self.graph_bytes
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

    def num_host_blocks(self, config: EngineConfig, num_blocks: int) -> int:
        """Blocks in host memory beside `num_blocks` usable ones: what was asked for, or the default for the device.

        Raises:
            OutOfMemory: what was asked for does not fit.
        """
        beside = self.activation_bytes + (num_blocks + 1) * self.block_bytes if self.device == "cpu" else 0
        most = max(0, self.host_free_bytes - beside) // self.block_bytes
        if config.swap_blocks is None:
            size = 0 if self.device == "cpu" else min(int(HOST_FRACTION * self.host_free_bytes), HOST_MOST_BYTES)
            return min(size // self.block_bytes, most)
        if config.swap_blocks > most:
            raise OutOfMemory(
                f"swap_blocks: {config.swap_blocks} blocks of {self.block_bytes} bytes are asked for and the host's memory "
                f"has room for {most}; lower it, or free memory on the host\n{self.table(num_blocks, config.swap_blocks)}"
            )
        return config.swap_blocks

    def counts(self, num_blocks: int) -> MemoryCounts:
        """Where the device's memory goes beside `num_blocks` usable blocks; nothing on a CPU, whose memory is everybody's."""
        if self.device == "cpu":
            return MemoryCounts()
        kv_cache_bytes = (num_blocks + 1) * self.block_bytes
        return MemoryCounts(
            weights=self.weights_bytes,
            kv_cache=kv_cache_bytes,
            activations=self.activation_bytes,
            graphs=self.graph_bytes,
            other=max(0, self.total_bytes - self.free_bytes - self.weights_bytes),
            free=max(0, self.free_bytes - self.activation_bytes - self.graph_bytes - kv_cache_bytes),
        )

    def rows(self, num_blocks: int, num_host_blocks: int = 0) -> tuple[MemoryRow, ...]:
        """For people: where the memory goes, and what the cache holds."""
        tokens = num_blocks * self.block_size
        host_note = f"{num_host_blocks} blocks, of {self.host_free_bytes / MIB:.1f} MiB free on the host"
        rows = (
            MemoryRow("total", self.total_bytes, self.device),
            MemoryRow("weights", self.weights_bytes),
            MemoryRow("free after loading", self.free_bytes),
            MemoryRow("peak activations", self.activation_bytes),
            MemoryRow("decode graphs", self.graph_bytes, self.graph_note),
            MemoryRow(
                "KV cache", (num_blocks + 1) * self.block_bytes, f"{num_blocks} blocks of {self.block_size} = {tokens} tokens"
            ),
            MemoryRow("swapped KV, on host", num_host_blocks * self.block_bytes, host_note),
            MemoryRow("per token", self.token_bytes, f"longest sequence {min(tokens, self.max_model_len)} tokens"),
        )
        return tuple(row for row in rows if row.size_bytes)

    def table(self, num_blocks: int, num_host_blocks: int = 0) -> str:
        """The same as lines of text."""
        return "\n".join(memory_line(row) for row in self.rows(num_blocks, num_host_blocks))

    def _wanted(self, config: EngineConfig, max_slots: int, room: int) -> int:
        if config.kv_blocks is not None:
            return config.kv_blocks
        if config.kv_memory is not None:
            share = config.kv_memory <= 1
            size = min(int(config.kv_memory * self.free_bytes), room) if share else int(config.kv_memory)
            return size // self.block_bytes - 1
        if self.device != "cpu":
            return int(GPU_FRACTION * self.free_bytes - self.activation_bytes - self.graph_bytes) // self.block_bytes - 1
        size = min(int(CPU_FRACTION * self.free_bytes), CPU_MOST_BYTES, room)
        useful = max_slots * -(-self.max_model_len // self.block_size)
        return min(size // self.block_bytes - 1, useful)

    def _what_would_fit(self) -> str:
        """What to lower so that two blocks fit, the null block and one to use."""
        room = self.free_bytes - self.graph_bytes - 2 * self.block_bytes
        remedy = "lower token_budget or max_slots"
        if self.token_budget and 0 < room < self.activation_bytes:  # most of the peak grows with the tokens
            fitting = max(1, self.token_budget * room // self.activation_bytes)
            remedy = f"lower token_budget or max_slots: {fitting} of {self.token_budget} tokens would fit"
        if self.graph_bytes and room + self.graph_bytes >= self.activation_bytes:
            remedy += f", or leave out the graphs, which take {self.graph_bytes / MIB:.0f} MiB"
        return remedy

    def _misfit(self, config: EngineConfig, blocks: int, most: int) -> str:
        option = "kv_blocks" if config.kv_blocks is not None else "kv_memory"
        asked = f"{config.kv_blocks if option == 'kv_blocks' else config.kv_memory or 'default'}"
        if most < 1:
            what = "no KV block fits beside weights and activations"
            remedy = f"free memory on the device, {self._what_would_fit()}, or serve a smaller model"
        elif blocks < 1:
            what = f"holds no block of {self.block_bytes} bytes beside the null block"
            remedy = f"raise it to at least {2 * self.block_bytes} bytes, or leave it out"
        else:
            what = f"{blocks} blocks are asked for and at most {most} fit"
            remedy = f"lower it, to kv_blocks {most} at most; the largest max_model_len is then " + str(
                min(most * self.block_size, self.max_model_len)
            )
        return f"{option}: {asked}: {what}; {remedy}\n{self.table(max(blocks, 0))}"
