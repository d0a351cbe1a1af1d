"""Engine configuration, read once and frozen.

`EngineConfig` is what the operator asked for; `SchedulerConfig` holds the numbers that were resolved from it once the model and
the memory are known. Neither imports torch: the queue side builds an `EngineConfig` and sends it to the engine process.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from engine.errors import ConfigError

MAX_THREADS: Final = 1024
MAX_COUNT: Final = 2**31 - 1
"""Slots, tokens and blocks are 32-bit integers in the tensors of a step."""


CHOICES: Final = {
    "scheduling": ("continuous", "iteration_level", "request_level"),
    "reservation": ("paged", "declared", "ratio", "max", "pow2", "oracle"),
    "preemption": ("auto", "recompute", "swap"),
    "kv_dtype": ("auto", "int8", "fp8"),
    "kernels": ("auto", "reference"),
    "quantisation": ("none", "int8"),
}
"""Options with a fixed set of words; the first is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine process. `None` means: choose from the device and its memory."""

    model: str
    """Hugging Face id, local directory, GGUF file, or the alias `smollm2-135m-instruct`."""
    device: str = "cpu"
    """`cpu` or `cuda:N`."""
    dtype: str = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`. `auto`: bfloat16 on a GPU, where layers are fused, and where the processor
    computes in it; else float32."""
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
    prefill_first: bool = False
    """Start waiting requests before running ones go on, as vLLM first did: first tokens come earlier, running ones stall."""
    scheduling: str = "continuous"
    """Who shares a step: `continuous`, `iteration_level` (Orca) or `request_level` (static batches)."""
    reservation: str = "paged"
    """KV set aside for a request that starts; the words are explained in engine/reservation.py."""
    prefix_caching: bool = True
    """Share the KV of equal prompt beginnings between requests."""
    preemption: str = "auto"
    """What becomes of the KV of a preempted sequence: `recompute`, `swap` to host memory, or `auto`, whichever costs less."""
    swap_blocks: int | None = None
    """KV blocks in host memory for swapping. Default: none on a CPU, 4 GiB at most on a GPU."""
    kv_dtype: str = "auto"
    """`auto` keeps keys and values in the model's dtype, `int8` and `fp8` (e4m3) in a byte, with a scale per token and head."""
    kernels: str = "auto"
    """`auto` takes the fastest for the device and fuses layers of known models, `reference` is plain torch and transformers."""
    quantisation: str = "none"
    """`int8` rounds weights and activations of linear layers to 8 bits: faster on a CPU, not the same tokens."""
    run_ahead: bool | None = None
    """Decide and launch a step before the tokens of the one before it are read. Default: on a GPU."""
    graphs: bool | None = None
    """Capture steps that only decode as CUDA graphs. Default: on a GPU, unless the model cannot be captured or is shared, or
    kernels are the reference."""
    batch_invariant: bool = False
    """Compute in fixed tiles: logits are the same, bit for bit, in any batch. CPU only, slower; see engine/invariant.py."""
    tensor_parallel: int = 1
    """Processes that share each layer's heads; the model must divide."""
    aging: int = 64
    """A waiting request is overtaken by at most so many of one tenant for each priority above its own."""
    num_threads: int | None = None
    """Compute threads on a CPU. Default: all cores."""

    def __post_init__(self) -> None:
        if problems := tuple(self._problems()):
            raise ConfigError(*problems)

    def _problems(self) -> Iterator[str]:
        for name, words in CHOICES.items():
            if getattr(self, name) not in words:
                yield f"{name}: {getattr(self, name)} is unknown; use one of {', '.join(words)}"
        if self.block_size not in (8, 16, 32, 64, 128, 256):
            yield f"block_size: {self.block_size} is not a power of two from 8 to 256; use 16"
        for name in ("max_slots", "token_budget", "kv_blocks", "max_model_len", "num_threads", "tensor_parallel", "aging"):
            value = getattr(self, name)
            limit = MAX_THREADS if name == "num_threads" else MAX_COUNT
            if value is not None and not 1 <= value <= limit:
                yield f"{name}: {value} is outside 1..{limit}; leave it out for the default"
        if self.swap_blocks is not None and not 0 <= self.swap_blocks <= MAX_COUNT:
            yield f"swap_blocks: {self.swap_blocks} is outside 0..{MAX_COUNT}; leave it out for the default"
        if self.kv_blocks is not None and self.kv_memory is not None:
            yield "kv_blocks and kv_memory exclude each other; give one of them"
        if self.kv_memory is not None and not 0 < self.kv_memory < math.inf:
            remedy = "give a fraction up to 1 or a number of bytes"
            yield f"kv_memory: {self.kv_memory} is not a number above 0; {remedy}"
        if self.graphs and (self.tensor_parallel > 1 or self.device == "cpu"):
            where = "a CPU" if self.device == "cpu" else f"tensor_parallel {self.tensor_parallel}"
            yield f"graphs: they are captured for one process on a GPU, not for {where}; leave it out"
        expected = {"kernels": "auto", "batch_invariant": False, "tensor_parallel": 1, "device": "cpu"}
        others = [f"{name} {getattr(self, name)}" for name, value in expected.items() if getattr(self, name) != value]
        if self.quantisation == "int8" and others:
            needed = "int8 is for fused layers in one process on a CPU"
            yield f"quantisation: {needed}, not for {', '.join(others)}; leave one out"
        if self.batch_invariant and (self.tensor_parallel > 1 or self.device != "cpu"):
            where = f"tensor_parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else f"device {self.device}"
            yield f"batch_invariant: its bits are proven for one process on a CPU, not for {where}; leave one out"


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
    num_host_blocks: int = 0
    """Blocks in host memory that preempted sequences may be swapped to."""
    chunked_prefill: bool = True
    prefill_first: bool = False
    scheduling: str = "continuous"
    reservation: str = "paged"
    prefix_caching: bool = True
    preemption: str = "auto"
    sliding_window: int | None = None
    """Keys that any layer still looks back to; blocks that lie before them are given back. None: all of them."""
    max_scored_tokens: int = 512
    """Prompt tokens in one step whose log probabilities are asked for: each costs a row of logits."""
    aging: int = 64
    run_ahead: bool = False

    @property
    def max_sequence_tokens(self) -> int:
        """A sequence ends when it knows this many tokens: the model's length, or the whole pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


def usable_cores() -> int:
    """Cores this process may run on, which `num_threads` None means; a container may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
