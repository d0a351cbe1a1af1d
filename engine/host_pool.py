"""KV blocks in host memory, and the road between them and the device.

Relies on a cache whose blocks are rows of one tensor. Which block goes where is the scheduler's decision. On a CPU a move is a
copy in memory; on a GPU it runs on a second stream between page-locked memory and a small staging area on the device, so that
the last part of a swap out passes beside the computation that follows.
"""

import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.decision import Moves
from engine.staging import Staging, staging_for
from engine.stats import SwapTimes
from kernels.dispatch import block_kernels

_STAGING_BYTES = 256 << 20
_MEASURED_BLOCKS, _MEASURED_TIMES = 8, 3
_Span = tuple[torch.cuda.Event, torch.cuda.Event]


class HostPool:
    """Host blocks 0..num_blocks-1 of the layout of the device's blocks, on a machine where both are in one memory."""

    def __init__(self, device_blocks: Tensor, num_blocks: int) -> None:
        """Allocate beside `device_blocks`, rows of words. Uninitialised: only what was swapped out may be swapped in."""
        self._device_blocks = device_blocks
        self._host_ids = Staging(torch.device("cpu"))
        is_remote = device_blocks.device.type != "cpu" and num_blocks > 0
        shape = (num_blocks, device_blocks.shape[1])
        self.blocks = torch.empty(shape, dtype=device_blocks.dtype, pin_memory=is_remote)
        self._out_s: list[float] = []
        self._in_s: list[float] = []

    def swap_out(self, pairs: Moves) -> None:
        """Copy (device block, host block); no host block twice."""
        started = time.perf_counter()
        sources, targets = columns(pairs, self._host_ids)
        self.blocks.index_copy_(0, targets, self._device_blocks.index_select(0, sources))
        self._out_s.append(time.perf_counter() - started)

    def swap_in(self, pairs: Moves) -> None:
        """Copy (host block, device block); no device block twice."""
        started = time.perf_counter()
        sources, targets = columns(pairs, self._host_ids)
        self._device_blocks.index_copy_(0, targets, self.blocks.index_select(0, sources))
        self._in_s.append(time.perf_counter() - started)

    def take_times(self) -> SwapTimes:
        """Seconds of each call that has ended since the last look; never waits for one."""
        times = SwapTimes(out_s=tuple(self._out_s), in_s=tuple(self._in_s))
        self._out_s, self._in_s = [], []
        return times

    def swap_s_per_block(self) -> float:
        """Measured seconds of one block out and in again; infinity without host blocks. Device blocks keep what they hold."""
        count = min(len(self.blocks), len(self._device_blocks), _MEASURED_BLOCKS)
        if not count:
            return float("inf")
        pairs = [(block, block) for block in range(count)]
        seconds = min(self._there_and_back_s(pairs) for _ in range(_MEASURED_TIMES)) / count
        self.take_times()  # of these trials nobody wants to know
        return seconds

    def _there_and_back_s(self, pairs: Moves) -> float:
        started = time.perf_counter()
        self.swap_out(pairs)
        self.swap_in(pairs)
        self._finish()
        return time.perf_counter() - started

    def _finish(self) -> None:
        """Return when what was asked for is done."""


class StreamedHostPool(HostPool):
    """The same for a GPU.

    1. Host blocks are touched on the second stream alone, in order: what is swapped in is what was swapped out before.
    2. Device blocks are touched on the current stream alone: computation before a move has ended, that after it sees the move.
    3. Before a stream writes the staging area, it waits for the other one to have read it.

    Seconds are those between two events on the device. Whether the second has come is asked; nobody waits for it.
    """

    def __init__(self, device_blocks: Tensor, num_blocks: int) -> None:
        super().__init__(device_blocks, num_blocks)
        num_staged = min(max(1, _STAGING_BYTES // (device_blocks[0].nbytes or 1)), num_blocks)
        self._staging = device_blocks.new_empty((num_staged, device_blocks.shape[1]))
        self._stream = torch.cuda.Stream(device_blocks.device)  # type: ignore[no-untyped-call]
        self._ids = staging_for(device_blocks.device)
        self._kernels = block_kernels(device_blocks.device)
        self._going_out: deque[_Span] = deque()
        self._coming_in: deque[_Span] = deque()

    def swap_out(self, pairs: Moves) -> None:
        current = torch.cuda.current_stream(self._staging.device)
        begin = _mark(current)
        for sources, targets, staged in self._pieces(pairs):
            current.wait_stream(self._stream)
            self._kernels.gather(self._device_blocks, self._on_device(sources), staged)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for row, target in zip(staged, targets, strict=True):  # one transfer a block: only the GPU reaches both
                    self.blocks[target].copy_(row, non_blocking=True)
        self._going_out.append((begin, _mark(self._stream)))

    def swap_in(self, pairs: Moves) -> None:
        current = torch.cuda.current_stream(self._staging.device)
        begin = _mark(current)
        for sources, targets, staged in self._pieces(pairs):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for row, source in zip(staged, sources, strict=True):
                    row.copy_(self.blocks[source], non_blocking=True)
            current.wait_stream(self._stream)
            self._kernels.scatter(staged, self._device_blocks, self._on_device(targets))
        self._coming_in.append((begin, _mark(current)))

    def take_times(self) -> SwapTimes:
        for moving, seconds in ((self._going_out, self._out_s), (self._coming_in, self._in_s)):
            while moving and moving[0][1].query():  # type: ignore[no-untyped-call]
                begin, end = moving.popleft()
                seconds.append(begin.elapsed_time(end) / 1000)
        return super().take_times()

    def _pieces(self, pairs: Moves) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
        """Sources, targets and the staging rows of as many pairs as these hold."""
        for start in range(0, len(pairs), len(self._staging)):
            piece = pairs[start : start + len(self._staging)]
            sources, targets = zip(*piece, strict=True)
            yield sources, targets, self._staging[: len(piece)]

    def _on_device(self, ids: tuple[int, ...]) -> Tensor:
        tensor = self._ids.add(np.array(ids, dtype=np.int64))
        self._ids.send()
        return tensor

    def _finish(self) -> None:
        torch.cuda.synchronize(self._staging.device)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event at this point of the stream's work."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def columns(pairs: Moves, staging: Staging) -> tuple[Tensor, Tensor]:
    """First and second ids of non-empty pairs, int64, sent."""
    sources, targets = staging.add(np.array(pairs, dtype=np.int64).T.copy())
    staging.send()
    return sources, targets
