"""A worker under an init system that listens as systemd does: ready, alive, leaving."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fake_engine, mute_engine
from tests.support.init_system import InitSystem
from tests.support.jobs import Producer
from tests.support.worker import WorkerMaker

WATCHDOG_S = 0.6


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InitSystem]:
    listener = InitSystem(tmp_path)
    for name, value in listener.environ(WATCHDOG_S).items():
        monkeypatch.setenv(name, value)
    yield listener
    listener.close()


def test_a_worker_is_ready_for_systemd_when_it_can_take_jobs(init: InitSystem, make_worker: WorkerMaker) -> None:
    worker = make_worker(is_awaited=False)
    init.wait_for(lambda line: line == "READY=1")
    assert worker.get("/readyz")[0] == 200
    assert "STATUS=waiting: the engine is loading" in init.lines
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in init.lines[: init.lines.index("READY=1")])
    assert init.lines.count("READY=1") == 1


def test_the_status_line_tells_slots_from_jobs_in_hand(init: InitSystem, make_worker: WorkerMaker, producer: Producer) -> None:
    make_worker("--max-slots", "2", delay_s=0.05)
    for _ in range(5):
        producer.add(prompt="w5 w6", max_tokens=100)
    init.wait_for(lambda line: line == "STATUS=serving: 2 of 2 slots, 3 jobs in hand")


def test_sigterm_says_at_once_that_the_worker_leaves_and_how_long_it_may_take(
    init: InitSystem, make_worker: WorkerMaker, producer: Producer
) -> None:
    worker = make_worker("--drain-s", "7", delay_s=0.02)
    job_id = producer.add(prompt="w5 w6", max_tokens=100)
    init.wait_for(lambda line: line.startswith("STATUS=serving: 1 of"))
    worker.process.send_signal(signal.SIGTERM)
    init.wait_for(lambda line: line == "STOPPING=1")
    assert worker.wait() == 0
    assert "EXTEND_TIMEOUT_USEC=25000000" in init.lines
    assert producer.result(job_id).state == "succeeded"


def test_a_worker_that_stands_still_starves_the_watchdog(init: InitSystem, make_worker: WorkerMaker) -> None:
    worker = make_worker()
    init.wait_for(lambda line: line == "WATCHDOG=1")
    worker.process.send_signal(signal.SIGSTOP)
    init.wait_for_silence(2 * WATCHDOG_S)
    worker.process.send_signal(signal.SIGCONT)
    init.wait_for(lambda line: line == "WATCHDOG=1")


def test_an_engine_that_hangs_beyond_remedy_starves_the_watchdog(
    init: InitSystem, make_worker: WorkerMaker, producer: Producer
) -> None:
    worker = make_worker("--engine-command", mute_engine.COMMAND, "--stall-s", "1")
    init.wait_for(lambda line: line == "WATCHDOG=1")
    producer.add(prompt="w5 w6", max_tokens=30)
    init.wait_for(lambda line: line.startswith("STATUS=the engine holds work and has made no step for"))
    init.wait_for_silence(2 * WATCHDOG_S)
    assert worker.get("/livez")[0] == 503
    assert worker.logged("watchdog_not_fed")


def test_an_engine_that_hangs_and_is_started_again_does_not_starve_it(
    init: InitSystem, make_worker: WorkerMaker, producer: Producer
) -> None:
    worker = make_worker("--stall-s", "1")
    producer.add(prompt=f"w{fake_engine.HANG_ID} w6", max_tokens=30)
    worker.wait_for_log("engine_down", 20)
    init.forget()
    init.wait_for(lambda line: line == "WATCHDOG=1", 2.0)
