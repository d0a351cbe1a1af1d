"""Sizes of decode graphs, what they take, and that a replay reads static memory alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from engine.batch import ModelInput, build
from engine.decision import ScheduledSequence
from engine.graphs import CudaCapture, DecodeGraphs, all_bytes, decode_sizes
from engine.request import Request
from engine.sequence import Sequence
from engine.staging import Staging

CPU = torch.device("cpu")
VOCAB = 11


def test_sizes_grow_from_single_sequences_to_steps_of_32() -> None:
    assert decode_sizes(320) == (
        *(1, 2, 4, 8),
        *(16, 24, 32, 40, 48, 56, 64),
        *(80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256),
        *(288, 320),
    )


@pytest.mark.parametrize("max_slots", [1, 2, 3, 7, 8, 9, 63, 64, 65, 100, 256, 257, 300, 1000, 1024])
def test_the_last_size_is_that_of_all_slots_and_no_size_comes_twice(max_slots: int) -> None:
    sizes = decode_sizes(max_slots)

    assert sizes[-1] == max_slots
    assert list(sizes) == sorted(set(sizes))


def test_the_bytes_of_all_follow_from_the_largest_two() -> None:
    assert all_bytes(100, [50, 7], 10) == 100 + 50 + 7 + 8 * 7
    assert all_bytes(100, [50], 1) == 150
    assert all_bytes(0, [0, -2], 5) == 1  # what is freed meanwhile is not counted, and there are graphs


def decode(contexts: list[int], sizes: tuple[int, ...], tokens: int = 0) -> ModelInput:
    """A step of sequences with so many known tokens, the last of them `tokens` and the next numbers."""
    items = []
    for row, context in enumerate(contexts):
        ids = (*[1] * (context - 1), tokens + row)
        sequence = Sequence(Request(request_id="", prompt_token_ids=ids), (0, 0, 0), frozenset())
        sequence.num_computed_tokens, sequence.block_table = context, [9 + row] * -(-context // 8)
        items.append(ScheduledSequence(sequence, 1, 1))
    return build(items, 8, Staging(CPU), decode_sizes=sizes)


class Recorder:
    """A capture that runs the function again at each replay, and the model: logits that name what was read."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.seen: list[ModelInput] = []

    def capture(self, compute: Callable[[], object]) -> Callable[[], object]:
        compute()
        self.captured.append(len(self.seen[-1].context_lens))
        return compute

    def compute(self, batch: ModelInput, out: Tensor) -> None:
        self.seen.append(batch)
        out.zero_()
        out[:, 0], out[:, 1], out[:, 2] = batch.input_ids, batch.context_lens, batch.slot_mapping
        out[:, 3] = batch.block_tables.sum(1) if batch.context_lens.any() else 0


def captured(sizes: tuple[int, ...]) -> tuple[DecodeGraphs, Recorder]:
    graphs, recorder = DecodeGraphs(sizes, 64, 8, VOCAB, CPU), Recorder()
    graphs.capture(recorder.compute, recorder.capture)
    return graphs, recorder


def test_the_largest_is_captured_first() -> None:
    assert captured((2, 4, 8))[1].captured == [8, 4, 2]


def test_a_replay_reads_static_memory_alone() -> None:
    graphs, recorder = captured((2, 4))
    static = {name: getattr(recorder.seen[0], name).untyped_storage().data_ptr() for name in tensors_of(recorder.seen[0])}

    for contexts in ([5, 6, 7], [30], [1, 2]):
        graphs(decode(contexts, (2, 4)))
        replayed = recorder.seen[-1]
        assert {name: getattr(replayed, name).untyped_storage().data_ptr() for name in tensors_of(replayed)} == static
        assert any(replayed is batch for batch in recorder.seen[:2]), "host numbers are not those of the capture"


def tensors_of(batch: ModelInput) -> list[str]:
    return [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor)]


def test_a_replay_computes_the_batch_it_is_given_and_padding_after_a_larger_one() -> None:
    graphs, recorder = captured((4,))
    graphs(decode([9, 9, 9, 9], (4,), tokens=50))

    logits = graphs(decode([5, 20], (4,), tokens=70))

    assert logits.shape == (2, VOCAB)
    assert logits[:, 0].tolist() == [70, 71]
    assert logits[:, 1].tolist() == [5, 20]
    replayed = recorder.seen[-1]
    assert replayed.slot_mapping.tolist() == [9 * 8 + 4, 10 * 8 + 3, -1, -1]
    assert replayed.positions.tolist()[:2] == [4, 19]
    assert replayed.block_tables[:2, :3].tolist() == [[9, 0, 0], [10, 10, 10]]
    assert replayed.context_lens.tolist() == [5, 20, 0, 0]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (decode([5, 6], (2, 4)), True),
        (decode([5, 6], ()), True),
        (decode([5, 6, 7], ()), False),  # no such size
        (decode([65, 6], (2, 4)), False),  # a table longer than the buffer
    ],
)
def test_only_what_was_captured_fits(batch: ModelInput, expected: bool) -> None:
    assert captured((2, 4))[0].fits(batch) is expected


class FakeCuda:
    """Streams, of which the last entered is the current one; ending a capture fails, as after a call that it forbids."""

    def __init__(self) -> None:
        self.entered = ["default"]

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.entered.append(stream)
        try:
            yield
        finally:
            while self.entered.pop() != stream:
                pass

    @contextmanager
    def graph(self, *_: Any, stream: str, **__: Any) -> Iterator[None]:
        self.entered.append("left by the capture")
        try:
            yield
        finally:
            raise RuntimeError("capturing had failed")


def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_the_cause_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, stream = FakeCuda(), MagicMock()
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    for name in ("current_stream", "graph_pool_handle", "CUDAGraph", "current_device"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    ended = MagicMock()
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended)
    calls = iter([None, RuntimeError("not permitted")])

    def compute() -> None:
        if error := next(calls):
            raise error

    with pytest.raises(RuntimeError, match="capturing had failed") as raised:
        CudaCapture(torch.device("cuda"))(compute)

    assert cuda.entered == ["default"]
    assert str(raised.value.__context__) == "not permitted"
    assert ended.call_count == 1
