"""How a queue and its dead look on a terminal."""

import json

import pytest

from worker.broker import LaneCounts
from worker.command import plain
from worker.keys import LANES
from worker.queue_admin import DeadRow, QueueStats
from worker.queue_view import MAX_WORKERS, dead_text, span, stats_data, stats_text, table


def stats_of(**changes: object) -> QueueStats:
    fields: dict[str, object] = {
        "queue": "q",
        "is_paused": False,
        "is_closed": False,
        "max_queued": None,
        "lanes": {lane: LaneCounts(0, 0, 0.0) for lane in LANES},
        "purging": (),
        "delayed": 0,
        "due_in_s": None,
        "dead": 0,
        "done": 0,
        "workers": (),
    }
    return QueueStats(**fields | changes)  # type: ignore[arg-type]


def worker(name: str) -> dict[str, str]:
    return {"id": name, "model": "m", "slots": "8", "active": "3", "state": "serving", "seen_s": "0.5"}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.9, "0 s"), (59.9, "59 s"), (61, "1 m 1 s"), (3725, "1 h 2 m"), (90_000, "1 d 1 h"), (30 * 86_400, "30 d 0 h")],
)
def test_a_duration_is_told_in_its_two_largest_units(seconds: float, shown: str) -> None:
    assert span(seconds) == shown


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\x9b1m", "\u202eabc", "\udcff"])
def test_text_of_others_cannot_steer_a_terminal(text: str) -> None:
    assert plain(text).isprintable()


def test_printable_text_of_any_language_is_shown_as_it_is() -> None:
    assert plain("Zoë 東京 👍") == "Zoë 東京 👍"


def test_columns_stand_below_each_other() -> None:
    assert table([("a", "long", "x"), ("bbb", "c", "")]) == "a    long  x\nbbb  c"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "queue q: open, no limit"),
        ({"is_paused": True}, "queue q: paused, no limit"),
        ({"is_paused": True, "is_closed": True, "max_queued": 7}, "queue q: paused, closed, limit 7"),
    ],
)
def test_the_first_line_tells_the_settings(changes: dict[str, object], shown: str) -> None:
    assert stats_text(stats_of(**changes)).splitlines()[0] == shown


def test_a_lane_tells_who_waits_and_who_runs() -> None:
    lanes = {lane: LaneCounts(0, 0, 0.0) for lane in LANES} | {"normal": LaneCounts(9, 4, 75.0, 2, 1, 3)}
    rows = [line.split() for line in stats_text(stats_of(lanes=lanes)).splitlines() if line]
    assert rows[1] == ["lane", "entries", "waiting", "held", "released", "suspects", "delayed", "oldest"]
    assert rows[3] == ["normal", "9", "5", "4", "2", "1", "3", "1", "m", "15", "s"]


def test_what_is_delayed_or_purged_is_told() -> None:
    shown = stats_text(stats_of(delayed=2, due_in_s=61.0, dead=3, done=4, purging=("low",)))
    assert "delayed 2 (next due in 1 m 1 s), dead 3, done 4" in shown
    assert "purged: low: " in shown


def test_a_hundred_workers_leave_the_rest_on_the_screen() -> None:
    shown = stats_text(stats_of(workers=tuple(worker(f"w{number}") for number in range(100))))
    assert len(shown.splitlines()) < MAX_WORKERS + 12
    assert shown.endswith("\nand 80 more")


def test_a_queue_without_workers_says_so() -> None:
    assert stats_text(stats_of()).endswith("no worker serves this queue")


def test_numbers_are_numbers_in_json() -> None:
    data = json.loads(json.dumps(stats_data(stats_of(workers=(worker("w"),), max_queued=3))))
    assert (data["max_queued"], data["lanes"]["low"]["oldest_age_s"]) == (3, 0.0)
    assert data["workers"] == [{"id": "w", "model": "m", "slots": 8, "active": 3, "state": "serving", "seen_s": 0.5}]


def test_a_dead_job_is_a_line() -> None:
    row = DeadRow("1700000000000-0", "a", "low", "dead_letter", 2, "me", "it\ncrashed", 5)
    [_, line] = dead_text([row]).splitlines()
    assert line.split() == ["2023-11-14", "22:13:20Z", "dead_letter", "2", "me", "a", "it\ufffdcrashed"]
