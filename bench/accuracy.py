"""What fewer bits cost in accuracy: perplexity of real texts, teacher-forced through the engine's own forward pass.

    python -m bench.accuracy [TEXT ...] [--config dtype=float32] [--config dtype=bfloat16] ... [--tokens N] [--json OUT]

Each `--config` is a set of fields of `EngineConfig`; the first one is what the others are held against. A text is cut into
sequences that begin without context. (The KV cache alone is compared in bench/kv_accuracy.py.)
"""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer

from bench.kv_accuracy import SONNETS, one_sequence, perplexity
from bench.record import engine_options, json_option, record, save
from engine import model as models
from engine.config import EngineConfig
from engine.model_runner import ModelRunner

ROOT = Path(__file__).parents[1]
CONFIGS = ("dtype=float32", "dtype=bfloat16", "quantisation=int8")


@click.command(help=__doc__)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--config", "configs", multiple=True, help=f"default: {', '.join(CONFIGS)}, as far as the engine has them")
@click.option("--tokens", type=int, default=2048, show_default=True, help="at most so many tokens of each text")
@click.option("--window", type=int, default=512, show_default=True, help="tokens that are one sequence")
@json_option
def main(
    paths: tuple[Path, ...], model: str, configs: tuple[str, ...], tokens: int, window: int, json_path: Path | None
) -> None:
    directory = models.resolve(model)
    tokenizer = Tokenizer.from_file(str(models.tokenizer_dir(directory) / "tokenizer.json"))
    texts = {path.name: path.read_text() for path in paths} or real_texts()
    ids = {name: tokenizer.encode(text).ids[:tokens] for name, text in texts.items()}
    found: dict[str, dict[str, float]] = {}
    for config in configs or known(CONFIGS):
        found[config] = measured(str(directory), engine_options(config), ids, window)
        first = next(iter(found.values()))
        for name, value in found[config].items():
            click.echo(f"{config:24s} {name:24s} perplexity {value:9.4f}  {100 * (value / first[name] - 1):+.3f} %")
    save(
        record(
            "accuracy",
            model=model,
            window=window,
            tokens={name: len(part) for name, part in ids.items()},
            perplexity=found,
        ),
        json_path,
    )


def known(configs: Sequence[str]) -> list[str]:
    """Those whose options the engine has."""
    names = {field.name for field in fields(EngineConfig)}
    return [config for config in configs if engine_options(config).keys() <= names]


def real_texts() -> dict[str, str]:
    """The texts that come with the repository; their sources are in tests/data/README.md and bench/data/README.md."""
    prompts = (ROOT / "tests" / "data" / "prompts_24.jsonl").read_text().splitlines()
    arithmetic = json.loads((ROOT / "bench" / "data" / "mgsm_en.json").read_text())["exemplars"]
    return {
        "sonnets": SONNETS.read_text(),
        "prompts": "\n\n".join(json.loads(line)["prompt"] for line in prompts),
        "arithmetic": "\n\n".join(f"{example['q']}\n{example['a']}" for example in arithmetic),
    }


def measured(model: str, options: dict[str, Any], texts: dict[str, list[int]], window: int) -> dict[str, float]:
    """Perplexity of each text with one engine."""
    runner = ModelRunner(
        EngineConfig(**{"model": model, "max_slots": 1, "max_model_len": window, "kv_blocks": window} | options)
    )

    def all_logits(ids: list[int]) -> torch.Tensor:
        batch = one_sequence(ids, runner.scheduler_config.block_size, runner.device)
        return runner.forward(replace(batch, logits_indices=torch.arange(len(ids), device=runner.device)))

    return {name: perplexity(all_logits, ids, window) for name, ids in texts.items()}


if __name__ == "__main__":
    main()
