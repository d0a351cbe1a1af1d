"""Tables and plots from the records in bench/results: what README.md and bench/README.md say of speed comes from here alone.

    python -m bench.report [--no-plots]

The text between the markers of both pages is replaced. The README has one row for each claim, bench/README.md all of them with
machine, commit and command. A record that is not there leaves its rows out. Records of one kind and workload are told apart by
their files' names; of those that answer the same question the last by date is taken. Plots need matplotlib
(`pip install -e '.[bench]'`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from bench.record import RESULTS

ROOT: Final = Path(__file__).parents[1]
TUNING: Final = ROOT / "docs" / "tuning.md"
PAGES: Final = (ROOT / "README.md", ROOT / "bench" / "README.md")
BEGIN: Final = "<!-- figures: begin (make bench-report) -->"
END: Final = "<!-- figures: end -->"
NOTHING: Final = "No record has been kept yet."

Record = dict[str, Any]


class Row(NamedTuple):
    """A line of a table: what was measured, the figure with its spread, where."""

    what: str
    figure: str
    record: Record


@click.command(help=__doc__)
@click.option("--plots/--no-plots", default=True, show_default=True)
def main(*, plots: bool) -> None:
    records = read(RESULTS)
    for page in PAGES:
        page.write_text(filled(page.read_text(), tables(records, is_short=page == PAGES[0])))
    TUNING.write_text(filled(TUNING.read_text(), knobs(records)))
    if plots:
        from bench.plots import draw

        for path in draw(records, RESULTS):
            click.echo(path)


def read(directory: Path) -> list[Record]:
    """The records in a directory, by file name; each with `file`, its name."""
    return [json.loads(path.read_text()) | {"file": path.name} for path in sorted(directory.glob("*.json"))]


def filled(page: str, text: str) -> str:
    """The page with this text between the markers. `ValueError` when they are not there once, in order."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in before + after:
        raise ValueError(f"page: needs one pair of markers, {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def tables(records: Sequence[Record], *, is_short: bool) -> str:
    """Markdown: the rows of all records, and under them where they were made."""
    shown = [record for record in _latest(records) if record["kind"] in (IN_README if is_short else ROWS)]
    rows = [row for record in shown for row in ROWS[record["kind"]](record)]
    if not rows:
        return f"{NOTHING}\n"
    if is_short:
        head = ["| what | measured |", "|---|---|"]
        return "\n".join([*head, *(f"| {row.what} | {row.figure} |" for row in rows), "", _short_origin(rows), ""])
    head = ["| what | measured | record |", "|---|---|---|"]
    lines = [f"| {row.what} | {row.figure} | {row.record['file']} |" for row in rows]
    kinds = {record["kind"] for record in shown}
    pictures = [f"![{title}](results/{file})" for kind, (file, title) in PICTURES.items() if kind in kinds]
    return "\n".join([*head, *lines, "", *_origins(rows), "", *pictures, *([""] if pictures else [])])


def knobs(records: Iterable[Record]) -> str:
    """Markdown: what each value of each knob gave, by the last record of `bench.tuning`."""
    found = [record for record in _latest(records) if record["kind"] == "tuning"]
    if not found:
        return f"{NOTHING}\n"
    made = found[-1]
    lines = [
        "| option | requests | output tokens/s | step, 99th percentile | slots without memory | preemptions |",
        "|---|---|---|---|---|---|",
    ]
    for row in made["rows"]:
        speed, step = _spread(row["output_tokens_per_s"], 1), _spread(row["step_p99_ms"], 1, " ms")
        option = f"`--{row['field'].replace('_', '-')} {row['value']}`"
        lines.append(
            f"| {option} | {row['requests']} | {speed} | {step} | {100 * row['no_memory']:.1f} % | {row['preemptions']} |"
        )
    where = made["machine"]
    return "\n".join(
        [*lines, "", f"({made['model']}, {where['processor']}, {where['commit']}, {where['date']}: `{where['command']}`.)", ""]
    )


def _latest(records: Iterable[Record]) -> list[Record]:
    """Of records that answer the same question the last by date, then by file name; in the order of `ROWS`."""
    found: dict[tuple[object, ...], Record] = {}
    for record in sorted(records, key=lambda record: (record["machine"]["date"], record["file"])):
        question = (record["kind"], record.get("workload", {}).get("name"), record.get("dtype"), str(record.get("options")))
        found[question] = record
    order = {kind: place for place, kind in enumerate(ROWS)}
    return sorted(found.values(), key=lambda record: (order.get(record["kind"], len(order)), record["file"]))


def _short_origin(rows: Sequence[Row]) -> str:
    machines = dict.fromkeys(f"{row.record['machine']['processor']}, {row.record['machine']['date']}" for row in rows)
    return f"({'; '.join(machines)}. Commands, settings and spread: [bench](bench/README.md).)"


def _origins(rows: Sequence[Row]) -> list[str]:
    lines = ["| record | machine | cores of others, at most | commit, date | command |", "|---|---|---|---|---|"]
    for record in {row.record["file"]: row.record for row in rows}.values():
        at = record["machine"]
        machine = f"{at['processor']}, {at['memory']}, torch {at['torch']}"
        busy = max(_others(record), default=None)
        others = "not measured" if busy is None else f"{busy:.2f}"
        lines.append(f"| {record['file']} | {machine} | {others} | {at['commit']}, {at['date']} | `{at['command']}` |")
    return lines


def _others(part: Any) -> Iterator[float]:
    """What each run of a record says of the cores that others used."""
    if isinstance(part, dict):
        if "others" in part:
            yield part["others"]
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from _others(inner)


def _work(record: Record) -> str:
    work = record["workload"]
    cut = f" cut to {work['cap']} tokens" if work.get("cap") else ""
    return f"{work['name']}, {work['requests']} requests{cut}"


def _spread(figures: dict[str, float], digits: int, unit: str = "") -> str:
    low, high = figures["min"], figures["max"]
    return f"{figures['median']:,.{digits}f}{unit} ({low:,.{digits}f} to {high:,.{digits}f})"


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name not in ("max_len", "max_model_len"))


