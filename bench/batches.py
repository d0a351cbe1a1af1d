"""Throughput against batch size: so many sequences decode together, all of one length.

    python -m bench.batches [--batches 1,2,4,8,16,32,64] [--tokens N] [--option FIELD=VALUE,...] [--repeats K] [--json OUT]

The prompts are the first 64 tokens of those of the sharegpt workload. Sizes take turns.
"""

import os
from pathlib import Path

import click

os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # as engine/serve.py; OpenMP reads it when torch loads

from bench.engine import run
from bench.figures import spread
from bench.record import engine_options, json_option, record, save
from bench.workload import WorkItem, make_workload
from engine.config import EngineConfig
from engine.model import resolve
from engine.model_runner import ModelRunner


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--batches", default="1,2,4,8,16,32,64", show_default=True)
@click.option("--tokens", type=int, default=64, show_default=True, help="output of each sequence")
@click.option("--option", "more", default="", metavar="FIELD=VALUE,...", help="fields of EngineConfig")
@click.option("--repeats", type=int, default=3, show_default=True)
@json_option
def main(model: str, batches: str, tokens: int, more: str, repeats: int, json_path: Path | None) -> None:
    directory = resolve(model)
    prompts = [(item.prompt * 64)[:64] for item in make_workload("sharegpt", directory).items]
    sizes = [int(size) for size in batches.split(",")]
    options = {"max_slots": max(sizes), "max_model_len": 2048, "prefix_caching": False} | engine_options(more)
    runner = ModelRunner(EngineConfig(model=str(directory), **options))
    items = [WorkItem(prompts[place % len(prompts)], tokens) for place in range(max(sizes))]
    run(runner, tuple(items[:2]))
    speeds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            speeds[size].append(run(runner, tuple(items[:size]))["output_tokens_per_s"])
    made = {str(size): spread(found) for size, found in speeds.items()}
    for size, found in made.items():
        click.echo(f"{size:>4s} sequences  {found['median']:8.1f} tokens/s  ({found['min']:.1f} to {found['max']:.1f})")
    dtype = str(runner.dtype).removeprefix("torch.")
    save(record("batches", dtype=dtype, options=engine_options(more), output_tokens_per_s=made), json_path)


if __name__ == "__main__":
    main()
