"""What the dtype of the KV cache costs in accuracy: perplexity of a real text, teacher-forced through the paged cache.

    python -m bench.kv_accuracy [TEXT ...] [--model M] [--tokens N] [--window W] [--json OUT]

Weights and everything but the cache stay in float32, so that the figures differ by the cache alone.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer

from bench.record import json_option, record, save
from engine import model as models
from engine.attention import forward
from engine.batch import ModelInput, build
from engine.decision import ScheduledSequence
from engine.kv_cache import KVCache, kv_bytes_per_token
from engine.request import Request
from engine.sequence import Sequence
from engine.staging import staging_for
from kernels.dispatch import attention_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
BLOCK_SIZE = 16
SONNETS = Path(__file__).parents[1] / "tests" / "data" / "sonnets.txt"


@click.command(help=__doc__)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--tokens", type=int, default=4096, show_default=True, help="at most so many tokens of the text")
@click.option("--window", type=int, default=512, show_default=True, help="tokens that are one sequence")
@json_option
def main(paths: tuple[Path, ...], model: str, tokens: int, window: int, json_path: Path | None) -> None:
    directory = models.resolve(model)
    loaded = models.load(directory, torch.device("cpu"), torch.float32)
    tokenizer = Tokenizer.from_file(str(models.tokenizer_dir(directory) / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(path.read_text() for path in paths or (SONNETS,))).ids[:tokens]
    click.echo(f"{model}: {len(ids)} tokens in sequences of {window}")
    found: dict[torch.dtype, float] = {}
    for dtype in DTYPES:
        found[dtype] = perplexity(with_kv_in(dtype, loaded), ids, window)
        against = found[dtype] / found[DTYPES[0]] - 1
        size = kv_bytes_per_token(models.geometry(loaded), dtype)
        click.echo(f"  KV {str(dtype)[6:]:13s} {size:7d} bytes a token  perplexity {found[dtype]:9.4f}  {100 * against:+.3f} %")
    figures = {str(dtype).removeprefix("torch."): value for dtype, value in found.items()}
    save(record("kv_accuracy", model=model, tokens=len(ids), window=window, perplexity=figures), json_path)


@torch.inference_mode()
def perplexity(all_logits: Callable[[list[int]], torch.Tensor], token_ids: list[int], window: int) -> float:
    """Of a text cut into sequences of `window` tokens, each of which begins without context.

    `all_logits` gives those of every position of one sequence, `[num_tokens, vocab_size]`.
    """
    total, count = 0.0, 0
    for start in range(0, len(token_ids) - 1, window):
        ids = token_ids[start : start + window]
        logits = all_logits(ids)
        losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:], device=logits.device), reduction="sum")
        total, count = total + losses.item(), count + len(ids) - 1
    return math.exp(total / count)


def with_kv_in(kv_dtype: torch.dtype, model: Any) -> Callable[[list[int]], torch.Tensor]:
    """Logits of one sequence, whose attention reads keys and values from a cache in `kv_dtype`."""

    def all_logits(token_ids: list[int]) -> torch.Tensor:
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        cache = KVCache(models.geometry(model), num_blocks, BLOCK_SIZE, kv_dtype, model.device)
        batch = one_sequence(token_ids, BLOCK_SIZE, model.device)
        batch = replace(batch, logits_indices=torch.arange(len(token_ids), device=model.device))
        return forward(model, batch, cache, attention_kernels(model.device))

    return all_logits


def one_sequence(token_ids: list[int], block_size: int, device: torch.device) -> ModelInput:
    """A step that computes one whole sequence, in the first blocks of the cache."""
    sequence = Sequence(Request(request_id="", prompt_token_ids=tuple(token_ids)), (0, 0, 0), frozenset())
    sequence.block_table = list(range(1, -(-len(token_ids) // block_size) + 1))
    sequence.num_computed_tokens = len(token_ids)
    return build([ScheduledSequence(sequence, len(token_ids))], block_size, staging_for(device))


if __name__ == "__main__":
    main()
