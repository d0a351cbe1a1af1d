"""A whole stack of decoder layers as one program: threads start once for all of them, and Python runs once a step.

    h -> norm -> q/k/v -> rotate, write keys -> attend -> product + h -> norm -> gate/up -> silu * up -> product + h

It computes what the operations one by one do, bit for bit. At one row the way through Python took 6 of 15 ms a step
(SmolLM2-135M, two cores of an AMD EPYC, November 2026).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import attention, kv, layers, linear, threads
from kernels.cpu.vectors import WIDTH
from kernels.layers import StackedLayer


class Stack:
    """Layers of equal shapes, whose products are `PackedLinear`."""

    def __init__(self, parts: Sequence[StackedLayer]) -> None:
        self._parts = parts
        self._columns = [
            (names, word, np.array([place(part) for part in parts], dtype=np.int64))
            for names, word, place in (
                ("before", layers.WEIGHT_WORD, lambda part: part.before.data_ptr()),
                ("between", layers.WEIGHT_WORD, lambda part: part.between.data_ptr()),
                ("qkv", linear.PLUS_WORD, lambda part: part.qkv.places[2]),
                ("attend", attention.WINDOW_WORD, lambda part: part.window or 0),
                ("attend", attention.SCALE_WORD, lambda part: attention.bits(part.scale)),
                *((name, linear.WEIGHT_WORD, lambda part, name=name: getattr(part, name).places[0]) for name in _PRODUCTS),
                *((name, linear.SCALE_WORD, lambda part, name=name: getattr(part, name).places[1]) for name in _PRODUCTS),
            )
        ]

    def fits(self, kv_cache_layer: Tensor, angle_size: int) -> bool:
        """Whether the stack runs over such a layer of the KV cache, with angles of so many elements of a head."""
        part = self._parts[0]
        sizes = part.qkv.in_features, part.down.in_features
        is_plain = all(
            not part.out.places[2] and not part.down.places[2] and not part.gate_up.places[2] for part in self._parts
        )
        is_aligned = not any(size % (linear.PANELS * WIDTH) for size in sizes)
        return is_plain and is_aligned and kv.fits(kv_cache_layer) and angle_size % (2 * WIDTH) == 0

    def __call__(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_cache_layers: Sequence[Tensor],
        slot_mapping: Tensor,
        plan: attention.Plan,
    ) -> Tensor:
        """Run all layers.

        Args:
            hidden: `[T, H]` float32, left as it is.
            angles: cosines and sines, `[T, R]` float32, contiguous.
            kv_cache_layers: of each layer, which must `fit`.
            slot_mapping: `[T]` int64.
            plan: of the step.

        Returns:
            `[T, H]` float32.
        """
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        operations, _kept = self._operations(hidden, angles, kv_cache_layers[0], slot_mapping, plan)
        program = np.zeros((len(self._parts), len(operations), threads.WORDS), dtype=np.int64)
        where: dict[str, int] = {}
        for index, (name, code, words) in enumerate(operations):
            program[:, index, 0] = code
            program[:, index, 2 : 2 + len(words)] = words
            where[name] = index
        for name, word, values in self._columns:
            program[:, where[name], 1 + word] = values
        layers_at = [layer.data_ptr() for layer in kv_cache_layers]
        program[:, where["rotate"], 1 + kv.LAYER_WORD] = layers_at
        program[:, where["attend"], 1 + attention.LAYER_WORD] = layers_at
        count = len(self._parts) * len(operations)
        barriers = np.zeros(count, dtype=np.int64)
        threads.run_all(program.ctypes.data, count, barriers.ctypes.data, torch.get_num_threads())
        return hidden

    def _operations(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        kv_cache_layer: Tensor,
        slot_mapping: Tensor,
        plan: attention.Plan,
    ) -> tuple[list[tuple[str, int, tuple[int, ...]]], list[Tensor]]:
        """The operations of the first layer, and the tensors between them, which must live until they have run."""
        part, rows = self._parts[0], len(hidden)
        head_dim = kv_cache_layer.shape[4]
        num_heads = part.out.in_features // head_dim
        normed, qkv = torch.empty_like(hidden), torch.empty((rows, part.qkv.padded_out))
        query = torch.empty((rows, num_heads, head_dim))
        attended = torch.zeros_like(query) if plan.has_idle_rows else torch.empty_like(query)
        gate_up, opened = torch.empty((rows, part.gate_up.padded_out)), torch.empty((rows, part.down.in_features))
        scratch, turned = attention.scratch_for(kv_cache_layer, num_heads), torch.empty(torch.get_num_threads() * head_dim)
        kept = [normed, qkv, query, attended, gate_up, opened, scratch, turned]
        operations: list[tuple[str, int, tuple[int, ...]]] = []

        def add(name: str, code: int, words: tuple[int, ...]) -> None:
            operations.append((name, code, words))

        def rounded(x: Tensor) -> tuple[Tensor, Tensor] | None:
            """Where `x` is rounded for the product that follows, in int8."""
            if not part.qkv.is_int8:
                return None
            places = torch.empty(x.shape, dtype=torch.int16), torch.empty(rows)
            kept.extend(places)
            return places

        def product(name: str, x: Tensor, numbers: tuple[Tensor, Tensor] | None, plus: Tensor | None, out: Tensor) -> None:
            factor, scales = numbers or (x, None)
            add(name, threads.MULTIPLY, getattr(part, name).words(factor, scales, plus, out))

        numbers = rounded(normed)
        add("before", threads.RMS_NORM, layers.norm_words(hidden, None, part.before, part.eps, normed, hidden, numbers))
        product("qkv", normed, numbers, None, qkv)
        add("rotate", threads.ROTATE_AND_WRITE, kv.rotate_words(qkv, angles, kv_cache_layer, slot_mapping, query, turned))
        attend = attention.attend_words(query, kv_cache_layer, plan, attended, scratch, scale=part.scale)
        add("attend", threads.ATTEND, attend)
        of_heads = attended.flatten(1)
        if heads_rounded := rounded(of_heads):
            add("round", threads.QUANTISE, linear.round_words(of_heads, *heads_rounded))
        product("out", of_heads, heads_rounded, hidden, hidden)
        add("between", threads.RMS_NORM, layers.norm_words(hidden, None, part.between, part.eps, normed, hidden, numbers))
        product("gate_up", normed, numbers, None, gate_up)
        numbers = rounded(opened)
        add("silu", threads.SILU_AND_MUL, layers.silu_words(gate_up, opened, numbers))
        product("down", opened, numbers, hidden, hidden)
        return operations, kept


_PRODUCTS = ("qkv", "out", "gate_up", "down")
