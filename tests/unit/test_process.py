"""What the probes of a worker say of its threads."""

import time
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from worker.bridge import EngineSupervisor
from worker.process import MAX_TURN_S, WorkerProcess
from worker.settings import Settings


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    """One that was not started."""
    worker = WorkerProcess(Settings(engine=EngineConfig(model="m"), metrics_port=0))
    yield worker
    worker._health.stop()


@pytest.mark.parametrize("name", ["publisher", "leases"])
def test_a_thread_that_stands_still_is_not_alive(process: WorkerProcess, name: str) -> None:
    assert process._not_live() == ""
    getattr(process, f"_{name}").turned_at = time.monotonic() - MAX_TURN_S - 1
    assert process._not_live() == f"the thread {name} has not come around for {MAX_TURN_S + 1:.0f} s"


def test_a_main_loop_that_stands_still_is_not_alive(process: WorkerProcess) -> None:
    process._consumer.turned_at = time.monotonic() - MAX_TURN_S - 1
    assert process._not_live() == f"the main loop has not come around for {MAX_TURN_S + 1:.0f} s"


def test_an_engine_that_nobody_looks_after_is_not_alive(process: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSupervisor, "has_died", True)
    assert process._not_live() == "the thread engine-reader has ended"
