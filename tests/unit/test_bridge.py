"""An engine that fails while it serves, from the queue side."""

import queue
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.messages import EngineFailed, EngineReady, RequestRejected, StepReport
from engine.request import Request, SamplingParams
from tests.support import fake_engine
from tests.support.wait import wait_until
from worker.bridge import EngineProcess, EngineSupervisor
from worker.errors import EngineUnavailable

RAISES = Request(request_id="r", prompt_token_ids=(fake_engine.RAISE_ID, 5), params=SamplingParams(max_tokens=9))
WHY = r"a step failed at fake_engine\.py:\d+: RuntimeError: trouble"


class Told:
    """Keeps what a supervisor says, in order."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.knows_who = False

    def on_loading(self, phase: str) -> None:
        pass

    def on_ready(self, ready: EngineReady) -> None:
        self.events.put("ready")

    def on_report(self, report: StepReport) -> None:
        pass

    def on_rejected(self, rejection: RequestRejected) -> None:
        raise AssertionError("nothing is refused here")

    def on_alone(self, request_id: str) -> None: ...

    def on_down(self) -> bool:
        self.events.put("down")
        return self.knows_who

    def stalled_for_s(self) -> float:
        return 0.0


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(model=str(fake_engine.save_model(tmp_path)))


@pytest.fixture
def process(config: EngineConfig) -> Iterator[EngineProcess]:
    process = EngineProcess(config, fake_engine.command(0.0))
    yield process
    process.stop()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def supervisor(config: EngineConfig, told: Told) -> Iterator[EngineSupervisor]:
    supervisor = EngineSupervisor(config, fake_engine.command(0.0), told)
    supervisor.start()
    yield supervisor
    supervisor.stop()


@pytest.mark.usefixtures("capfd")
def test_an_engine_that_raises_in_a_step_says_why_in_one_line_and_ends(process: EngineProcess) -> None:
    process.send(RAISES)

    messages = [process.receive(5.0)]
    while not isinstance(messages[-1], EngineFailed):
        messages.append(process.receive(5.0))

    assert re.fullmatch(WHY, messages[-1].message)
    with pytest.raises(EngineUnavailable, match="ended with code 1"):
        process.receive(5.0)


@pytest.mark.usefixtures("capfd")
def test_an_engine_that_has_served_and_fails_is_started_again(supervisor: EngineSupervisor, told: Told) -> None:
    assert told.events.get(timeout=10) == "ready"
    supervisor.send(RAISES)

    assert [told.events.get(timeout=10) for _ in range(2)] == ["down", "ready"]
    assert supervisor.failure is None


@pytest.mark.parametrize("knows_who", [True, False])
def test_deaths_that_one_request_is_charged_with_bring_no_pause(
    supervisor: EngineSupervisor, told: Told, knows_who: bool
) -> None:
    told.knows_who = knows_who
    for _ in range(2):
        assert told.events.get(timeout=10) == "ready"
        supervisor.send(RAISES)
        assert told.events.get(timeout=10) == "down"
    assert (supervisor._backoff_s() == 0) == knows_who


@pytest.mark.usefixtures("capfd")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_supervisor_whose_thread_has_ended_by_itself_has_died(
    supervisor: EngineSupervisor, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(told, "on_down", fail)
    assert told.events.get(timeout=10) == "ready"
    assert not supervisor.has_died
    supervisor.send(RAISES)
    wait_until(lambda: supervisor.has_died, message="the end of the thread")
    supervisor.stop()
    assert not supervisor.has_died, "it was told to leave"
