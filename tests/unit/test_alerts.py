"""Configuration, recording rules and alerts for Prometheus, as promtool sees them, and the runbook that alerts lead to."""

import json
import re
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from tests.support.rules import FOLDER, ROOT, UNIT_TESTS, load, rules, unit_tests
from worker.metrics import Metrics

RUNBOOK = (ROOT / "ops/runbook.md").read_text()
ENTRIES = {part.splitlines()[0]: part for part in RUNBOOK.split("\n## ")[1:]}
SEARCHING = {name: entry for name, entry in ENTRIES.items() if "\n    logs" in entry}
ALERTS = rules("alert")

each_alert = pytest.mark.parametrize("alert", ALERTS.values(), ids=ALERTS)


def promtool(*args: str, given: bytes = b"") -> None:
    """Run it where the files are; it must find nothing. `make test` fetches it."""
    command = [str(Path(sys.executable).with_name("promtool")), *args]
    done = subprocess.run(command, cwd=FOLDER, input=given, capture_output=True, timeout=60, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said


def test_the_configuration_is_valid_with_its_rules() -> None:
    promtool("check", "config", "--lint=all", "--lint-fatal", "prometheus.yml")


def test_what_the_configuration_shows_in_comments_is_valid_as_well(tmp_path: Path) -> None:
    """Lines behind a # and three blanks are examples. Debian's build does not know how to find pods."""
    numbers = count()
    shown = re.sub(r"^( *)#   ", r"\1", (FOLDER / "prometheus.yml").read_text(), flags=re.MULTILINE)
    shown = re.sub(r"kubernetes_sd_configs: .*", "static_configs: []", shown)
    each_named = re.sub("job_name: slotmill", lambda _: f"job_name: slotmill-{next(numbers)}", shown)
    (tmp_path / "prometheus.yml").write_text(each_named)
    promtool("check", "config", "--syntax-only", str(tmp_path / "prometheus.yml"))
    assert next(numbers) == 3


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.name)
def test_rules_do_what_their_unit_tests_say(path: Path) -> None:
    promtool("test", "rules", f"tests/{path.name}")


def test_the_names_and_types_of_metrics_follow_prometheus_conventions() -> None:
    promtool("check", "metrics", given=generate_latest(Metrics().registry))


def test_the_workers_of_the_compose_file_are_scraped() -> None:
    services = load(ROOT / "docker-compose.yml")["services"]
    workers = {name: service for name, service in services.items() if name.startswith("worker")}
    (job,) = load(FOLDER / "prometheus.yml")["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) == set(workers)
    assert {(str(found["port"]),)} == {tuple(service["expose"]) for service in workers.values()}


@each_alert
def test_an_alert_says_how_urgent_it_is_what_is_wrong_and_where_to_go_on(alert: dict[str, Any]) -> None:
    assert set(re.findall(r"page|warning", alert["labels"]["severity"])), alert["labels"]
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["annotations"]["runbook_url"] == f"ops/runbook.md#{alert['alert'].lower()}"


@each_alert
def test_an_alert_is_seen_to_stay_silent_to_fire_and_to_resolve(alert: dict[str, Any]) -> None:
    checks = [
        [check for check in group.get("alert_rule_test", ()) if check["alertname"] == alert["alert"]] for group in unit_tests()
    ]
    courses = [[len(check["exp_alerts"]) > 0 for check in course] for course in checks if course]
    assert any(not course[0] and True in course and not course[-1] for course in courses), courses


def test_quantiles_of_waiting_reach_beyond_what_the_backlog_alert_allows() -> None:
    """Above its last bound a histogram tells that bound."""
    allowed = max(int(limit) for limit in re.findall(r"> (\d+)", ALERTS["SlotmillBacklogOld"]["expr"]))
    samples = [sample for family in Metrics().registry.collect() for sample in family.samples]
    for name in ("queue_time", "time_to_first_token", "job_duration"):
        bounds = {float(each.labels["le"]) for each in samples if each.name == f"slotmill_{name}_seconds_bucket"}
        assert sorted(bounds)[-2] > allowed


def test_unit_tests_of_alerts_name_labels_and_annotations() -> None:
    fired = [alert for group in unit_tests() for check in group.get("alert_rule_test", ()) for alert in check["exp_alerts"]]
    assert fired
    assert [alert for alert in fired if {"summary", "description"} - set(alert.get("exp_annotations", ()))] == []


def test_every_recording_rule_has_a_unit_test() -> None:
    tested = [check["expr"] for group in unit_tests() for check in group.get("promql_expr_test", ()) if check["exp_samples"]]
    assert {expression.partition("{")[0] for expression in tested} == set(rules("record"))


def test_every_alert_has_an_entry_in_the_runbook_and_every_entry_an_alert() -> None:
    assert list(ENTRIES) == list(ALERTS)


def test_promql_in_the_runbook_can_be_parsed(tmp_path: Path) -> None:
    asked = re.findall(r"promtool query instant \S+ '([^'\n]+)'", RUNBOOK)
    recorded = [{"record": f"asked:number{number}", "expr": expression} for number, expression in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "runbook", "rules": recorded}]}))
    promtool("check", "rules", str(tmp_path / "rules.yml"))
    assert asked


