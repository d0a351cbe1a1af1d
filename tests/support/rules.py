"""What ops/prometheus says, as data: its alerts and recording rules, and the names and matchers of a PromQL expression."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ops/prometheus"
RULES = (FOLDER / "rules.yml", FOLDER / "alerts.yml")
UNIT_TESTS = sorted((FOLDER / "tests").glob("*.yml"))
NAME = r"(?<![\w:/.-])(?:[a-z_]+:)?slotmill_[a-z0-9_]+(?::[a-z0-9_]+)?(?![\w:])"
"""A metric, or, with its level and operations, what a rule records."""


@cache
def load(path: Path) -> Any:
    """A YAML file."""
    return yaml.safe_load(path.read_text())


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """The rules of a kind, `alert` or `record`, by name."""
    groups = [group for path in RULES for group in load(path)["groups"]]
    return {rule[kind]: rule for group in groups for rule in group["rules"] if kind in rule}


def unit_tests() -> list[dict[str, Any]]:
    """The groups of promtool's unit tests."""
    return [group for path in UNIT_TESTS for group in load(path)["tests"]]


def selectors(promql: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each name in an expression, with its matchers: (label, value), a regular expression's alternatives one by one."""
    found = []
    for name, inside in re.findall(rf"({NAME})(?:{{{{?([^{{}}]*)}})?", promql):
        matchers = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*\\?["\']((?:[^"\'\\])*)', inside)
        found.append((name, [(label, value) for label, values in matchers for value in values.split("|")]))
    return found
