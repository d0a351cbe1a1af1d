"""The engine alone on a standard workload: tokens per second, where a step's time goes, peak memory.

    python -m bench.engine [sharegpt|alpaca] [--limit N] [--repeats K] [--dtype D] [--batch-invariant] [--json OUT]

Generation only is timed; loading and a warm-up are apart. The JSON record carries machine, commit and command with the figures.
"""

import json
import os
import pickle
import resource
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import click

os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # as engine/serve.py; OpenMP reads it when torch loads
import torch

from bench.record import commit, processor
from bench.workload import DIGESTS, SHAPES, WorkItem, make_workload
from engine.config import EngineConfig
from engine.core import Engine
from engine.model import resolve
from engine.model_runner import ModelRunner
from engine.request import Request, SamplingParams

PARTS = ("schedule", "prepare", "forward", "sample", "update", "publish")


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(sorted(SHAPES)), default="alpaca")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--limit", type=int, help="only the first LIMIT requests")
@click.option("--repeats", type=int, default=3, show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--max-slots", type=int, default=64, show_default=True)
@click.option("--kv-blocks", type=int, help="usable KV blocks; default by memory")
@click.option("--batch-invariant", is_flag=True, help="the same bits in any batch")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="write the record to this file")
def main(
    name: str,
    model: str,
    limit: int | None,
    repeats: int,
    dtype: str,
    max_slots: int,
    kv_blocks: int | None,
    batch_invariant: bool,
    json_path: Path | None,
) -> None:
    directory = resolve(model)
    workload = make_workload(name, directory)
    if model == "smollm2-135m-instruct" and workload.digest != DIGESTS[name]:
        click.echo(f"note: digest {workload.digest} is not {DIGESTS[name]}: compare with this Python only", err=True)
    items = workload.items[:limit]
    started = time.perf_counter()
    options = {"dtype": dtype, "max_slots": max_slots, "kv_blocks": kv_blocks, "batch_invariant": batch_invariant}
    runner = ModelRunner(EngineConfig(model=str(directory), max_model_len=2048, **options))
    load_s = time.perf_counter() - started
    run(runner, tuple(WorkItem(item.prompt[:64], 8) for item in items[:8]))
    runs = []
    for repeat in range(repeats):
        runs.append(run(runner, items))
        click.echo(f"run {repeat + 1}/{repeats}: {runs[-1]['output_tokens_per_s']:.1f} output tokens/s", err=True)
    record = {
        "workload": {"name": name, "digest": workload.digest, "requests": len(items)},
        "machine": f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "commit": commit(),
        "command": "python -m bench.engine " + " ".join(sys.argv[1:]),
        "dtype": str(runner.dtype),
        "load_s": load_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "runs": runs,
    }
    _print(record)
    if json_path:
        json_path.write_text(json.dumps(record, indent=1) + "\n")


def run(runner: ModelRunner, items: tuple[WorkItem, ...]) -> dict[str, float | dict[str, float]]:
    """Generate every item greedily to its exact length on a fresh engine; figures of this run."""
    engine = Engine(runner)
    seconds: Counter[str] = Counter()
    slots: Counter[str] = Counter()
    num_steps = num_preemptions = num_output = 0
    started = time.perf_counter()
    for i, item in enumerate(items):
        params = SamplingParams(max_tokens=item.output, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(request_id=str(i), prompt_token_ids=item.prompt, params=params))
    while engine.has_work:
        report = engine.step()
        before = time.perf_counter()
        pickle.dumps(report, pickle.HIGHEST_PROTOCOL)  # what serve.py does before the pipe
        seconds["publish"] += time.perf_counter() - before
        stats = report.stats
        for part in PARTS[:-1]:
            seconds[part] += getattr(stats.times, f"{part}_s")
        for state in ("decode", "prefill", "no_memory", "no_budget", "no_work"):
            slots[state] += getattr(stats.slots, state)
        num_steps += 1
        num_preemptions += stats.num_preemptions
        num_output += stats.num_generated_tokens
    wall_s = time.perf_counter() - started
    wanted = sum(item.output for item in items)
    assert num_output == wanted, f"{num_output} tokens instead of {wanted}"
    return {
        "wall_s": wall_s,
        "output_tokens": num_output,
        "output_tokens_per_s": num_output / wall_s,
        "all_tokens_per_s": (num_output + sum(len(item.prompt) for item in items)) / wall_s,
        "steps": num_steps,
        "preemptions": num_preemptions,
        "step_ms": {part: 1e3 * seconds[part] / num_steps for part in PARTS},
        "slot_steps": dict(slots),
    }


def _print(record: dict) -> None:
    runs = record["runs"]
    speeds = sorted(run["output_tokens_per_s"] for run in runs)
    click.echo(f"{record['workload']}  {record['dtype']}  {record['machine']}  commit {record['commit']}")
    click.echo(f"output tokens/s  median {statistics.median(speeds):.1f}  min {speeds[0]:.1f}  max {speeds[-1]:.1f}")
    middle = sorted(runs, key=lambda run: run["wall_s"])[len(runs) // 2]
    whole = 1e3 * middle["wall_s"] / middle["steps"]
    click.echo(f"steps {middle['steps']}  {whole:.2f} ms each  preemptions {middle['preemptions']}")
    for part, milliseconds in middle["step_ms"].items():
        click.echo(f"  {part:9s} {milliseconds:8.3f} ms  {100 * milliseconds / whole:5.1f} %")
    click.echo(f"slot-steps {middle['slot_steps']}")
    click.echo(f"load {record['load_s']:.1f} s  peak memory {record['peak_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
