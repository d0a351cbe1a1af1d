"""A metric has one name everywhere: registry, dashboards, rules, alerts, runbook and docs use the same, and the same labels."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import grafana
from tests.support.rules import NAME, ROOT, RULES, load, rules, selectors, unit_tests
from worker.metrics import Metrics

FAMILIES = {family.name: family for family in Metrics(num_engines=2).registry.collect()}
SUFFIXES = {"counter": ("_total",), "info": ("_info",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SAMPLES = {name + suffix: name for name, family in FAMILIES.items() for suffix in SUFFIXES[family.type]}
"""What Prometheus calls the series of a family -> the family."""
INFO_LABELS = {
    "slotmill_build": ("version",),
    "slotmill_model": ("model", "dtype", "block_size", "kv_blocks", "max_slots"),
    "slotmill_worker": ("gpu", "queue"),
}
"""Labels whose values are open; only info metrics have them."""
TARGET_LABELS = {"job", "instance", "pod"}
BOARDS = grafana.load()
RUNBOOK = (ROOT / "ops/runbook.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "ops/runbook.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECORDED = rules("record")


def labels_of(name: str) -> dict[str, set[str] | None]:
    """The labels of a series and their values; None where these are open."""
    if name in RECORDED:
        sources = [labels_of(source) for source, _ in selectors(RECORDED[name]["expr"])]
        levels = {*name.partition(":")[0].split("_"), "queue"}
        return {label: values for source in sources for label, values in source.items() if label in levels}
    family = FAMILIES[SAMPLES[name]]
    values: dict[str, set[str] | None] = dict.fromkeys(INFO_LABELS.get(family.name, ()))
    for sample in family.samples if family.type != "info" else ():
        for label, value in sample.labels.items():
            known = values.setdefault(label, set())
            assert known is not None
            known.add(value)
    return values


def of_dashboard(node: Any) -> Iterator[str]:
    """The expressions of panels and variables, wherever they stand."""
    if isinstance(node, dict):
        yield from (node[key] for key in ("expr", "query", "definition") if isinstance(node.get(key), str))
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from of_dashboard(child)


EXPRESSIONS = {
    **{uid: list(of_dashboard(board)) for uid, board in BOARDS.items()},
    **{path.name: [rule["expr"] for group in load(path)["groups"] for rule in group["rules"]] for path in RULES},
    "unit tests": [series["series"] for group in unit_tests() for series in group["input_series"]],
    "runbook.md": [
        *re.findall(r"promtool query instant \S+ '([^'\n]+)'", RUNBOOK),
        *re.findall(r"`([^`\n]*slotmill_\w+[\[{][^`\n]*)`", RUNBOOK),
    ],
}
SHOWN = [expression for uid in BOARDS for expression in EXPRESSIONS[uid]]
each_source = pytest.mark.parametrize("expressions", EXPRESSIONS.values(), ids=EXPRESSIONS)


def selected(expressions: list[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    return [selector for expression in expressions for selector in selectors(expression)]


@each_source
def test_names_are_those_of_the_registry(expressions: list[str]) -> None:
    names = {name for name, _ in selected(expressions)}
    assert names
    assert names - set(SAMPLES) - set(RECORDED) == set()


@each_source
def test_matchers_name_labels_and_values_that_exist(expressions: list[str]) -> None:
    wrong = []
    for name, matchers in selected(expressions):
        known = labels_of(name)
        for label, value in matchers:
            values = known.get(label, set())
            is_open = label in TARGET_LABELS or values is None or "$" in value or label == "le"
            if not is_open and value not in (values or ()):
                wrong.append(f'{name}{{{label}="{value}"}}')
    assert wrong == []


@each_source
def test_what_is_grouped_or_joined_by_exists(expressions: list[str]) -> None:
    known = {label for name in SAMPLES for label in labels_of(name)} | TARGET_LABELS | {"le"}
    named = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)", " ".join(expressions))
    assert {label.strip() for labels in named for label in labels.split(",") if label.strip() and "$" not in label} <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_series_or_families(page: Path) -> None:
    named = set(re.findall(NAME, page.read_text()))
    assert named - set(SAMPLES) - set(FAMILIES) - set(RECORDED) == set()


def test_every_metric_is_shown_by_a_dashboard_which_does_without_recording_rules() -> None:
    assert {SAMPLES.get(name, name) for name, _ in selected(SHOWN)} == set(FAMILIES)


def test_every_recording_rule_follows_level_metric_operations() -> None:
    assert [name for name in RECORDED if not re.fullmatch(r"queue(_[a-z]+)?:slotmill_[a-z_]+:[a-z0-9_]+", name)] == []


def test_what_rules_record_is_asked_by_an_alert_or_worth_keeping_for_long() -> None:
    """An alert or another rule uses it, or it is a share, a rate or a quantile that a year's graph is drawn from."""
    asked = {name for name, _ in selected([rule["expr"] for rule in (*rules("alert").values(), *RECORDED.values())])}
    idle = [name for name in set(RECORDED) - asked if not re.search(r":(ratio|rate|p9\d|max)", name)]
    assert idle == []
