"""What deciding costs: `schedule` and `update` of steps in which every sequence decodes, without a model.

    python -m bench.scheduling [--steps N] [--json OUT]

Milliseconds a step and microseconds a sequence, the median over the steps. `busy` replaces an eighth of the sequences in each
step, so that there is something to decide.
"""

import gc
import statistics
import time
from pathlib import Path

import click

from bench.record import json_option, record, save
from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence

SIZES = (64, 256, 1024)
PROMPT_TOKENS = 161
"""The mean prompt of the sharegpt workload."""
EOS = frozenset({2})


@click.command(help=__doc__)
@click.option("--steps", type=int, default=400, show_default=True)
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True)
@json_option
def main(steps: int, prefix_caching: bool, json_path: Path | None) -> None:
    figures = [measure(size, steps, is_busy, prefix_caching) for size in SIZES for is_busy in (False, True)]
    for row in figures:
        click.echo(
            f"{row['sequences']:5d} sequences {'busy  ' if row['busy'] else 'steady'}  schedule {row['schedule_ms']:.3f} ms  "
            f"update {row['update_ms']:.3f} ms  together {row['schedule_ms'] + row['update_ms']:.3f} ms"
        )
    save(record("scheduling", figures=figures), json_path)


def measure(num_sequences: int, num_steps: int, is_busy: bool, prefix_caching: bool) -> dict[str, float]:
    """Medians over the steps, in milliseconds."""
    config = SchedulerConfig(
        max_slots=num_sequences,
        max_num_batched_tokens=1 << 20,
        block_size=16,
        num_blocks=num_sequences * 64,
        max_model_len=1024,
        prefix_caching=prefix_caching,
    )
    scheduler = Scheduler(config, BlockPool(config.num_blocks, config.block_size))
    names = iter(range(1 << 30))
    seconds: dict[str, list[float]] = {"schedule": [], "update": []}
    gc.collect()
    for step in range(num_steps):
        num_new = num_sequences if not step else num_sequences // 8 if is_busy else 0
        for _ in range(num_new):
            _add(scheduler, next(names), is_busy)
        started = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        tokens = [7 if item.num_samples else None for item in output.scheduled]
        before = time.perf_counter()
        scheduler.update(output, tokens)
        if step > 8:
            seconds["schedule"].append(scheduled - started)
            seconds["update"].append(time.perf_counter() - before)
    medians = {f"{part}_ms": 1e3 * statistics.median(values) for part, values in seconds.items()}
    return {"sequences": num_sequences, "busy": is_busy, **medians}


def _add(scheduler: Scheduler, name: int, is_busy: bool) -> None:
    prompt = (name + 3, *range(3, PROMPT_TOKENS + 2))  # the first token differs: nothing is shared
    request = Request(
        request_id=str(name),
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=(8 if is_busy else 800), temperature=0.0),
    )
    scheduler.add(Sequence(request, scheduler.next_order(request), EOS, 1024))


if __name__ == "__main__":
    main()
