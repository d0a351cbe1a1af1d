"""What each knob of docs/tuning.md does, one sweep for each, on the engine alone.

    python -m bench.tuning [--limit N] [--repeats K] [--json OUT]

All else stays at its default but what a sweep fixes: reservations are compared in a cache too small for all slots.
"""

import time
from pathlib import Path
from statistics import quantiles
from typing import Any, Final, NamedTuple

import click

from bench.engine import generate, requests_of  # first: it sets what OpenMP reads when torch loads
from bench.figures import spread
from bench.record import json_option, record, save
from bench.workload import WorkItem, make_workload
from engine.config import EngineConfig
from engine.core import Engine
from engine.model import resolve
from engine.model_runner import ModelRunner

MODEL: Final = "smollm2-135m-instruct"


class Sweep(NamedTuple):
    """Values of one field of `EngineConfig`, on the first requests of a workload, with other fields fixed."""

    field: str
    values: tuple[int | str, ...]
    workload: str
    limit: int
    fixed: dict[str, Any]


SWEEPS: Final = (
    Sweep("max_slots", (4, 16, 64), "alpaca", 64, {}),
    Sweep("token_budget", (64, 256, 2048), "sharegpt", 12, {}),
    Sweep("block_size", (8, 16, 64, 256), "alpaca", 48, {}),
    Sweep("reservation", ("paged", "ratio", "declared", "max"), "alpaca", 48, {"kv_blocks": 192, "max_model_len": 1024}),
)


@click.command(help=__doc__)
@click.option("--limit", type=int, help="only the first LIMIT requests of each sweep")
@click.option("--repeats", type=int, default=2, show_default=True)
@json_option
def main(limit: int | None, repeats: int, json_path: Path | None) -> None:
    directory = resolve(MODEL)
    rows = []
    for sweep in SWEEPS:
        items = make_workload(sweep.workload, directory).items[: min(sweep.limit, limit or sweep.limit)]
        for value in sweep.values:
            options = {"max_model_len": 2048, "max_slots": 64, **sweep.fixed, sweep.field: value}
            rows.append({"field": sweep.field, "value": value, **measure(str(directory), options, items, repeats)})
            click.echo(f"{sweep.field} {value}: {rows[-1]['output_tokens_per_s']['median']:.1f} output tokens/s", err=True)
    sweeps = [{"field": sweep.field, "workload": sweep.workload, "fixed": sweep.fixed} for sweep in SWEEPS]
    save(record("tuning", model=MODEL, sweeps=sweeps, rows=rows), json_path)


def measure(directory: str, options: dict[str, Any], items: tuple[WorkItem, ...], repeats: int) -> dict[str, Any]:
    """Figures of an engine with these options, after a warm-up."""
    runner = ModelRunner(EngineConfig(model=directory, **options))
    _run(runner, tuple(WorkItem(item.prompt[:64], 4) for item in items[:4]))
    runs = [_run(runner, items) for _ in range(repeats)]
    return {
        "requests": len(items),
        "output_tokens_per_s": spread([run["output_tokens_per_s"] for run in runs]),
        "step_p99_ms": spread([run["step_p99_ms"] for run in runs]),
        "no_memory": runs[0]["no_memory"],
        "preemptions": runs[0]["preemptions"],
    }


def _run(runner: ModelRunner, items: tuple[WorkItem, ...]) -> dict[str, float]:
    started = time.perf_counter()
    stats = [report.stats for report in generate(Engine(runner), requests_of(items))]
    wall_s = time.perf_counter() - started
    return {
        "output_tokens_per_s": sum(step.num_generated_tokens for step in stats) / wall_s,
        "step_p99_ms": 1e3 * quantiles([step.times.total_s for step in stats], n=100, method="inclusive")[98],
        "no_memory": sum(step.slots.no_memory for step in stats) / sum(step.slots.total for step in stats),
        "preemptions": sum(step.num_preemptions for step in stats),
    }


if __name__ == "__main__":
    main()
