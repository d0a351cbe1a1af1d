"""The dashboards of ops/grafana as they are written: what each panel must have, and what must be the same on all of them."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import grafana
from tests.support.grafana import Panel
from tests.support.prometheus import OPS
from tests.support.rules import rules
from worker.metrics import PREFIX, Metrics

BOARDS = grafana.load()
PANELS = [panel for board in BOARDS.values() for panel in grafana.panels(board)]
EXPRESSIONS = [(panel, target) for panel in PANELS for target in panel.targets]
SHOWN = "\n".join(target["expr"] for _, target in EXPRESSIONS)
TITLES = {"Fleet", "Slots and KV", "Queue and delivery", "Latency"}
CHANGING = re.compile(r"\[(?!\$__rate_interval\]|\$__range\])")


def test_checked_in_dashboards_are_what_the_source_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, OPS / "grafana" / "build.py", tmp_path], check=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    checked_in = {path.name: path.read_text() for path in grafana.FOLDER.iterdir()}
    assert written == checked_in, "run `python ops/grafana/build.py`"


def test_four_dashboards_link_to_each_other() -> None:
    assert {board["title"].removeprefix("slotmill / ") for board in BOARDS.values()} == TITLES
    for board in BOARDS.values():
        [link] = board["links"]
        assert link["tags"] == board["tags"] == ["slotmill"]
        assert link["keepTime"]
        assert link["includeVars"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_titles_and_numbers_of_panels_are_unique(board: dict[str, Any]) -> None:
    every = list(grafana.panels(board, rows=True))
    for name in ("id", "title"):
        values = [panel.spec[name] for panel in every]
        assert len(set(values)) == len(values)


@pytest.mark.parametrize("panel", PANELS, ids=str)
def test_a_panel_teaches_has_a_unit_and_asks_the_chosen_prometheus(panel: Panel) -> None:
    assert 40 < len(panel.spec["description"]) < 420
    assert panel.spec["description"].endswith(".")
    axis = panel.spec.get("options", {}).get("yAxis", {})
    assert axis.get("unit") or panel.spec["fieldConfig"]["defaults"]["unit"]
    assert {source["uid"] for source in (panel.spec["datasource"], *(t["datasource"] for t in panel.targets))} == {
        "${datasource}"
    }


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_panels_lie_side_by_side_and_not_on_each_other(board: dict[str, Any]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in grafana.panels(board, rows=True):
        place = panel.spec["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel.spec in board["panels"]:  # those of a closed row come to lie over what is below it
            columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            for cell in product(columns, lines):
                assert taken.setdefault(cell, str(panel)) == str(panel)


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_every_variable_is_used_and_offers_all(board: dict[str, Any]) -> None:
    known = grafana.variables(board)
    text = "\n".join(
        [target["expr"] for p in grafana.panels(board) for target in p.targets] + [str(v["query"]) for v in known.values()]
    )
    for name, variable in known.items():
        assert f"${name}" in text or name == "datasource"
        if variable["type"] == "query":
            assert variable["multi"]
            assert variable["includeAll"]


@pytest.mark.parametrize(("panel", "target"), EXPRESSIONS, ids=lambda value: str(value) if isinstance(value, Panel) else "")
def test_an_expression_leaves_its_interval_to_grafana_and_obeys_the_variables(panel: Panel, target: Mapping[str, Any]) -> None:
    expr = target["expr"]
    assert not CHANGING.search(expr), "an interval of its own"
    assert "ALERTS" in expr or expr.count("$instance") == len(re.findall(rf"{PREFIX}_(?!worker_info{{queue)\w+|\bup{{", expr))
    assert not re.search(r"(rate|increase)\(sum", expr), "a rate of a sum misses resets"


def test_what_all_workers_tell_of_a_queue_is_not_added_up() -> None:
    """The maximum of those that reach the server: others repeat what they last knew."""
    gauge = rf"{PREFIX}_(?:queue_(?!time)\w+|dead_entries){{[^}}]*}}"
    connected = rf"and on \(job, instance\) {PREFIX}_redis_connected{{[^}}]*}} == 1\)"
    told = re.findall(rf"max by \(job, queue(?:, priority)?\) \(\({gauge}(?: - {gauge})? {connected}", SHOWN)
    assert len(re.findall(gauge, "\n".join(told))) == len(re.findall(gauge, SHOWN)) > 0


def test_states_that_are_drawn_one_by_one_are_drawn_all() -> None:
    """A state that the registry gains would be missing from its chart."""
    drawn: dict[tuple[str, str], set[str]] = {}
    for name, label, value in re.findall(rf'({PREFIX}_\w+){{[^}}]*\$instance", (\w+)="(\w+)"', SHOWN):
        drawn.setdefault((name, label), set()).add(value)
    exported = _label_values()
    for (name, label), values in drawn.items():
        assert values <= exported[name, label]
        if name not in ("slotmill_refused_total", "slotmill_jobs_finished_total"):
            assert values == exported[name, label], f"{name} by {label}"


def test_a_state_has_the_same_colour_wherever_it_is_shown() -> None:
    colours: dict[str, set[str]] = {}
    for panel in PANELS:
        for override in panel.spec["fieldConfig"]["overrides"]:
            for prop in override["properties"]:
                if override["matcher"]["id"] == "byName" and prop["id"] == "color":
                    colours.setdefault(override["matcher"]["options"], set()).add(prop["value"]["fixedColor"])
    assert not {name: found for name, found in colours.items() if len(found) > 1}


@pytest.mark.parametrize("panel", [panel for panel in PANELS if panel.spec["type"] == "heatmap"], ids=str)
def test_a_heatmap_shows_its_numbers_and_leaves_the_turn_of_its_colours_to_the_theme(panel: Panel) -> None:
    """Grafana turns this scheme itself on a light page: turned by us, few would be drawn as many."""
    assert panel.spec["options"]["tooltip"]["show"]
    assert not panel.spec["options"]["color"]["reverse"]


def test_a_fleet_that_is_gone_is_not_shown_as_it_last_was() -> None:
    """A series that has ended keeps its last value on the panel: these have to go on without it."""
    texts = {
        panel.spec["title"]: panel.targets[0]["expr"] for panel in PANELS if panel.board == "slotmill-fleet" and panel.targets
    }
    for title in ("Workers that serve", "Tokens made", "Alerts firing", "Workers not scraped"):
        assert texts[title].endswith("or vector(0)")


def test_ages_have_their_colours_where_the_alert_fires() -> None:
    limits = dict(re.findall(r'{priority="(\w+)"} > (\d+)', rules("alert")["SlotmillBacklogOld"]["expr"]))
    panels = [panel.spec["fieldConfig"]["defaults"] for panel in PANELS if panel.spec["title"] == "Oldest job waits"]
    shown = [[step["value"] for step in defaults["thresholds"]["steps"]] for defaults in panels]
    assert shown == 2 * [[None, int(limits["normal"]), int(limits["low"])]]


def test_a_mark_says_what_started() -> None:
    for board in BOARDS.values():
        [mark] = board["annotations"]["list"]
        assert {"instance", "engine"} == set(re.findall(r"{{(\w+)}}", mark["titleFormat"]))


def test_colours_are_those_that_colour_blind_people_tell_apart() -> None:
    """The palette of Okabe and Ito, https://jfly.uni-koeln.de/color/, and grey."""
    palette = {"#009E73", "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#999999"}
    assert set(re.findall(r'"(#\w{6})"', json.dumps(list(BOARDS.values())))) <= palette


def test_provisioning_knows_the_scrape_interval() -> None:
    [source] = yaml.safe_load((OPS / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    scraped = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    assert source["type"] == "prometheus"


def _label_values() -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for family in Metrics().registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                found.setdefault((sample.name, label), set()).add(value)
    return found
