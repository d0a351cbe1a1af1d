"""A dashboard from its rows: variables, links to the other three, marks where an engine started, and the order on the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.models import dashboard as models

from source.palette import BLUE
from source.panels import DATASOURCE
from source.promql import selected

TAG = "slotmill"


@dataclass(frozen=True)
class Row:
    """A question and the panels that answer it; details are closed until asked for."""

    question: str
    panels: Sequence[Any]
    is_closed: bool = False


def board(uid: str, title: str, description: str, rows: Sequence[Row]) -> models.Dashboard:
    """The dashboard, its panels numbered from 1 in their order."""
    made = (
        grafana.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_links())
        .annotation(_EngineStarts())
    )
    for variable in (
        _datasource(),
        _choice("job", "", "Job"),
        _choice("queue", '{job=~"$job"}', "Queue"),
        _choice("instance", '{job=~"$job", queue=~"$queue"}', "Worker"),
    ):
        made.with_variable(variable)
    number = 0
    for row in rows:
        number += 1
        header = grafana.Row(row.question).id(number)
        for panel in row.panels:
            number += 1
            panel.id(number)
            if row.is_closed:
                header.with_panel(panel)
        made.with_row(header)
        if not row.is_closed:
            for panel in row.panels:
                made.with_panel(panel)
    return made.build()


def _links() -> grafana.DashboardLink:
    """To every dashboard of ours, at the same time and with the same choices."""
    link = grafana.DashboardLink("Dashboards").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(False).include_vars(True).keep_time(True)


class _Mark(models.AnnotationQuery):
    """Says which engine it was when it is pointed at; Grafana's types leave out what only Prometheus has."""

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"titleFormat": "Engine {{engine}} of {{instance}} started"}


class _EngineStarts(grafana.AnnotationQuery):
    """A mark in every panel where an engine came up: what looks odd there has its reason."""

    def build(self) -> models.AnnotationQuery:
        starts = f"sum by (instance, engine) (increase({selected('engine_starts_total')}[$__rate_interval])) > 0"
        return _Mark("Engine starts", DATASOURCE, icon_color=BLUE, expr=starts)


def _datasource() -> grafana.DatasourceVariable:
    return grafana.DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def _choice(label: str, selector: str, title: str) -> grafana.QueryVariable:
    """All values that a label of worker_info had in the range shown."""
    return (
        grafana.QueryVariable(label)
        .label(title)
        .datasource(DATASOURCE)
        .query(f"label_values(slotmill_worker_info{selector}, {label})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )
