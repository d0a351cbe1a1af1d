"""How much of the KV memory holds tokens, and what sharing saves: the real scheduler on lengths of real requests, no model.

    python -m bench.memory [--requests N] [--json OUT]

Lengths are drawn from the histograms of figure 11 of Kwon et al. 2023 (PagedAttention), the machine is that paper's OPT-13B on
an A100: 15,728 positions in blocks of 16. All requests wait from the start, and every step is one token.
"""

import csv
import random
from bisect import bisect
from collections import Counter
from itertools import accumulate
from math import gcd
from pathlib import Path

import click

from bench.record import json_option, record, save
from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence

HISTOGRAMS = Path(__file__).parent / "data" / "paged_attention_fig11_lengths.csv"
KV_POSITIONS, BLOCK_SIZE, MODEL_LEN = 15_728, 16, 2048
SHARING_SLOTS = 96
"""So few that nothing is preempted: what is computed again shares no more."""
RESERVATIONS = ("max", "pow2", "oracle", "ratio", "paged")
PAPER_SAVED = {2: 6.09, 4: 8.53, 6: 9.79}
"""Per cent of blocks saved by sharing the prompt between 2, 4 and 6 samples, Alpaca (figure 15)."""


@click.command(help=__doc__)
@click.option("--requests", "count", type=int, default=3000, show_default=True)
@json_option
def main(count: int, json_path: Path | None) -> None:
    filled = {name: run(draw_lengths("ShareGPT", count), reservation=name)["filled"] for name in RESERVATIONS}
    saved = {n: run(draw_lengths("Alpaca", count), n=n, max_slots=SHARING_SLOTS)["saved"] for n in PAPER_SAVED}
    for name, share in filled.items():
        click.echo(f"ShareGPT  {name:7s} {100 * share:5.1f} % of the positions set aside hold tokens")
    for n, share in saved.items():
        click.echo(f"Alpaca    {n} samples: {100 * share:5.2f} % of the blocks saved by sharing (paper {PAPER_SAVED[n]} %)")
    save(record("memory", filled=filled, saved=saved), json_path)


def draw_lengths(dataset: str, count: int) -> list[tuple[int, int]]:
    """`count` pairs of prompt and output tokens in random order: evenly spaced quantiles of both histograms.

    They are paired by steps of the golden ratio, so that each length of prompt meets each length of output; drawn freely, the
    prompts of the few longest outputs would decide.
    """
    sides: dict[str, list[tuple[float, float, float]]] = {"input": [], "output": []}
    with HISTOGRAMS.open() as lines:
        for row in csv.DictReader(lines):
            if row["dataset"] == dataset:
                sides[row["side"]].append((float(row["bin_lo"]), float(row["bin_hi"]), float(row["probability"])))

    def lengths(bins: list[tuple[float, float, float]]) -> list[int]:
        edges = [0.0, *accumulate(share for _, _, share in bins)]
        marks = [(row + 0.5) / count * edges[-1] for row in range(count)]
        places = [bisect(edges, mark) - 1 for mark in marks]
        parts = [(bins[place], (mark - edges[place]) / bins[place][2]) for place, mark in zip(places, marks, strict=True)]
        return [max(1, round(low + part * (high - low))) for (low, high, _), part in parts]

    stride = next(step for step in range(round(0.618 * count), count + 1) if gcd(step, count) == 1)
    prompts, outputs = lengths(sides["input"]), lengths(sides["output"])
    pairs = [(prompt, outputs[row * stride % count]) for row, prompt in enumerate(prompts)]
    return [pair for pair in random.Random(0).sample(pairs, count) if sum(pair) <= MODEL_LEN]


def run(lengths: list[tuple[int, int]], *, reservation: str = "paged", n: int = 1, max_slots: int = 256) -> dict[str, float]:
    """Averages over all steps: share of set-aside positions that hold tokens, and of blocks that sharing saves."""
    config = SchedulerConfig(
        max_slots=max_slots,
        max_num_batched_tokens=1 << 20,
        block_size=BLOCK_SIZE,
        num_blocks=KV_POSITIONS // BLOCK_SIZE,
        max_model_len=MODEL_LEN,
        reservation=reservation,
        prefix_caching=False,  # what is counted is sharing within a request
    )
    scheduler = Scheduler(config, BlockPool(config.num_blocks, BLOCK_SIZE))
    for name, (prompt, output) in enumerate(lengths):
        params = SamplingParams(max_tokens=output, ignore_eos=True, n=n)
        request = Request(request_id=str(name), prompt_token_ids=(5,) * prompt, params=params)
        scheduler.add(Sequence(request, scheduler.next_order(request), frozenset()))
    total: Counter[str] = Counter()
    while scheduler.num_running + scheduler.num_waiting:
        decision = scheduler.schedule()
        kv = scheduler.kv_counts()
        total["filled"] += kv.filled_tokens
        total["allocated"] += kv.allocated_tokens
        total["held"] += kv.used_blocks
        total["named"] += sum(len(item.sequence.block_table) for item in decision.scheduled)
        scheduler.update(decision, [_tokens(item.num_samples) for item in decision.scheduled])
    return {"filled": total["filled"] / total["allocated"], "saved": 1 - total["held"] / total["named"]}


def _tokens(num_samples: int) -> int | list[int] | None:
    return [7] * num_samples if num_samples > 1 else 7 if num_samples else None


if __name__ == "__main__":
    main()
