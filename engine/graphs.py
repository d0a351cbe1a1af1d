"""Steps that only decode, captured once as CUDA graphs: some hundred launches of a model in Python become one.

A graph reads and writes fixed addresses. So there is one set of input buffers, as large as the largest size; a step is copied
to their first rows, and its logits are those of a buffer that the next replay overwrites. Relies on batch.py, which pads such a
step to one of the sizes, on kernels whose launches depend on nothing but the size (kernels/dispatch.py), and on a function that
computes a step. When to capture, and how much memory there is for it, is the runner's business.

1. A replay reads the static buffers alone: nothing of a batch but what `__call__` copies reaches it.
2. Whoever reads the logits is launched before the next replay, on the same stream.
3. A table's rows beyond what a step copies hold older ids: no context reaches them.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.batch import ModelInput
from kernels.reference import HostLengths

Compute = Callable[[ModelInput, Tensor], object]
"""Computes a step and writes its logits `[S, vocab_size]` to the second argument."""
Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Takes a function of tensors at fixed addresses and returns one that launches the same again."""


def decode_sizes(max_slots: int) -> tuple[int, ...]:
    """Sequences that graphs are captured for, ascending: beyond 16 of them less than a third of a step is padding.

    1, 2, 4, 8, then steps of 8 to 64, of 16 to 256, of 32 beyond, and `max_slots` itself; untuned, chosen without a GPU.
    """
    grid = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, max_slots + 1, 32))
    return (*(size for size in grid if size < max_slots), max_slots)


class DecodeGraphs:
    """A graph for each size; call it with a batch that `fits`."""

    def __init__(self, sizes: Items[int], max_context_len: int, block_size: int, vocab_size: int, device: torch.device) -> None:
        """Make the buffers: for the longest table of each sequence and its `vocab_size` logits."""
        self._sizes = sorted(sizes)
        most = self._sizes[-1]
        self._inputs = _static_input(most, -(-max_context_len // block_size), max_context_len, device)
        self._logits = torch.empty((most, vocab_size), dtype=torch.float32, device=device)
        self._replays: dict[int, Callable[[], object]] = {}

    def capture(self, compute: Compute, capture: Capture, sizes: Items[int] | None = None) -> None:
        """Capture `sizes`, or all, the largest first, so that smaller ones find room in its memory."""
        for size in sorted(sizes or self._sizes, reverse=True):
            self._replays[size] = capture(partial(compute, _first(self._inputs, size), self._logits[:size]))

    def fits(self, batch: ModelInput) -> bool:
        """Whether the batch is one that a graph computes."""
        return (
            batch.is_decode
            and batch.host.num_sequences in self._replays
            and batch.block_tables.shape[1] <= self._inputs.block_tables.shape[1]
        )

    def __call__(self, batch: ModelInput) -> Tensor:
        """Logits `[R, vocab_size]` float32, to be read before the next call."""
        size, width = batch.block_tables.shape
        static = self._inputs
        static.input_ids[:size].copy_(batch.input_ids)
        static.positions[:size].copy_(batch.positions)
        static.slot_mapping[:size].copy_(batch.slot_mapping)
        static.context_lens[:size].copy_(batch.context_lens)
        static.block_tables[:size, :width].copy_(batch.block_tables)
        self._replays[size]()
        return self._logits[: len(batch.logits_indices)]


class CudaCapture:
    """Captures on a stream of its own; what it captures shares one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], object]) -> Callable[[], object]:
        """Run it once, for all that is compiled, tuned or allocated by a first run, then capture it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # around both: where a capture fails, torch leaves its stream as the current one
            compute()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    compute()
            except RuntimeError:
                self._stop_allocating()
                raise
        current.wait_stream(self._stream)
        return graph.replay

    def _stop_allocating(self) -> None:
        """Tell the allocator that a capture is over: torch 2.11 forgets it where one failed, and then keeps what it caches."""
        with suppress(RuntimeError):  # it was told
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)


def all_bytes(buffers: int, largest: Items[int], count: int) -> int:
    """Bytes of `count` graphs from what the buffers and the `largest` few took: none of the rest takes more than the last."""
    return max(1, buffers + sum(largest) + (count - len(largest)) * max(0, largest[-1]))


def _static_input(size: int, max_blocks: int, max_context_len: int, device: torch.device) -> ModelInput:
    """Padding in every row, and on the host the longest contexts that a replay can meet."""
    numbers = torch.zeros((2, size), dtype=torch.int64, device=device)
    return ModelInput(
        input_ids=numbers[0],
        positions=numbers[1],
        slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
        block_tables=torch.zeros((size, max_blocks), dtype=torch.int32, device=device),
        query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=torch.zeros(size, dtype=torch.int32, device=device),
        logits_indices=torch.arange(size, device=device),
        host=HostLengths(np.arange(size + 1, dtype=np.int32), np.full(size, max_context_len, np.int32)),
        is_decode=True,
    )


def _first(static: ModelInput, size: int) -> ModelInput:
    """The first `size` sequences, in the same memory."""
    return ModelInput(
        input_ids=static.input_ids[:size],
        positions=static.positions[:size],
        slot_mapping=static.slot_mapping[:size],
        block_tables=static.block_tables[:size],
        query_start=static.query_start[: size + 1],
        context_lens=static.context_lens[:size],
        logits_indices=static.logits_indices[:size],
        host=HostLengths(static.host.query_start[: size + 1], static.host.context_lens[:size]),
        is_decode=True,
    )
