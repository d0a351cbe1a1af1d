"""What is shown of one job."""

from datetime import datetime

import pytest

from worker.frames import Choice, Result, Timings, Usage
from worker.job_view import job_data, job_text

KNOWN = {
    "n": "7",
    "finished_ms": "95000",
    "seed": "12ab",
    "owner": "me",
    "tenant": "acme",
    "attempt": "2",
    "released": "1",
    "stream": "low",
    "started_ms": "40000",
    "enqueued_ms": "0",
    "lease": "x:2",
    "state": "running",
}
RESULT = Result(
    id="a",
    state="failed",
    code="invalid",
    error="max_tokens: -3: an integer from 0",
    choices=(Choice(0, "x", (1,), "stop"), Choice(1, "y", (2,), "stop")),
    usage=Usage(5, 2),
    timings=Timings(40.0, 41.25, 95.0),
    model="m",
    traceparent="00-1-2-00",
)


def shown(known: dict[str, str], result: Result | None = None, now_ms: float = 100_000, state: str = "running") -> list[str]:
    return job_text(job_data("a", state, known, result), result, now_ms).splitlines()


def names(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines]


def test_rows_stand_in_one_order_whatever_order_the_server_has() -> None:
    first, second = shown(KNOWN), shown(dict(reversed(KNOWN.items())))
    assert first == second
    order = ["id", "state", "lane", "enqueued", "started", "finished", "attempts", "worker", "tokens", "tenant"]
    assert names(first) == order


def test_what_only_scripts_need_is_left_out() -> None:
    assert not {"n", "seed", "lease"} & set(names(shown(KNOWN)))
    assert "tokens    7 so far" in shown(KNOWN)


def test_an_ended_job_says_why_how_long_and_in_which_trace() -> None:
    lines = dict(line.split(None, 1) for line in shown(KNOWN | {"code": "invalid"}, RESULT, state="failed"))
    assert lines["error"] == "max_tokens: -3: an integer from 0"
    assert lines["took"] == "95 s: 40 s in the queue, 41.2 s to the first token"
    assert lines["tokens"] == "2 after 5 of the prompt in 2 choices"
    assert lines["attempts"] == "2, 1 given back"
    assert lines["trace"] == "00-1-2-00"


@pytest.mark.parametrize(
    ("known", "away"),
    [
        ({"enqueued_ms": "88000"}, "(12 s ago)"),
        ({"enqueued_ms": "100900"}, "(0 s ago)"),
        ({"deadline_ms": "163000"}, "(in 1 m 3 s)"),
        ({"deadline_ms": "40000"}, "(1 m 0 s ago)"),
        ({"deadline_ms": str(2**53)}, " d "),
    ],
)
def test_times_say_how_far_away_they_are(known: dict[str, str], away: str) -> None:
    assert away in shown(known)[-1]


def test_a_time_is_the_local_one_with_its_distance_from_utc() -> None:
    told = shown({"enqueued_ms": "88000"})[-1].removeprefix("enqueued  ").partition(" (")[0]
    assert datetime.fromisoformat(told).timestamp() == 88
    assert datetime.fromisoformat(told).utcoffset() is not None


def test_data_holds_numbers_as_such_but_for_the_seed_which_is_none() -> None:
    data = job_data("a", "failed", KNOWN | {"seed": "123456789012345"}, RESULT)
    assert (data["attempt"], data["finished_ms"], data["seed"]) == (2, 95000, "123456789012345")
    assert data["error"] == RESULT.error
