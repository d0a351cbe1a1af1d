"""What the prefix cache gains where prompts begin alike, and costs where none do.

    python -m bench.prefix [--questions N] [--repeats K] [--json OUT]

Gain: MGSM questions behind the same eight worked examples, a few tokens of answer each, with the cache and without, in turns.
Cost: hashing, looking up and keeping the blocks of prompts that share nothing, as a share of the steps they run in; the time is
that of `schedule` and `update` with the cache less that without, in turns.
"""

import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import click

os.environ.setdefault("GOMP_SPINCOUNT", "100000")  # as engine/serve.py; OpenMP reads it when torch loads
from tokenizers import Tokenizer

from bench.record import json_option, record, save
from bench.workload import make_workload
from engine.config import EngineConfig
from engine.core import Engine
from engine.model import resolve, tokenizer_dir
from engine.model_runner import ModelRunner
from engine.request import Request, SamplingParams

QUESTIONS = Path(__file__).parent / "data" / "mgsm_en.json"


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--questions", type=int, default=16, show_default=True)
@click.option("--answer-tokens", type=int, default=16, show_default=True)
@click.option("--repeats", type=int, default=3, show_default=True)
@json_option
def main(model: str, questions: int, answer_tokens: int, repeats: int, json_path: Path | None) -> None:
    directory = resolve(model)
    runner = ModelRunner(EngineConfig(model=str(directory), max_model_len=2048))
    few_shot = few_shot_prompts(directory, questions)
    distinct = [item.prompt for item in make_workload("sharegpt", directory).items[:questions]]
    made = record("prefix", gain=gain(runner, few_shot, answer_tokens, repeats), cost=cost(runner, distinct, repeats))
    found = made["gain"]
    click.echo(
        f"{questions} questions behind {found['shared_tokens']} equal tokens: {found['without_s']:.2f} s without the cache, "
        f"{found['with_s']:.2f} s with it: {found['without_s'] / found['with_s']:.2f} times as fast; {found['hits']} hits"
    )
    click.echo(f"no hits: {1e6 * made['cost']['per_step_s']:.1f} us of a step of {1e3 * made['cost']['step_s']:.1f} ms")
    click.echo(f"that is {100 * made['cost']['per_step_s'] / made['cost']['step_s']:.4f} %")
    save(made, json_path)


def few_shot_prompts(directory: Path, count: int) -> list[tuple[int, ...]]:
    """Eight worked examples and one question each, as token ids."""
    data = json.loads(QUESTIONS.read_text())
    examples = "\n\n".join(f"{example['q']}\n{example['a']}" for example in data["exemplars"])
    tokenizer = Tokenizer.from_file(str(tokenizer_dir(directory) / "tokenizer.json"))
    texts = [f"{examples}\n\nQuestion: {question}\nStep-by-Step Answer:" for question in data["questions"][:count]]
    return [tuple(tokenizer.encode(text).ids) for text in texts]


def gain(runner: ModelRunner, prompts: list[tuple[int, ...]], answer_tokens: int, repeats: int) -> dict[str, float]:
    """Seconds for all answers with and without the cache, the least of the repeats."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    hits = 0
    for _ in range(repeats):
        for caching in (True, False):
            elapsed, _, found, _ = run(runner, prompts, answer_tokens, caching)
            seconds[caching].append(elapsed)
            hits = max(hits, found)
    shared = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
    return {"with_s": min(seconds[True]), "without_s": min(seconds[False]), "hits": hits, "shared_tokens": shared}


def cost(runner: ModelRunner, prompts: list[tuple[int, ...]], repeats: int) -> dict[str, float]:
    """Seconds of a step that the cache takes where nothing is shared, and of the whole step."""
    differences, steps = [], []
    for _ in range(repeats):
        (elapsed, plain, _, num_steps), (_, cached, hits, _) = (run(runner, prompts, 64, caching) for caching in (False, True))
        assert not hits, "the prompts share a beginning"
        differences.append((cached - plain) / num_steps)
        steps.append(elapsed / num_steps)
    return {"per_step_s": statistics.median(differences), "step_s": statistics.median(steps)}


def run(runner: ModelRunner, prompts: list[tuple[int, ...]], num_tokens: int, caching: bool) -> tuple[float, float, int, int]:
    """Seconds in all, of these deciding and recording, tokens found in the cache, steps."""
    runner.scheduler_config = replace(runner.scheduler_config, prefix_caching=caching)
    engine = Engine(runner)
    for name, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(request_id=str(name), prompt_token_ids=prompt, params=params))
    deciding_s, hits, num_steps = 0.0, 0, 0
    started = time.perf_counter()
    while engine.has_work:
        stats = engine.step().stats
        deciding_s += stats.times.schedule_s + stats.times.update_s
        hits += stats.num_prefix_hits
        num_steps += 1
    return time.perf_counter() - started, deciding_s, hits, num_steps


if __name__ == "__main__":
    main()