def test_what_the_runbook_looks_for_in_logs_is_logged() -> None:
    searches = re.findall(r"logs .*?\| grep (?:-E )?(\S+)", RUNBOOK)
    sought = {event for search in searches for event in re.findall(r"[a-z]+(?:_[a-z]+)*", _spelt_out(search))}
    sought |= set(re.findall(r'"event": "(\w+)"', RUNBOOK))
    sources = " ".join(path.read_text() for path in (ROOT / "worker").glob("*.py"))
    assert sought
    assert sought <= set(re.findall(r'"(\w+)"', sources))


@pytest.mark.parametrize("entry", SEARCHING.values(), ids=SEARCHING)
def test_an_entry_looks_for_what_its_causes_are_told_by(entry: str) -> None:
    """A line of the log that a cause names is among those that were looked for."""
    sources = " ".join(path.read_text() for path in (ROOT / "worker").glob("*.py"))
    events = set(re.findall(r'_log\.\w+\(\s*"(\w+)"', sources))
    look, _, causes = entry.partition("**Causes.**")
    searches = [_spelt_out(pattern) for pattern in re.findall(r"^    logs .*?\| grep (?:-E )?(\S+)", look, re.MULTILINE)]
    named = events & set(re.findall(r"`(\w+)`", causes.partition("**Over.**")[0]))
    assert [event for event in named if event not in " ".join(searches)] == []


WAYS_TO_RUN = ("docker compose", "kubectl", "journalctl", "cat")


@pytest.mark.parametrize("way", WAYS_TO_RUN)
def test_a_command_of_the_runbook_can_be_typed_however_workers_run(way: str) -> None:
    """Each way has a block that sets the same words, and no entry asks in the words of one."""
    intro = RUNBOOK.split("\n## ")[0]
    (block,) = (each for each in re.findall(r"(?:^    .*\n)+", intro, re.MULTILINE) if f"logs() {{ {way}" in each)
    assert {"logs", "promtool", "server"} <= set(re.findall(r"(\w+)\(\) {", block))
    assert "PROMETHEUS=" in block
    assert [name for name, entry in ENTRIES.items() if re.search(rf"^    {way} ", entry, re.MULTILINE)] == []


@pytest.mark.parametrize("way", [("logs",), ("logs", "--since", "15m")])
def test_the_log_of_a_host_is_asked_in_words_that_journalctl_knows(way: tuple[str, ...]) -> None:
    """`15m` alone is no time to it; `-15m` is."""
    (line,) = re.findall(r"^    (logs\(\) { journalctl.*)$", RUNBOOK, re.MULTILINE)
    script = f'journalctl() {{ printf "%s\\n" "$@"; }}; {line}; {" ".join(way)}'
    asked = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert asked == ["-o", "cat", "-u", "slotmill-worker@*", *(["--since=-15m"] if len(way) > 1 else [])]


def _spelt_out(pattern: str) -> str:
    """`a_(b|c)` as `a_b a_c`."""
    return re.sub(r"(\w*)\(([^()]*)\)", lambda found: " ".join(found[1] + end for end in found[2].split("|")), pattern)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_of_the_runbook_leads_from_users_over_a_command_to_the_end(entry: str) -> None:
    parts = re.findall(r"^\*\*(.+?)\.\*\*", entry, re.MULTILINE)
    assert parts == ["Users", "Look", "Causes", "Over"]
    assert re.search(r"\*\*Look\.\*\*.*\n\n    \S", entry), "no command to run first"
