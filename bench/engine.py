"""The engine alone on a standard workload: tokens per second, where a step's time goes, peak memory.

    python -m bench.engine [sharegpt|alpaca] [--limit N] [--repeats K] [--dtype D] [--option FIELD=VALUE,...] [--json OUT]

Generation only is timed; loading and a warm-up are apart. `in kernels` is the share of the loop's time in forward and sample,
the parts that compute; what is left is the price of deciding, of preparing tensors, of recording and of telling.
"""

import os
import pickle
import resource
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # as engine/serve.py; OpenMP reads it when torch loads

from bench.figures import spread
from bench.meter import Meter
from bench.record import engine_options, json_option, record, save
from bench.workload import DIGESTS, SHAPES, WorkItem, make_workload
from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import StepReport
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
@click.option("--option", "more", default="", metavar="FIELD=VALUE,...", help="more fields of EngineConfig")
@json_option
def main(
    name: str,
    model: str,
    limit: int | None,
    repeats: int,
    dtype: str,
    max_slots: int,
    kv_blocks: int | None,
    batch_invariant: bool,
    more: str,
    json_path: Path | None,
) -> None:
    directory = resolve(model)
    workload = make_workload(name, directory)
    if model == "smollm2-135m-instruct" and workload.digest != DIGESTS[name]:
        click.echo(f"note: digest {workload.digest} is not {DIGESTS[name]}: compare with this Python only", err=True)
    items = workload.items[:limit]
    options = {"dtype": dtype, "max_slots": max_slots, "kv_blocks": kv_blocks, "batch_invariant": batch_invariant}
    options |= engine_options(more)
    started = time.perf_counter()
    runner = ModelRunner(EngineConfig(model=str(directory), max_model_len=2048, **options))
    load_s = time.perf_counter() - started
    run(runner, tuple(WorkItem(item.prompt[:64], 8) for item in items[:8]))
    runs = []
    for repeat in range(repeats):
        runs.append(run(runner, items))
        click.echo(f"run {repeat + 1}/{repeats}: {runs[-1]['output_tokens_per_s']:.1f} output tokens/s", err=True)
    made = record(
        "engine",
        workload={"name": name, "digest": workload.digest, "requests": len(items)},
        dtype=str(runner.dtype).removeprefix("torch."),
        options=engine_options(more),
        load_s=load_s,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        output_tokens_per_s=spread([run["output_tokens_per_s"] for run in runs]),
        in_kernels=spread([run["in_kernels"] for run in runs]),
        runs=runs,
    )
    _print(made)
    save(made, json_path)


def requests_of(items: Iterable[WorkItem]) -> Iterator[Request]:
    """Greedy requests of exact lengths, called by their places."""
    for place, item in enumerate(items):
        params = SamplingParams(max_tokens=item.output, temperature=0.0, ignore_eos=True)
        yield Request(request_id=str(place), prompt_token_ids=item.prompt, params=params)


def generate(engine: Engine, requests: Iterable[Request]) -> Iterator[StepReport]:
    """Everything that the engine says until nothing is left to do."""
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        yield engine.step()


def run(runner: ModelRunner, items: tuple[WorkItem, ...]) -> dict[str, Any]:
    """Generate every item greedily to its exact length on a fresh engine; figures of this run."""
    seconds: Counter[str] = Counter()
    slots: Counter[str] = Counter()
    num_steps = num_preemptions = num_output = 0
    with Meter() as meter:
        for report in generate(Engine(runner), requests_of(items)):
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
    wanted = sum(item.output for item in items)
    assert num_output == wanted, f"{num_output} tokens instead of {wanted}"
    return {
        "wall_s": meter.wall_s,
        "cores": meter.cores,
        "output_tokens": num_output,
        "output_tokens_per_s": num_output / meter.wall_s,
        "all_tokens_per_s": (num_output + sum(len(item.prompt) for item in items)) / meter.wall_s,
        "in_kernels": (seconds["forward"] + seconds["sample"]) / meter.wall_s,
        "steps": num_steps,
        "preemptions": num_preemptions,
        "step_ms": {part: 1e3 * seconds[part] / num_steps for part in PARTS},
        "slot_steps": dict(slots),
    }


def _print(made: dict[str, Any]) -> None:
    speed, runs = made["output_tokens_per_s"], made["runs"]
    click.echo(f"{made['workload']}  {made['dtype']}  {made['machine']['processor']}  commit {made['machine']['commit']}")
    click.echo(f"output tokens/s  median {speed['median']:.1f}  min {speed['min']:.1f}  max {speed['max']:.1f}")
    middle = sorted(runs, key=lambda run: run["wall_s"])[len(runs) // 2]
    whole = 1e3 * middle["wall_s"] / middle["steps"]
    click.echo(f"steps {middle['steps']}  {whole:.2f} ms each  preemptions {middle['preemptions']}")
    for part, milliseconds in middle["step_ms"].items():
        click.echo(f"  {part:9s} {milliseconds:8.3f} ms  {100 * milliseconds / whole:5.1f} %")
    click.echo(f"in kernels {100 * made['in_kernels']['median']:.1f} %  slot-steps {middle['slot_steps']}")
    click.echo(f"others took {middle['cores']['others']} cores")
    click.echo(f"load {made['load_s']:.1f} s  peak memory {made['peak_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
