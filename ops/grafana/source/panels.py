"""Panels: one function for each kind, so that all of a kind look and behave alike.

Each takes title, what to teach about it, unit, and its queries, and returns a builder of Grafana's types, sized on a grid of 24
columns. Leaves expressions to `promql`, colours to `palette`, rows and variables to `board`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as grafana
from grafana_foundation_sdk.models import common as choices
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmaps
from grafana_foundation_sdk.models import prometheus as queries

from source.palette import GREEN, SKY, VERMILLION, State

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

RATIO = "percentunit"
SECONDS = "s"
COUNT = "short"
BYTES = "bytes"
BYTES_PER_S = "binBps"
TOKENS = "count:tokens"
TOKENS_PER_S = "count:tok/s"
PER_S = "cps"
PER_MIN = "cpm"
DASHED = (8, 6)


@dataclass(frozen=True)
class Query:
    """An expression, what its line is called, and how it is drawn where that has a meaning."""

    expr: str
    legend: str
    colour: str | None = None
    dash: tuple[int, ...] = ()


def by_state(states: Iterable[State], expression: Any) -> list[Query]:
    """A query for each state; `expression` makes one of a label's value."""
    return [Query(expression(state.value), state.words, state.colour) for state in states]


def stats(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    limits: Sequence[tuple[float | None, str]],
    is_over_range: bool = False,
    decimals: float | None = None,
    width: int = 4,
) -> stat.Panel:
    """One number; `limits` are colours from a value on. `is_over_range` where the expression covers the range by itself."""
    graph = choices.BigValueGraphMode.NONE if is_over_range else choices.BigValueGraphMode.AREA
    panel = (
        _begun(stat.Panel(), title, description, width, 4)
        .unit(unit)
        .graph_mode(graph)
        .color_mode(choices.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .thresholds(_thresholds(limits))
    )
    if decimals is not None:
        panel.decimals(decimals)
    return panel.with_target(_target("A", expr, title, is_instant=is_over_range))


def lines(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    states: Iterable[State] = (),
    top: float | None = None,
    width: int = 12,
    height: int = 8,
) -> timeseries.Panel:
    """Lines over time. `states` colour those whose name holds a state's value."""
    panel = _begun(timeseries.Panel(), title, description, width, height).unit(unit).min(0)
    panel.line_width(2).fill_opacity(0).show_points(choices.VisibilityMode.NEVER)
    panel.legend(_legend()).tooltip(_tooltip())
    panel.color_scheme(grafana.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    if top is not None:
        panel.max(top)
    for state in states:
        panel.override_by_regexp(f"/\\b{state.value}\\b/", [_fixed(state.colour)])
    for ref_id, query in zip(ascii_uppercase, queries, strict=False):
        panel.with_target(_target(ref_id, query.expr, query.legend))
        style = [_fixed(query.colour)] if query.colour else []
        if query.dash:
            style.append(models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": list(query.dash)}))
        if style and "}}" in query.legend:
            panel.override_by_regexp(f"/{query.legend.rpartition('}}')[2]}$/", style)
        elif style:
            panel.override_by_name(query.legend, style)
    return panel


def stack(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    top: float | None = None,
    width: int = 12,
    height: int = 8,
) -> timeseries.Panel:
    """Areas on top of each other, in the order of the queries."""
    panel = lines(title, description, unit, queries, top=top, width=width, height=height)
    panel.stacking(common.StackingConfig().mode(choices.StackingMode.NORMAL).group("A"))
    return panel.fill_opacity(70).line_width(1)


def heat(title: str, description: str, unit: str, expr: str, *, width: int = 12, height: int = 8) -> heatmap.Panel:
    """A histogram over time: the more, the brighter on a dark page and the darker on a light one, by Grafana's own turn."""
    colour = heatmap.HeatmapColorOptions().mode(heatmaps.HeatmapColorMode.SCHEME).scheme("Viridis").steps(64).reverse(False)
    return (
        _begun(heatmap.Panel(), title, description, width, height)
        .calculate(False)
        .color(colour)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_values(heatmap.CellValues().unit(PER_S))
        .cell_gap(1)
        .show_tooltip()
        .with_target(_target("A", expr, "{{le}}").format(queries.PromQueryFormat.HEATMAP))
    )


def timeline(title: str, description: str, query: Query) -> statetimeline.Panel:
    """One bar for each series that is 1 or 0."""
    words = models.ValueMap(
        {
            "1": models.ValueMappingResult(text="up", color=GREEN, index=0),
            "0": models.ValueMappingResult(text="down", color=VERMILLION, index=1),
        }
    )
    return (
        _begun(statetimeline.Panel(), title, description, 12, 8)
        .unit("none")
        .mappings([words])
        .show_value(choices.VisibilityMode.AUTO)
        .merge_values(True)
        .legend(_legend())
        .with_target(_target("A", query.expr, query.legend))
    )


@dataclass(frozen=True)
class Column:
    """A column of a table: a label, or the value of a query."""

    title: str
    unit: str
    expr: str
    label: str | None = None
    mappings: tuple[State, ...] = ()


def rows_of(title: str, description: str, columns: Sequence[Column], *, link: str) -> table.Panel:
    """A table with a row for each worker; queries of one expression are sent once. `link` is where a worker's name leads."""
    panel = _begun(table.Panel(), title, description, 24, 9).unit("none").show_header(True)
    refs = dict(zip(dict.fromkeys(column.expr for column in columns), ascii_uppercase, strict=False))
    for expr, ref in refs.items():
        panel.with_target(_target(ref, expr, "", is_instant=True).format(queries.PromQueryFormat.TABLE))
    names = {column.label or f"Value #{refs[column.expr]}": column for column in columns}
    hidden = {"Time": True} | {f"Value #{ref}": True for ref in refs.values() if f"Value #{ref}" not in names}
    layout = {
        "excludeByName": hidden,
        "indexByName": {name: index for index, name in enumerate(names)},
        "renameByName": {name: column.title for name, column in names.items()},
    }
    panel.with_transformation(models.DataTransformerConfig("merge", options={}))
    panel.with_transformation(models.DataTransformerConfig("organize", options=layout))
    for column in columns:
        panel.override_by_name(column.title, _column_style(column, link))
    return panel


def _column_style(column: Column, link: str) -> list[models.DynamicConfigValue]:
    style = [models.DynamicConfigValue("unit", column.unit)]
    if column.label == "instance":
        style.append(models.DynamicConfigValue("links", [{"title": "Slots and KV of this worker", "url": link}]))
    if column.unit == RATIO:
        style += [
            models.DynamicConfigValue("min", 0),
            models.DynamicConfigValue("max", 1),
            models.DynamicConfigValue("custom.cellOptions", {"type": "gauge", "mode": "basic"}),
            _fixed(SKY),
        ]
    if column.mappings:
        words = {state.value: {"text": state.words, "color": state.colour} for state in column.mappings}
        style += [
            models.DynamicConfigValue("mappings", [{"type": "value", "options": words}]),
            models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
        ]
    return style


def _begun(panel: Any, title: str, description: str, width: int, height: int) -> Any:
    return panel.title(title).description(description).datasource(DATASOURCE).span(width).height(height)


def _target(ref_id: str, expr: str, legend: str, *, is_instant: bool = False) -> prometheus.Dataquery:
    query = prometheus.Dataquery().ref_id(ref_id).expr(expr).legend_format(legend).datasource(DATASOURCE)
    query.editor_mode(queries.QueryEditorMode.CODE)
    return query.instant() if is_instant else query.range()


def _thresholds(limits: Sequence[tuple[float | None, str]]) -> grafana.ThresholdsConfig:
    steps = [models.Threshold(value=value, color=colour) for value, colour in limits]
    return grafana.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _fixed(colour: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().display_mode(choices.LegendDisplayMode.LIST).show_legend(True)
    return legend.placement(choices.LegendPlacement.BOTTOM)


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(choices.TooltipDisplayMode.MULTI).sort(choices.SortOrder.DESCENDING)
