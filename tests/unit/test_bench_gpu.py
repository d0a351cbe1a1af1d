"""The check of a GPU, tried without one: its cases in tiny sizes, and that a failure costs one case."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.gpu import PARTS, Report, main, run_cases, supervise


@pytest.mark.parametrize("part", PARTS)
def test_every_case_of_a_part_runs_in_tiny_sizes(part: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"

    done = CliRunner().invoke(main, ["--dry-run", "--part", part, "--json", str(target)])

    rows = json.loads(target.read_text())["rows"]
    assert [row for row in rows if "error" in row or row.get("ok") is False or row.get("left_out")] == []
    assert done.exit_code == 0, done.output
    assert {row["part"] for row in rows} == {part}


def test_a_case_that_fails_is_recorded_and_the_next_one_goes_on() -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("no such thing")

    rows = list(run_cases(iter([("a", fail), ("b", dict)]), time.monotonic() + 60))

    assert [row.get("error") for row in rows] == ["ValueError: no such thing", None]


def test_what_there_is_no_time_for_is_left_out() -> None:
    assert list(run_cases(iter([("a", dict)]), time.monotonic() - 1)) == [{"name": "a", "left_out": True}]


CHILD = """
import os, sys, time
skipped = [sys.argv[i + 1] for i, word in enumerate(sys.argv) if word == "--skip"]
for name in ("fine", "deadly", "after"):
    if name in skipped:
        continue
    print(f'@case {{"start": "{name}"}}', file=sys.stderr, flush=True)
    if name == "deadly":
        HOW
    print(f'@case {{"name": "{name}"}}', file=sys.stderr, flush=True)
"""


def supervised(how: str, tmp_path: Path, seconds: float = 60.0) -> Report:
    report = Report(tmp_path / "out.json")
    supervise([sys.executable, "-c", CHILD.replace("HOW", how)], "part", seconds, report)
    return report


def test_a_process_that_dies_costs_the_case_it_died_in(tmp_path: Path) -> None:
    report = supervised("os._exit(7)", tmp_path)

    assert report.rows == [
        {"part": "part", "name": "fine"},
        {"part": "part", "name": "deadly", "error": "the process ended with code 7"},
        {"part": "part", "name": "after"},
    ]
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == report.rows


def test_a_process_that_hangs_is_ended_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.GRACE_S", 0.0)

    report = supervised("time.sleep(600)", tmp_path, 2.0)

    assert report.rows[-1] == {"part": "part", "name": "deadly", "error": "its time was over"}


def test_a_process_that_cannot_begin_is_told_once(tmp_path: Path) -> None:
    report = Report(None)

    supervise([sys.executable, "-c", "raise SystemExit(2)"], "part", 60.0, report)

    assert report.rows == [{"part": "part", "name": "process", "error": "ended with code 2 before its next case"}]


def test_a_part_in_a_process_of_its_own_tells_its_parent_of_each_case() -> None:
    report = Report(None)

    supervise([sys.executable, "-m", "bench.gpu", "--part", "environment", "--dry-run"], "environment", 60.0, report)

    assert [row["name"] for row in report.rows] == ["machine", "copy"]
    assert report.failures == []