def _peers(record: Record) -> list[Row]:
    rows = []
    for side, made in record["sides"].items():
        about = f"{_work(record)}: {side} ({_settings(made['settings'])}), tokens/s"
        rows.append(Row(about, _spread(made["output_tokens_per_s"], 1), record))
    for peer, found in record["ratios"].items():
        rows.append(Row(f"{_work(record)}: slotmill / {peer}", _spread(found, 2), record))
    return rows


def _engine(record: Record) -> list[Row]:
    about = f"{_work(record)}, {record['dtype']}{_with(record)}"
    return [
        Row(f"{about}: engine alone, output tokens/s", _spread(record["output_tokens_per_s"], 1), record),
        Row(f"{about}: time of the loop in forward and sample", _percent(record["in_kernels"]), record),
        Row(f"{about}: peak memory", f"{record['peak_mib']:,.0f} MiB", record),
    ]


def _with(record: Record) -> str:
    return f", {_settings(record['options'])}" if record.get("options") else ""


def _percent(figures: dict[str, float]) -> str:
    return _spread({name: 100 * value for name, value in figures.items()}, 1, " %")


def _batches(record: Record) -> list[Row]:
    found = record["output_tokens_per_s"]
    return [
        Row(f"{size} sequences, {record['dtype']}{_with(record)}: tokens/s", _spread(speed, 1), record)
        for size, speed in found.items()
    ]


def _closed(record: Record) -> list[Row]:
    return [Row(f"{_work(record)}: through the queue / engine alone", _spread(record["ratio"], 3), record)]


def _open(record: Record) -> list[Row]:
    rows = []
    for row in record["rates"]:
        ttft, itl = row["ttft_s"], row["itl_s"]
        first = f"first token {ttft['p50']:.2f} s (p90 {ttft['p90']:.2f}, p99 {ttft['p99']:.2f})"
        between = f"between {1e3 * itl['p50']:.0f} ms (p99 {1e3 * itl['p99']:.0f})"
        note = ", waits grow" if row["is_saturated"] else ""
        about = f"{_work(record)}, {row['rate']:g} requests/s"
        rows.append(Row(about, f"{row['output_tokens_per_s']:.1f} tokens/s, {first}, {between}{note}", record))
    return rows


def _cold_start(record: Record) -> list[Row]:
    return [
        Row(f"start of the {side} to its first token, model cached", _spread(taken, 2, " s"), record)
        for side, taken in record["first_token_s"].items()
    ]


def _metrics(record: Record) -> list[Row]:
    rows = []
    for size, found in record["sizes"].items():
        step_s, counted_s = found["step_s"]["median"], found["counted_s"]["median"]
        figure = f"{1e6 * counted_s:.0f} us, {100 * counted_s / step_s:.4f} % of its {1e3 * step_s:.0f} ms"
        rows.append(Row(f"counting a step of {size} sequences, {record['dtype']}", figure, record))
    return rows


def _kernels(record: Record) -> list[Row]:
    rows = []
    for dtype, made in record["dtypes"].items():
        for row in made["products"]:
            share = row["gflop_per_s"] / made["peak_gflop_per_s"]
            figure = (
                f"{1e3 * row['seconds']['median']:.1f} ms, {row['gflop_per_s']:.0f} GFLOP/s, {100 * share:.0f} % of the peak"
            )
            rows.append(Row(f"products of a step, {row['rows']} rows, {dtype}: {row['side']}", figure, record))
        for row in made["attention"]:
            speed = f"{row['gb_per_s']:.1f} GB/s" if row["case"] == "decode" else f"{row['gflop_per_s']:.0f} GFLOP/s"
            figure = f"{1e3 * row['seconds']['median']:.2f} ms a layer, {speed}"
            rows.append(Row(f"attention, {row['case']}, {dtype}: {row['side']}", figure, record))
    return rows


def _accuracy(record: Record) -> list[Row]:
    (first_name, first), *others = record["perplexity"].items()
    rows = [Row(f"perplexity of {text}, {first_name}", f"{value:.3f}", record) for text, value in first.items()]
    for config, found in others:
        for text, value in found.items():
            rows.append(
                Row(f"perplexity of {text}, {config}", f"{value:.3f} ({100 * (value / first[text] - 1):+.2f} %)", record)
            )
    return rows


ROWS: Final[dict[str, Callable[[Record], list[Row]]]] = {
    "peers": _peers,
    "engine": _engine,
    "closed": _closed,
    "open": _open,
    "batches": _batches,
    "cold_start": _cold_start,
    "kernels": _kernels,
    "metrics": _metrics,
    "accuracy": _accuracy,
}
"""Kind of record -> its rows; in this order they are shown."""
PICTURES: Final = {
    "batches": ("throughput.svg", "output tokens per second against the number of sequences"),
    "open": ("latency.svg", "seconds to the first token against requests per second"),
}
"""Kind of record -> the plot that bench/plots.py makes of it, and what it shows."""
IN_README: Final = ("peers", "engine", "closed", "cold_start", "accuracy")


if __name__ == "__main__":
    main()
