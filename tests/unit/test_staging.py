"""One copy up and one down, through page-locked buffers in turn; here a copy may be late, as a GPU's is."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine import staging
from engine.staging import PinnedStaging, Reading, Staging, staging_for

CPU = torch.device("cpu")


class LateCopies:
    """Copies that run when somebody waits for the event after them, all those before it first."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.num_copies = 0

    def copy_to(self, buffer: staging._Buffer, device: torch.Tensor, size: int) -> None:
        self.waiting.append(lambda: device[:size].copy_(buffer._memory[:size]))
        self.num_copies += 1
        buffer._copied = Event(self)


class Event:
    def __init__(self, copies: LateCopies) -> None:
        self._copies, self._own = copies, tuple(copies.waiting)

    def synchronize(self) -> None:
        for copy in self._own:
            if copy in self._copies.waiting:
                copy()
                self._copies.waiting.remove(copy)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    copies = LateCopies()

    def copy_to(buffer: staging._Buffer, device: torch.Tensor, size: int) -> None:
        copies.copy_to(buffer, device, size)

    monkeypatch.setattr(staging, "_page_locked", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(staging._Buffer, "copy_to", copy_to)
    return copies


ARRAYS = (
    np.arange(7, dtype=np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros((0, 4), np.int64),
    np.array([0.5, 0.25, 1.0], np.float32),
)


def test_on_a_cpu_an_array_is_its_tensor() -> None:
    array = np.arange(4)

    tensor = staging_for(CPU).add(array)
    array[2] = 9

    assert tensor.tolist() == [0, 1, 9, 3]


def test_all_that_is_added_goes_up_in_one_copy(late: LateCopies) -> None:
    road = PinnedStaging(CPU)

    tensors = [road.add(array) for array in ARRAYS]
    road.send()
    Event(late).synchronize()

    assert late.num_copies == 1
    for tensor, array in zip(tensors, ARRAYS, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert np.array_equal(tensor.numpy(), array)


def test_no_copy_reads_what_a_later_step_has_written(late: LateCopies) -> None:
    road = PinnedStaging(CPU)
    steps = []
    for step in range(20):
        steps.append(road.add(np.full(100, step)))
        road.send()

    Event(late).synchronize()

    assert [tensor.unique().tolist() for tensor in steps] == [[step] for step in range(20)]


def test_two_steps_may_be_on_their_way(late: LateCopies) -> None:
    road = PinnedStaging(CPU)
    for step in range(3):
        road.add(np.full(100, step))
        road.send()

    assert len(late.waiting) == 3


def test_what_a_step_keeps_is_not_overwritten_by_the_next_ones(late: LateCopies) -> None:
    road = PinnedStaging(CPU)
    kept = road.add(np.full(5, 7))
    road.send()
    for step in range(10):
        road.add(np.full(5, step))
        road.send()

    Event(late).synchronize()

    assert kept.tolist() == [7] * 5


def test_a_step_larger_than_the_buffer_is_whole_and_the_next_goes_up_in_one_copy(
    late: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_FIRST_BYTES", 64)
    road = PinnedStaging(CPU)
    arrays = [np.arange(size) for size in (3, 10, 1, 40, 2)]

    for copies in (None, 1):
        late.num_copies = 0
        tensors = [road.add(array) for array in arrays]
        road.send()
        Event(late).synchronize()
        assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]
        assert copies in (None, late.num_copies)


def test_nothing_is_sent_where_nothing_was_added(late: LateCopies) -> None:
    PinnedStaging(CPU).send()

    assert late.num_copies == 0


def test_what_comes_down_is_waited_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(staging, "_page_locked", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(staging, "_event", type("Once", (), {"synchronize": lambda self: seen.append("waited")}))
    on_device = torch.arange(3, device="meta")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking=False: self.fill_(non_blocking))

    reading = Reading(on_device)

    assert seen == []
    assert reading.wait().tolist() == [1, 1, 1]
    assert seen == ["waited"]


def test_staging_of_a_cpu_has_no_buffers() -> None:
    assert type(staging_for(CPU)) is Staging
    assert type(staging_for(torch.device("cuda:0"))) is PinnedStaging
