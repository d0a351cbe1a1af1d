"""What stands on the dashboards of ops/grafana, on a real Prometheus that has scraped a real worker through a busy minute.

Grafana itself is not run: its part is to replace variables, which tests/support/grafana.py does as it would.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from tests.support import busy_worker, grafana
from tests.support.busy_worker import Story
from tests.support.prometheus import SCRAPE_S, Series
from tests.support.rules import ROOT
from worker.metrics import PREFIX

BOARDS = grafana.load()
PANELS = [panel for board in BOARDS.values() for panel in grafana.panels(board)]
EXPRESSIONS = [(panel, target) for panel in PANELS for target in panel.targets]

ZERO = {
    ("slot_steps_total", 'state="finished"'): "only --scheduling request_level holds slots for requests that have ended",
    ("worker_state", 'state="stalled"'): "the engine makes its steps",
    ("worker_state", 'state="draining"'): "the worker stays",
    ("gpu_memory_bytes", ""): "the worker has no GPU",
    ("leaked_blocks_total", ""): "no block is lost",
    ("jobs_released_total", 'reason="drain"'): "the worker stays",
    ("jobs_released_total", 'reason="fault"'): "no request fails inside the engine",
    ("jobs_fenced_total", 'reason="finish"'): "a loss is seen at a renewal or with the next token, before the result",
    ("jobs_fenced_total", 'reason="retry"'): "no request fails inside the engine",
    ("jobs_fenced_total", 'reason="unwritable"'): "everything can be written",
    ("redis_errors_total", 'kind="connection"'): "the server is out of memory for a moment, and nothing else",
    ("redis_errors_total", 'kind="timeout"'): "as above",
    ("redis_errors_total", 'kind="auth"'): "as above",
    ("redis_errors_total", 'kind="loading"'): "as above",
    ("redis_errors_total", 'kind="readonly"'): "as above",
    ("redis_errors_total", 'kind="response"'): "as above",
    ("jobs_finished_total", 'finish_reason="stop"'): "jobs of random models go on to max_tokens",
    ("count(up{", ""): "the worker is scraped to the end",
    ("ALERTS", ""): "this Prometheus has no rules",
}
"""Why an expression with all of these words shows nothing but zero here."""

NAME = re.compile(rf"{PREFIX}_\w+")


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with busy_worker.busy_worker() as told:
        yield told


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_every_expression_returns_data_or_a_zero_that_is_explained(story: Story, board: dict[str, Any]) -> None:
    chosen = grafana.choose_all(board, story.prometheus, story.started, story.ended)
    silent = {}
    for panel in grafana.panels(board):
        for target in panel.targets:
            values = [value for series in _run(story, target, chosen) for value in series.finite]
            if not any(values) and not _explained(target["expr"]):
                silent[f"{panel} / {target['legendFormat']}"] = "zero" if values else "no finite sample"
            elif any(values) and _explained(target["expr"]) and "up{" not in target["expr"]:  # a busy machine misses a scrape
                silent[f"{panel} / {target['legendFormat']}"] = (
                    f"has data, and is said to be zero: {_explained(target['expr'])}"
                )
    assert not silent


def test_every_expression_of_the_metrics_page_returns_data(story: Story) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    expressions = re.findall(r"^    ((?:sum|histogram_quantile)\b.+)$", page, re.MULTILINE)
    found = {expr: story.prometheus.at(expr.replace('model="m"', 'model!=""'), story.ended) for expr in expressions}
    assert len(found) > 5
    assert [expr for expr, answer in found.items() if not answer] == []


def test_every_explanation_of_a_zero_is_needed() -> None:
    unused = [words for words in ZERO if not any(_is_about(words, target["expr"]) for _, target in EXPRESSIONS)]
    assert not unused


def test_marks_stand_where_the_engine_started_and_started_again(story: Story) -> None:
    [mark] = BOARDS["slotmill-fleet"]["annotations"]["list"]
    chosen = grafana.choose_all(BOARDS["slotmill-fleet"], story.prometheus, story.started, story.ended)
    [series] = story.prometheus.over(grafana.replace(mark["expr"], chosen), story.started, story.ended)
    times = [time for time, _ in series.points]
    groups = 1 + sum(later - earlier > SCRAPE_S for earlier, later in pairwise(times))
    assert groups in (1, 2), "the first start may come before the first scrape"
    assert times[-1] > story.busy, "no mark where the killed engine came up again"


def test_shares_of_slot_steps_sum_to_1(story: Story) -> None:
    totals: dict[float, float] = {}
    for series in _shown(story, "slotmill-slots", "Slot-steps by what the slot did"):
        for time, value in series.points:
            totals[time] = totals.get(time, 0.0) + value
    assert len(totals) > 10
    assert all(total == pytest.approx(1) for total in totals.values())


def test_tokens_made_are_the_tokens_of_the_results(story: Story) -> None:
    [sampled, _] = _shown(story, "slotmill-slots", "Tokens made", start=story.counted_from)
    made = sum(sampled.finite) * SCRAPE_S
    assert made == pytest.approx(story.counted_tokens, rel=0.03)


def test_depth_of_the_lanes_is_what_was_queued_while_nothing_was_taken(story: Story) -> None:
    lanes = _shown(story, "slotmill-queue", "Jobs waiting, by lane", start=story.paused, end=story.paused)
    assert {series.labels["priority"]: series.finite[0] for series in lanes} == busy_worker.LANES
    assert {series.labels["queue"] for series in lanes} == {busy_worker.QUEUE}


def test_delayed_jobs_stand_in_their_lane(story: Story) -> None:
    lanes = _shown(story, "slotmill-queue", "Jobs not due yet, by lane", start=story.paused, end=story.paused)
    found = {series.labels["priority"]: series.finite[0] for series in lanes}
    assert found == busy_worker.DELAYED


def test_time_by_part_is_the_time_of_all_steps(story: Story) -> None:
    parts = story.prometheus.at("sum(slotmill_engine_time_seconds_total)", story.ended)
    steps = story.prometheus.at("sum(slotmill_engine_step_duration_seconds_sum)", story.ended)
    assert parts[0].finite[0] == pytest.approx(steps[0].finite[0], rel=0.01)


def test_kv_blocks_by_state_fill_the_cache(story: Story) -> None:
    """The median, as a scrape may come between the changes of two states."""
    states = _shown(story, "slotmill-slots", "KV blocks by state", start=story.counted_from)
    totals = [sum(values) for values in zip(*(series.finite for series in states), strict=True)]
    assert median(totals) == busy_worker.OPTIONS["kv-blocks"]


def test_the_row_of_a_worker_says_what_it_is(story: Story) -> None:
    found: dict[str, str] = {}
    for series in _shown(story, "slotmill-fleet", "Workers"):
        found |= series.labels
    assert {name: found[name] for name in ("queue", "gpu", "state", "dtype")} == {
        "queue": busy_worker.QUEUE,
        "gpu": "cpu",
        "state": "serving",
        "dtype": "float32",
    }
    assert found["version"]
    assert found["model"]


def _shown(story: Story, uid: str, title: str, start: float | None = None, end: float | None = None) -> list[Series]:
    """What a panel shows, series by series."""
    board = BOARDS[uid]
    [panel] = [panel for panel in grafana.panels(board) if panel.spec["title"] == title]
    chosen = grafana.choose_all(board, story.prometheus, story.started, story.ended)
    return [series for target in panel.targets for series in _run(story, target, chosen, start, end)]


def _run(
    story: Story, target: Mapping[str, Any], chosen: Mapping[str, str], start: float | None = None, end: float | None = None
) -> list[Series]:
    """The answer over the story; of an instant query, those at its busiest and at its end."""
    expr = grafana.replace(target["expr"], chosen)
    if target.get("instant"):
        return [series for time in (story.busy, story.ended) for series in story.prometheus.at(expr, time)]
    return story.prometheus.over(expr, start or story.started, end or story.ended)


def _explained(expr: str) -> str:
    """Why it is zero here; empty for what must have data."""
    return next((why for words, why in ZERO.items() if _is_about(words, expr)), "")


def _is_about(words: tuple[str, ...], expr: str) -> bool:
    """Only expressions about that alone: a sum that has other terms is not zero."""
    return all(word in expr for word in words) and len(set(NAME.findall(expr))) <= 1 + ("engine_up" in expr)
