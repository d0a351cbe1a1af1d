"""What the log never says unless asked."""

import json
import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from engine.stats import MemoryRow
from worker import log
from worker.attempt import Attempt
from worker.claims import Delivery
from worker.inflight import InFlight
from worker.link import Link
from worker.metrics import Metrics
from worker.publisher import Publisher
from worker.reader import memory_fields

SECRET = "the prompt that nobody may read"


@pytest.fixture(autouse=True)
def _back_to_normal() -> Iterator[None]:
    yield
    log.configure()


@pytest.fixture
def _taken_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    handlers = logging.getLogger().handlers[:]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        log.configure()
        log.take_over()
        yield
    logging.getLogger().handlers = handlers


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def failing_line(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"cannot encode {SECRET}") from error
    except ValueError:
        log.get("test").error("turn_failed", exc_info=True)
    return json.loads(capsys.readouterr().err)


def test_a_traceback_says_where_and_what_kind_but_not_about_what(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(verbose=True)
    line = failing_line(capsys)
    assert SECRET not in line["exception"].replace('f"cannot encode {SECRET}"', "")
    assert [name in line["exception"] for name in ("KeyError", "ValueError", "test_log.py")] == [True] * 3


def test_a_traceback_is_whole_when_prompts_may_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(prompts=True)
    assert failing_line(capsys)["exception"].count(SECRET) == 2


@pytest.mark.parametrize(("prompts", "shown"), [(False, {}), (True, {"prompt": SECRET})])
def test_private_fields_are_there_when_asked_for_only(prompts: bool, shown: dict[str, str]) -> None:
    log.configure(prompts=prompts)
    assert log.private(prompt=SECRET) == shown


@pytest.mark.parametrize(
    ("form", "is_terminal", "is_json"),
    [("auto", True, False), ("auto", False, True), ("json", True, True), ("text", False, False)],
)
def test_lines_are_json_where_nobody_sits_or_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str, is_terminal: bool, is_json: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    log.configure(form=form)  # type: ignore[arg-type]
    log.get("test").info("worker_left")
    assert (capsys.readouterr().err.startswith("{"), log.is_ours_alone()) == (is_json, is_json)


def test_a_command_with_its_own_words_says_errors_alone_in_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(form="brief")
    log.get("bridge").warning("engine_said", text="Traceback")
    log.get("bridge").error("engine_down", device="cpu", reason="it was\nkilled")
    assert capsys.readouterr().err == "worker: engine down: device cpu, reason it was killed\n"
    assert log.is_ours_alone()


def test_lines_tell_whose_they_are_and_what_they_are_first(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(form="json")
    log.bind(worker="w-1", queue="q")
    log.get("test").info("queue_paused", queue="other", jobs=1)
    [line] = lines(capsys)
    assert list(line) == ["timestamp", "level", "event", "part", "worker", "queue", "jobs"]
    assert (line["worker"], line["queue"]) == ("w-1", "other")


class Wordless:
    def __str__(self) -> str:
        raise RuntimeError("a library's fault")


@pytest.mark.parametrize(("words", "values", "text"), [("%d tokens", ["many"], "%d tokens"), (Wordless(), [], "Wordless")])
def test_a_library_that_logs_by_mistake_what_cannot_be_formatted_goes_on(
    capsys: pytest.CaptureFixture[str], words: object, values: list[object], text: str
) -> None:
    log.configure(prompts=True)
    logger = logging.Logger("some.package")
    logger.addHandler(log._Library())
    logger.warning(words, *values)
    [line] = lines(capsys)
    assert (line["event"], line["text"]) == ("library_said", text)


def test_a_throttle_says_how_many_lines_it_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    throttle = log.Throttle(10.0)
    for now[0] in (0.0, 1.0, 9.0, 10.0, 20.0):
        throttle.write(lambda event, **fields: written.append((event, fields)), "turn_failed", at=now[0])
    assert written == [("turn_failed", {"held_back": held, "at": at}) for held, at in ((0, 0.0), (2, 10.0), (0, 20.0))]


@pytest.mark.usefixtures("_taken_over")
def test_what_python_and_libraries_say_are_lines_without_what_they_were_about(capsys: pytest.CaptureFixture[str]) -> None:
    log.take_over()  # a second time changes nothing
    warnings.warn(SECRET, stacklevel=1)
    logging.getLogger("some.package").warning("cannot encode %s", SECRET)
    thread = threading.Thread(target=lambda: {}[SECRET], name="t-1")
    thread.start()
    thread.join()
    said = lines(capsys)
    assert [line["event"] for line in said] == ["python_warning", "library_said", "thread_died"]
    assert [said[0]["kind"], said[1]["library"], said[2]["thread"]] == ["UserWarning", "some.package", "t-1"]
    assert SECRET not in json.dumps(said)


@pytest.mark.parametrize(("number", "level"), [(1, logging.INFO), (2, logging.INFO), (3, logging.DEBUG), (20, logging.DEBUG)])
def test_from_the_third_attempt_on_only_the_end_is_told(number: int, level: int) -> None:
    delivery = Delivery("a", "1-1", "normal", {}, 0, number, number, f"l:{number}", 7, 0, 0, "new")
    assert Attempt(delivery).level() == level


def test_the_table_of_the_engine_s_memory_becomes_fields() -> None:
    rows = (MemoryRow("weights", 269_060_552), MemoryRow("swapped KV, on host", 4096, "100 blocks"))
    assert memory_fields(rows) == {
        "weights_bytes": 269_060_552,
        "swapped_kv_on_host_bytes": 4096,
        "swapped_kv_on_host": "100 blocks",
    }


def test_a_fault_at_every_turn_of_a_loop_leaves_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure()
    metrics, turns = Metrics(), iter(range(5))
    link = Link("test", metrics, log.Throttle())
    broken = Broken(link=link, inflight=InFlight(metrics), metrics=metrics)
    broken._inflight.wait_for_writing = lambda timeout_s: set()  # type: ignore[method-assign]

    def is_left() -> bool:
        return next(turns, None) is None

    broken._leave.is_set = is_left  # type: ignore[method-assign]
    broken._run()
    assert [line["event"] for line in lines(capsys)] == ["flush_failed"]


class Broken(Publisher):
    def __init__(self, **parts: Any) -> None:
        super().__init__(broker=None, model="m", may_write=lambda: True, **parts)  # type: ignore[arg-type]

    def flush(self, touched: set[Attempt]) -> float:
        raise RuntimeError("a fault of ours")


def test_without_a_standard_error_lines_go_nowhere_and_not_to_whatever_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(log._stderr, "write", written.append)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        patch.setattr(sys, "__stderr__", None)
        log.configure()
        log.get("test").info("hello")
        sys.stderr.close()
    assert (log.is_ours_alone(), written) == (True, [])
