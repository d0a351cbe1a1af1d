"""Plots of the records: throughput against batch size, latency against rate. matplotlib draws; nothing else needs it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from bench.report import PICTURES

Record = dict[str, Any]


def draw(records: Sequence[Record], directory: Path) -> Iterator[Path]:
    """Write the plots that there are records for, as SVG; their paths."""
    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "slotmill"  # else the ids in a drawing differ each time
    batches = [record for record in records if record["kind"] == "batches"]
    rates = [record for record in records if record["kind"] == "open"]
    if batches:
        yield _throughput(batches, directory / PICTURES["batches"][0])
    if rates:
        yield _latency(rates, directory / PICTURES["open"][0])


def _throughput(records: Sequence[Record], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(6, 4))
    for record in records:
        found = record["output_tokens_per_s"]
        sizes = [int(size) for size in found]
        middle = [speed["median"] for speed in found.values()]
        bars = [[row["median"] - row["min"] for row in found.values()], [row["max"] - row["median"] for row in found.values()]]
        label = " ".join([record["dtype"], *(f"{name} {value}" for name, value in record["options"].items())])
        axes.errorbar(sizes, middle, yerr=bars, marker="o", capsize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="sequences that decode together", ylabel="output tokens/s", ylim=(0, None))
    return _saved(figure, axes, path)


def _latency(records: Sequence[Record], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(6, 4))
    for record in records:
        rates = [row["rate"] for row in record["rates"]]
        for share, style in (("p50", "o-"), ("p99", "o--")):
            label = f"{record['workload']['name']}, first token, {share}"
            axes.plot(rates, [row["ttft_s"][share] for row in record["rates"]], style, label=label)
    axes.set(xlabel="requests/s", ylabel="seconds to the first token", yscale="log")
    return _saved(figure, axes, path)


def _saved(figure: Any, axes: Any, path: Path) -> Path:
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
