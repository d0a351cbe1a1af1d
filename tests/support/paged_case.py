"""A ragged batch over a pool of KV blocks, and attention written out row by row in float64 to hold it against."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.reference import paged_attention, write_kv

MIXED: dict[str, Any] = {"contexts": [1, 23, 8, 40, 17, 9, 7], "new": [1, 1, 8, 13, 1, 9, 1]}


@dataclass
class Case:
    """A ragged batch over a pool that holds NaN wherever no key is; block 0 belongs to nobody.

    In int8 and fp8 the definition is computed from what the cache gives back, so that only the reading is judged.
    """

    contexts: list[int]
    new: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    num_blocks: int = 200
    dtype: torch.dtype = torch.float32
    is_int8: bool = False
    is_fp8: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        self.query = draw(sum(self.new), self.num_heads, self.head_dim)
        self.keys = [draw(context, self.num_kv_heads, self.head_dim) for context in self.contexts]
        self.values = [draw(context, self.num_kv_heads, self.head_dim) for context in self.contexts]
        shape = (self.num_blocks, 3, 2, self.block_size, self.num_kv_heads)
        self.layer = torch.full((*shape, self.head_dim), torch.nan, dtype=self.dtype)[:, 1]
        self.scales = None
        if self.is_int8:
            self.layer = torch.full((*shape, self.head_dim), -128, dtype=torch.int8)[:, 1]
        if self.is_fp8:
            self.layer = torch.full((*shape, self.head_dim), torch.nan, dtype=torch.float8_e4m3fn)[:, 1]
        if self.is_int8 or self.is_fp8:
            self.scales = torch.full(shape, torch.nan)[:, 1]
        widths = [-(-context // self.block_size) for context in self.contexts]
        self.block_tables = torch.zeros(len(widths), max(widths), dtype=torch.int32)
        blocks = iter((self.num_blocks - 1 - torch.randperm(self.num_blocks - 1, generator=generator)).tolist())
        for sequence, width in enumerate(widths):
            self.block_tables[sequence, :width] = torch.tensor([next(blocks) for _ in range(width)])
            self._fill(sequence)
        self.query_start = torch.tensor([0, *torch.tensor(self.new).cumsum(0).tolist()], dtype=torch.int32)
        self.context_lens = torch.tensor(self.contexts, dtype=torch.int32)

    def slots(self, sequence: int) -> Tensor:
        """Where the keys of a sequence are."""
        positions = torch.arange(self.contexts[sequence])
        return self.block_tables[sequence].long()[positions // self.block_size] * self.block_size + positions % self.block_size

    def _fill(self, sequence: int) -> None:
        slots = self.slots(sequence)
        write_kv(self.keys[sequence], self.values[sequence], self.layer, slots, kv_scales=self.scales)
        if self.scales is not None:
            places = slots // self.block_size, slots % self.block_size
            numbers = [self.layer[:, part][places].double() for part in (0, 1)]
            scales = [self.scales[:, part][places].double().unsqueeze(-1) for part in (0, 1)]
            self.keys[sequence], self.values[sequence] = (n * s for n, s in zip(numbers, scales, strict=True))

    def paged(self, **options: Any) -> Tensor:
        tables = self.block_tables, self.query_start, self.context_lens
        return paged_attention(
            self.query, self.layer, *tables, **({"scale": self.head_dim**-0.5, "kv_scales": self.scales} | options)
        )

    def written_out(
        self, scale: float | None = None, sliding_window: int | None = None, softcap: float | None = None, sinks: Any = None
    ) -> Tensor:
        """The definition, one row of one head at a time."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        row = 0
        for keys, values, context, new in zip(self.keys, self.values, self.contexts, self.new, strict=True):
            for position in range(context - new, context):
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                for head in range(self.num_heads):
                    kv_head = head * self.num_kv_heads // self.num_heads
                    seen = keys[first : position + 1, kv_head].double()
                    scores = seen @ self.query[row, head].double() * (scale or self.head_dim**-0.5)
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    weights = scores.exp()
                    total = weights.sum() + (0 if sinks is None else math.exp(float(sinks[head])))
                    output[row, head] = weights / total @ values[first : position + 1, kv_head].double()
                row += 1
        return output


def assert_close(ours: Tensor, exact: Tensor, tolerance: float = 2e-6) -> None:
    assert (ours.double() - exact).abs().max().item() <= tolerance  # values are of order 1; NaN fails
