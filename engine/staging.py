"""The road between the host and the device: what a step needs goes up in one copy, what it chose comes down in one.

Relies on one stream per thread: what is launched after a copy sees it. Leaves what is copied to batch.py, sampler.py and
host_pool.py; no other module of a step's path moves data between host and device (tests/unit/test_hot_path.py).

1. A page-locked buffer is written again only when the copy that read it last has ended: its event says so.
2. Every upload has device memory of its own, so that nothing a step keeps is overwritten by the next one.
3. Tensors hold their numbers for whatever is launched after `send`; before it they hold nothing.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DEPTH = 3
"""Buffers in turn: one that is filled, one that is being copied, one to spare."""
_FIRST_BYTES = 1 << 18
"""64 sequences of 4,000 tokens take 70 kB. A buffer that overflows is sent, and the next ones are larger."""
_ALIGNMENT = 16


class Staging:
    """Where host and device are one: arrays become tensors as they are, without a copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def add(self, array: np.ndarray) -> Tensor:
        """A tensor on the device with the shape and dtype of `array`, filled by the next `send`. The array stays untouched."""
        return torch.from_numpy(array)

    def send(self) -> None:
        """Start the one copy of all that was added; waits for nothing."""


class PinnedStaging(Staging):
    """The same for a GPU, through a ring of page-locked buffers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._capacity = _FIRST_BYTES
        self._ring = [_Buffer() for _ in range(_DEPTH)]
        self._turn = -1
        self._used = 0
        self._device: Tensor | None = None
        """Device memory of the upload that is being filled."""

    def add(self, array: np.ndarray) -> Tensor:
        """See `Staging.add`."""
        size = -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._device is None or self._used + size > len(self._device):
            self._open(size)
        assert self._device is not None
        part = slice(self._used, self._used + array.nbytes)
        self._used += size
        self._ring[self._turn].bytes[part].view(array.dtype).reshape(array.shape)[...] = array
        return self._device[part].view(_torch_dtype(array.dtype)).view(array.shape)

    def send(self) -> None:
        """See `Staging.send`."""
        if self._device is not None and self._used:
            self._ring[self._turn].copy_to(self._device, self._used)
        self._device, self._used = None, 0

    def _open(self, size: int) -> None:
        """Send what there is, and take the next buffer."""
        if self._used:  # too small for this step: the rest follows in a copy of its own
            self._capacity = 2 * max(self._capacity, self._used + size)
        self._capacity = max(self._capacity, size)
        self.send()
        self._turn = (self._turn + 1) % _DEPTH
        self._ring[self._turn].open(self._capacity)
        self._device = torch.empty(self._capacity, dtype=torch.uint8, device=self.device)


class _Buffer:
    """Page-locked memory and the event of the copy that reads it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: Any = None
        self.bytes: np.ndarray = self._memory.numpy()

    def open(self, capacity: int) -> None:
        """Wait until it may be written, and make it large enough."""
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._memory) < capacity:
            self._memory = _page_locked((capacity,), torch.uint8)
            self.bytes = self._memory.numpy()

    def copy_to(self, device: Tensor, size: int) -> None:
        device[:size].copy_(self._memory[:size], non_blocking=True)
        self._copied = _event()


class Reading:
    """A tensor on its way to the host. It must not be changed before it is there."""

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy; waits for nothing."""
        self._host, self._copied = tensor, None
        if tensor.device.type != "cpu":
            self._host = _page_locked(tuple(tensor.shape), tensor.dtype)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = _event()

    def wait(self) -> np.ndarray:
        """Wait for this copy, and for nothing that was launched after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()


def staging_for(device: torch.device) -> Staging:
    """The road to `device`."""
    return Staging(device) if device.type == "cpu" else PinnedStaging(device)


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU copies from and to by itself; torch keeps freed pieces, so that this is quick."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _event() -> Any:
    """What has been launched on the current stream, to wait for."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
