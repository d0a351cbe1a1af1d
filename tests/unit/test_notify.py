"""What is said to systemd, and when its watchdog is fed."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.init_system import InitSystem
from tests.support.wait import wait_until
from worker import notify
from worker.background import Background
from worker.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def init(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InitSystem]:
    listener = InitSystem(tmp_path if request.param == "path" else None)
    yield listener
    listener.close()


@dataclass
class Worker:
    """Answers as the probes of a worker do."""

    not_live: str = ""
    not_ready: str = ""
    status: str = "serving: 0 of 8 slots"

    def notifier(self, environ: dict[str, str]) -> Notifier:
        return Notifier(lambda: self.status, lambda: self.not_live, lambda: self.not_ready, environ)


@pytest.fixture
def started() -> Iterator[list[Notifier]]:
    notifiers: list[Notifier] = []
    yield notifiers
    for notifier in notifiers:
        notifier.stop()


def start(worker: Worker, started: list[Notifier], environ: dict[str, str]) -> Notifier:
    notifier = worker.notifier(environ)
    started.append(notifier)
    notifier.start()
    return notifier


def test_a_worker_that_loads_extends_its_start_and_is_not_ready(init: InitSystem, started: list[Notifier]) -> None:
    start(Worker(not_ready="the engine is loading", status="waiting: the engine is loading"), started, init.environ(30))
    heard = init.next() + init.next()
    assert heard == ["EXTEND_TIMEOUT_USEC=60000000", "STATUS=waiting: the engine is loading", "EXTEND_TIMEOUT_USEC=60000000"]


def test_a_worker_says_once_that_it_is_ready(init: InitSystem, started: list[Notifier]) -> None:
    start(Worker(), started, init.environ(0.03))
    heard = [init.next() for _ in range(3)]
    assert heard == [["READY=1", "WATCHDOG=1", "STATUS=serving: 0 of 8 slots"], ["WATCHDOG=1"], ["WATCHDOG=1"]]


def test_the_watchdog_is_not_fed_without_progress_and_fed_again_with_it(init: InitSystem, started: list[Notifier]) -> None:
    worker = Worker()
    start(worker, started, init.environ(0.03))
    init.wait_for(lambda line: line == "READY=1")
    worker.not_live = "the main loop has not come around for 61 s"
    init.wait_for(lambda line: line == f"STATUS={worker.not_live}")
    init.wait_for_silence(0.2)
    worker.not_live = ""
    init.wait_for(lambda line: line == "WATCHDOG=1")


def test_a_start_without_progress_is_not_extended(init: InitSystem, started: list[Notifier]) -> None:
    start(Worker(not_live="the thread leases has ended", not_ready="the engine is loading"), started, init.environ())
    assert init.next() == ["STATUS=the thread leases has ended"]
    assert init.next(0.3) == []


def test_a_watchdog_of_another_process_is_not_hurried_for(init: InitSystem, started: list[Notifier]) -> None:
    start(Worker(), started, init.environ(0.03, pid=os.getppid()))
    init.wait_for(lambda line: line == "READY=1")
    assert init.next(0.3) == []


def test_a_watchdog_of_this_process_is_fed(init: InitSystem, started: list[Notifier]) -> None:
    start(Worker(), started, init.environ(0.03, pid=os.getpid()))
    init.wait_for(lambda line: line == "READY=1")
    assert init.next(1) == ["WATCHDOG=1"]


def test_what_the_drain_may_take_is_told(init: InitSystem) -> None:
    Worker().notifier(init.environ()).stopping(43.0)
    assert init.next() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=43000000"]


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "/nonexistent/notify", "@nobody-listens-there"])
def test_nobody_who_listens_is_no_trouble(started: list[Notifier], address: str) -> None:
    notifier = start(Worker(), started, {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
    notifier.stopping(1.0)
    assert not notifier.has_died


def test_what_a_full_socket_did_not_take_is_said_again(init: InitSystem, started: list[Notifier], monkeypatch) -> None:
    monkeypatch.setattr(notify, "IO_TIMEOUT_S", 0.01)
    init.fill()
    start(Worker(), started, init.environ(0.03))
    init.wait_for(lambda line: line == "READY=1")
    assert "STATUS=serving: 0 of 8 slots" in init.lines


@pytest.mark.parametrize("usec", ["", "0", "-1", "x", "1e6", "²", "٣", "9" * 400, "9" * 5000, " 30"])
def test_a_watchdog_s_time_that_is_none_is_as_good_as_no_watchdog(usec: str) -> None:
    assert Worker().notifier({"WATCHDOG_USEC": usec})._pause_s() == notify.STARTING_PAUSE_S


def test_a_watchdog_of_no_time_costs_no_core() -> None:
    assert Worker().notifier({"WATCHDOG_USEC": "1"})._pause_s() == notify.MIN_PAUSE_S


class Mortal(Background):
    def _run(self) -> None:
        if self.name == "stays":
            self._leave.wait()


def test_a_thread_that_ended_untold_has_died() -> None:
    thread = Mortal("ends")
    assert not thread.has_died
    thread.start()
    wait_until(lambda: thread.has_died, message="the end of the thread")


def test_a_thread_that_was_told_to_end_has_not_died() -> None:
    thread = Mortal("stays")
    thread.start()
    assert not thread.has_died
    thread.stop()
    assert not thread.has_died
