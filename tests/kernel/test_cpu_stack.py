"""A stack of layers computes what its operations do one by one, bit for bit, on one thread and on two."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import attention, kv
from kernels.cpu import layers as cpu
from kernels.cpu.linear import PackedLinear
from kernels.cpu.stack import Stack
from kernels.layers import StackedLayer

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 64, 128, 4, 2, 32, 16, 3
CONTEXTS, NEW = [40, 1, 23, 300], [1, 1, 23, 6]
NUM_TOKENS = sum(NEW)


@pytest.fixture(params=[1, 2], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layers_of(
    *, dtype: torch.dtype = torch.float32, is_int8: bool = False, has_bias: bool = False, inner: int = INNER
) -> list[StackedLayer]:
    """Layers that differ in all that may differ."""

    def linear(rows: int, columns: int, seed: int, bias: Tensor | None = None) -> PackedLinear:
        return PackedLinear((random(rows, columns, seed=seed) * columns**-0.5).to(dtype), bias, is_int8=is_int8)

    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return [
        StackedLayer(
            before=random(HIDDEN, seed=seed) + 1,
            between=random(HIDDEN, seed=seed + 1) + 1,
            eps=1e-5,
            qkv=linear(width, HIDDEN, seed + 2, random(width, seed=seed + 3).to(dtype) if has_bias else None),
            out=linear(HIDDEN, HEADS * HEAD_DIM, seed + 4),
            gate_up=linear(2 * inner, HIDDEN, seed + 5),
            down=linear(HIDDEN, inner, seed + 6),
            scale=HEAD_DIM**-0.5 * (1 + index),
            window=(None, 5, 1000)[index],
        )
        for index, seed in enumerate(range(10, 10 + 10 * NUM_LAYERS, 10))
    ]


class Step:
    """A step over a cache whose earlier keys and values are random, and whose other places are NaN."""

    def __init__(self, dtype: torch.dtype, contexts: list[int] = CONTEXTS, new: list[int] = NEW) -> None:
        width = -(-max(contexts) // BLOCK_SIZE)
        self.tables = torch.randperm(len(contexts) * width, generator=torch.Generator().manual_seed(3)).view(-1, width).int()
        self.starts = torch.tensor([0, *new]).cumsum(0).int()
        self.contexts = torch.tensor(contexts).int()
        places = [torch.arange(context) for context in contexts]
        slots = [
            table.long()[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for table, at in zip(self.tables, places, strict=True)
        ]
        self.slots = torch.cat([own[-count:] for own, count in zip(slots, new, strict=True)])
        blocks = torch.full((len(contexts) * width, NUM_LAYERS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)
        self.cache = blocks.unbind(1)
        old = torch.cat([own[: len(own) - count] for own, count in zip(slots, new, strict=True)])
        for index, layer in enumerate(self.cache):
            key, value = (random(len(old), KV_HEADS, HEAD_DIM, seed=100 + 2 * index + part) for part in (0, 1))
            kv.write_kv(key, value, layer, old)
        self.plan = attention.Plan(self.tables, self.starts, self.contexts, self.slots)
        angles = random(sum(new), HEAD_DIM // 2, seed=7).repeat(1, 2) * 3
        self.angles = angles.cos(), angles.sin()


def one_by_one(layers: list[StackedLayer], hidden: Tensor, step: Step) -> Tensor:
    for part, layer in zip(layers, step.cache, strict=True):
        qkv = part.qkv(cpu.rms_norm(hidden, part.before, part.eps)[0])
        query = kv.rotate_and_write_kv(qkv, *step.angles, layer, step.slots)
        attended = attention.paged_attention(
            query, layer, step.tables, step.starts, step.contexts, scale=part.scale, sliding_window=part.window, plan=step.plan
        )
        hidden = part.out(attended.flatten(1), residual=hidden)
        gate_up = part.gate_up(cpu.rms_norm(hidden, part.between, part.eps)[0])
        hidden = part.down(cpu.silu_and_mul(gate_up), residual=hidden)
    return hidden


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"has_bias": True}, {"is_int8": True}, {"is_int8": True, "has_bias": True}],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_a_stack_equals_its_operations(options: dict[str, Any], kv_dtype: torch.dtype) -> None:
    layers, hidden = layers_of(**options), random(NUM_TOKENS, HIDDEN)
    before, alone, together = hidden.clone(), Step(kv_dtype), Step(kv_dtype)
    expected = one_by_one(layers, hidden, alone)
    stack = Stack(layers)

    found = stack(hidden, together.angles, together.cache, together.slots, together.plan)

    assert stack.fits(together.cache[0], HEAD_DIM)
    assert found.isfinite().all()
    assert torch.equal(found, expected)
    assert torch.equal(hidden, before)
    for ours, theirs in zip(together.cache, alone.cache, strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("rows", [*range(1, 14), 64])
def test_any_number_of_rows(rows: int) -> None:
    layers, hidden = layers_of(), random(rows, HIDDEN)
    alone, together = (Step(torch.float32, [rows + 7], [rows]) for _ in range(2))

    found = Stack(layers)(hidden, together.angles, together.cache, together.slots, together.plan)

    assert torch.equal(found, one_by_one(layers, hidden, alone))


def test_a_stack_runs_again_and_again() -> None:
    layers, hidden, step = layers_of(), random(NUM_TOKENS, HIDDEN), Step(torch.float32)
    stack = Stack(layers)
    expected = one_by_one(layers, hidden, step)

    found = [stack(hidden, step.angles, step.cache, step.slots, step.plan) for _ in range(50)]

    assert all(torch.equal(output, expected) for output in found)


def test_rows_without_a_sequence_are_nobodys_work() -> None:
    layers, hidden, step = layers_of(), random(NUM_TOKENS, HIDDEN), Step(torch.float32)
    expected = Stack(layers)(hidden, step.angles, step.cache, step.slots, step.plan)
    step.contexts[1], step.slots[1] = 0, -1
    step.plan = attention.Plan(step.tables, step.starts, step.contexts, step.slots)

    found = Stack(layers)(hidden, step.angles, step.cache, step.slots, step.plan)

    others = [row for row in range(NUM_TOKENS) if row != 1]
    assert torch.equal(found[others], expected[others])
    assert found[1].isfinite().all()


def test_other_shapes_do_not_fit() -> None:
    layer, layers = Step(torch.float32).cache[0], layers_of()
    stack = Stack(layers)
    biased = replace(layers[1], out=PackedLinear(random(HIDDEN, HEADS * HEAD_DIM), random(HIDDEN)))

    assert stack.fits(layer, HEAD_DIM)
    assert not stack.fits(layer, 16)
    assert not stack.fits(layer.half(), HEAD_DIM)
    assert not stack.fits(layer[:, :, :8], HEAD_DIM)
    assert not Stack([layers[0], biased]).fits(layer, HEAD_DIM)
    assert not Stack(layers_of(inner=96)).fits(layer, HEAD_DIM)
