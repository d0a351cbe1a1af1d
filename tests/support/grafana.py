"""The dashboards of ops/grafana as Grafana would read them: panels, targets, and expressions with their variables replaced.

Relies on a Prometheus for the values of variables. Grafana itself is not needed: what it does to an expression is short and
documented (https://grafana.com/docs/grafana/latest/datasources/prometheus/template-variables/).
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.prometheus import OPS, SCRAPE_S, Prometheus

FOLDER = OPS / "grafana" / "dashboards"
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")
_SPECIAL = re.compile(r"[\\^$*+?.()|\[\]{}]")


@dataclass(frozen=True)
class Panel:
    """One panel, row or not, and the dashboard that it stands on."""

    board: str
    spec: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.board} / {self.spec['title']}"

    @property
    def targets(self) -> list[Mapping[str, Any]]:
        return list(self.spec.get("targets", ()))


def load() -> dict[str, dict[str, Any]]:
    """All dashboards by uid."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def panels(board: Mapping[str, Any], *, rows: bool = False) -> Iterator[Panel]:
    """All panels of a dashboard, those of closed rows too."""
    for spec in board["panels"]:
        if spec["type"] != "row" or rows:
            yield Panel(board["uid"], spec)
        for inner in spec.get("panels", ()):
            yield Panel(board["uid"], inner)


def variables(board: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By name, in the order in which they depend on each other."""
    return {variable["name"]: variable for variable in board["templating"]["list"]}


def choose_all(board: Mapping[str, Any], prometheus: Prometheus, start: float, end: float) -> dict[str, str]:
    """What Grafana puts in place of each variable while All is chosen, and of its own; each query of a variable is run."""
    range_s = max(1, round(end - start))
    chosen = {"__rate_interval": f"{4 * SCRAPE_S}s", "__range": f"{range_s}s"}
    for name, variable in variables(board).items():
        if variable["type"] == "query":
            query = _LABEL_VALUES.fullmatch(variable["query"])
            assert query, f"{name}: {variable['query']} is not label_values(selector, label)"
            values = prometheus.label_values(query["label"], replace(query["selector"], chosen), start, end)
            assert values, f"{name}: {variable['query']} has no values"
            chosen[name] = "(" + "|".join(map(_escaped, values)) + ")"
    return chosen


def replace(text: str, chosen: Mapping[str, str]) -> str:
    """The text with its variables replaced. AssertionError when one is left."""
    for name in sorted(chosen, key=len, reverse=True):
        text = text.replace(f"${name}", chosen[name])
    assert not re.search(r"\$\w*[a-z]{2}", text), f"{text}: a variable that does not exist"
    return text


def _escaped(value: str) -> str:
    """As Grafana does for a regular expression inside a string of PromQL."""
    return _SPECIAL.sub(lambda match: f"\\\\{match[0]}", value)
