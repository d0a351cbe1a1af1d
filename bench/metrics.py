"""What the metrics of a step cost beside the step itself: the real engine decodes, and each report is counted as a worker does.

    python -m bench.metrics [--sizes 1,64,256] [--steps N] [--option FIELD=VALUE,...] [--json OUT]

`step` is one step of so many sequences of 64 tokens of prompt; `counted` is what its report costs: the counters and histograms
of the step, and a time between two tokens for each sequence. `job` is what the end of one job costs. A worker counts on the
thread that reads from the engine's process, beside the engine, which itself only takes the times of its parts; here both run
in turns. The shares are of the step that was measured, and of one of 10 ms, which a GPU takes for a small model.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import click

os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # as engine/serve.py; OpenMP reads it when torch loads

from prometheus_client import generate_latest

from bench.figures import spread
from bench.meter import Meter
from bench.record import engine_options, json_option, record, save
from bench.workload import make_workload
from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import StepReport
from engine.model import resolve
from engine.model_runner import ModelRunner
from engine.request import Request, SamplingParams
from engine.serve import ready_message
from worker.attempt import Attempt, Ending
from worker.claims import Delivery
from worker.inflight import InFlight
from worker.metrics import Metrics
from worker.reader import Reader

PROMPT_TOKENS = 64
GPU_STEP_S = 0.010
END = Ending("succeeded", "length")


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--sizes", default="1,64,256", show_default=True, help="running requests")
@click.option("--steps", type=int, default=16, show_default=True, help="timed steps of each size")
@click.option("--option", "more", default="", metavar="FIELD=VALUE,...", help="fields of EngineConfig")
@json_option
def main(model: str, sizes: str, steps: int, more: str, json_path: Path | None) -> None:
    directory, numbers = resolve(model), [int(size) for size in sizes.split(",")]
    prompts = [(item.prompt * PROMPT_TOKENS)[:PROMPT_TOKENS] for item in make_workload("sharegpt", directory).items]
    options = {"max_slots": max(numbers), "max_model_len": 1024, "prefix_caching": False} | engine_options(more)
    runner = ModelRunner(EngineConfig(model=str(directory), **options))
    with Meter() as meter:
        made = {str(size): measured(runner, [prompts[i % len(prompts)] for i in range(size)], steps) for size in numbers}
    for size, found in made.items():
        step_s, counted_s = found["step_s"]["median"], found["counted_s"]["median"]
        shares = f"{100 * counted_s / step_s:.4f} % ({100 * counted_s / GPU_STEP_S:.2f} % of 10 ms)"
        click.echo(
            f"{size:>4s} running: step {1e3 * step_s:.1f} ms, counted in {1e6 * counted_s:.1f} us = {shares}, "
            f"job {1e6 * found['job_s']['median']:.1f} us, "
            f"scrape {1e3 * found['scrape_s']['median']:.1f} ms, {found['scrape_bytes']} bytes"
        )
    dtype = str(runner.dtype).removeprefix("torch.")
    save(record("metrics", dtype=dtype, options=engine_options(more), cores=meter.cores, sizes=made), json_path)


def measured(runner: ModelRunner, prompts: list[tuple[int, ...]], steps: int) -> dict[str, dict[str, float] | int]:
    """Seconds of a step, of counting it, of counting the end of a job and of a scrape, with so many requests running."""
    metrics = Metrics()
    metrics.engine_ready(ready_message(runner, 0.0), "m")
    reader = Reader(InFlight(metrics, lambda _: None), metrics, "m", lambda: None)
    attempts = [Attempt(Delivery(str(i), "1-1", "normal", {}, 0, 1, 1, "l:1", 0, 0, 1, "new")) for i in range(len(prompts))]
    step_s, counted_s = [], []
    for taken_s, report in decoding(runner, prompts, steps):
        step_s.append(taken_s)
        counted_s.append(counting(reader, metrics, report, attempts))
    job_s = [
        timed(lambda attempt=attempt: metrics.job_ended(attempt, END)) for attempt in attempts * (256 // len(attempts) or 1)
    ]
    scrape_s = [timed(lambda: generate_latest(metrics.registry)) for _ in range(9)]
    seconds = {"step_s": step_s, "counted_s": counted_s[1:], "job_s": job_s, "scrape_s": scrape_s}
    return {name: spread(taken) for name, taken in seconds.items()} | {"scrape_bytes": len(generate_latest(metrics.registry))}


def decoding(runner: ModelRunner, prompts: list[tuple[int, ...]], steps: int) -> Iterator[tuple[float, StepReport]]:
    """Steps in which every sequence decodes, each with its seconds."""
    engine = Engine(runner)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=1000 - PROMPT_TOKENS, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    while engine.step().stats.slots.decode < len(prompts):
        pass
    for _ in range(steps):
        started = time.perf_counter()
        report = engine.step()
        yield time.perf_counter() - started, report


def counting(reader: Reader, metrics: Metrics, report: StepReport, attempts: list[Attempt]) -> float:
    """Least seconds of three in which the worker counts a report: as the reader does for each event, and for the step."""
    return min(timed(lambda: count(reader, metrics, report, attempts)) for _ in range(3))


def count(reader: Reader, metrics: Metrics, report: StepReport, attempts: list[Attempt]) -> None:
    """What `Reader.on_report` does about metrics."""
    reader._last_report = time.monotonic()
    for attempt in attempts:
        reader._time(attempt, 1)
    metrics.step(report.stats)
    metrics.token_gaps(reader._gaps)
    reader._gaps.clear()


def timed(call: object) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
