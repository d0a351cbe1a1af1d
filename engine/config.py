"""Engine configuration, read once and frozen.

`EngineConfig` is what the operator asked for; `SchedulerConfig` holds the numbers that were resolved from it once the model and
the memory are known. Neither imports torch: the queue side builds an `EngineConfig` and sends it to the engine process.
"""

import math
from dataclasses import dataclass
from typing import Final

from engine.errors import ConfigError

MAX_THREADS: Final = 1024
MAX_COUNT: Final = 2**31 - 1
"""Slots, tokens and blocks are 32-bit integers in the tensors of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine process. `None` means: choose from the device and its memory."""

    model: str
    """Hugging Face id, local directory, GGUF file, or the alias `smollm2-135m-instruct`."""
    device: str = "cpu"
    """`cpu` or `cuda:N`."""
    dtype: str = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`. `auto`: bfloat16 where the processor computes in it, else float32."""
    max_slots: int | None = None
    """Sequences in one step. Default 64 on a CPU, 1 024 on a GPU of 80 GB or more."""
    token_budget: int | None = None
    """Tokens computed in one step (`max_num_batched_tokens`). Default 2 048 on a CPU, 16 384 on a large GPU."""
    block_size: int = 16
    """Positions in one KV block: a power of two from 8 to 256."""
    kv_blocks: int | None = None
    """Usable KV blocks; excludes `kv_memory`."""
    kv_memory: float | None = None
    """KV memory: a fraction of what is free after loading when at most 1, else bytes."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens. Default: the model's own limit, cut to what the KV cache holds."""
    chunked_prefill: bool = True
    """Split prompts over steps when they exceed what is left of the token budget."""
    num_threads: int | None = None
    """Compute threads on a CPU. Default: all cores."""

    def __post_init__(self) -> None:
        if self.block_size not in (8, 16, 32, 64, 128, 256):
            raise ConfigError(f"block_size: {self.block_size} is not a power of two from 8 to 256; use 16")
        for name in ("max_slots", "token_budget", "kv_blocks", "max_model_len", "num_threads"):
            value = getattr(self, name)
            limit = MAX_THREADS if name == "num_threads" else MAX_COUNT
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(f"{name}: {value} is outside 1..{limit}; leave it out for the default")
        if self.kv_blocks is not None and self.kv_memory is not None:
            raise ConfigError("kv_blocks and kv_memory exclude each other; give one of them")
        if self.kv_memory is not None and not 0 < self.kv_memory < math.inf:
            remedy = "give a fraction up to 1 or a number of bytes"
            raise ConfigError(f"kv_memory: {self.kv_memory} is not a number above 0; {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The numbers that scheduling decides with."""

    max_slots: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    """Usable blocks, the null block not counted."""
    max_model_len: int
    """Most tokens a sequence may hold, prompt and output together."""
    watermark_blocks: int = 0
    """Blocks that admission leaves free while something runs."""
    chunked_prefill: bool = True

    @property
    def max_sequence_tokens(self) -> int:
        """A sequence ends when it knows this many tokens: the model's length, or the whole pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
