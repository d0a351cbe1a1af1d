"""What the dtype of the KV cache costs in accuracy: perplexity of a real text, teacher-forced through the paged cache.

    python -m bench.kv_accuracy [TEXT ...] [--model M] [--tokens N] [--window W]

Weights and everything but the cache stay in float32, so that the figures differ by the cache alone.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer

from engine import model as models
from engine.attention import forward
from engine.batch import build
from engine.decision import ScheduledSequence
from engine.kv_cache import KVCache, kv_bytes_per_token
from engine.request import Request
from engine.sequence import Sequence
from kernels.dispatch import attention_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
BLOCK_SIZE = 16
SONNETS = Path(__file__).parents[1] / "tests" / "data" / "sonnets.txt"


@click.command(help=__doc__)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--tokens", type=int, default=4096, show_default=True, help="at most so many tokens of the text")
@click.option("--window", type=int, default=512, show_default=True, help="tokens that are one sequence")
def main(paths: tuple[Path, ...], model: str, tokens: int, window: int) -> None:
    directory = models.resolve(model)
    loaded = models.load(directory, torch.device("cpu"), torch.float32)
    tokenizer = Tokenizer.from_file(str(models.tokenizer_dir(directory) / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(path.read_text() for path in paths or (SONNETS,))).ids[:tokens]
    click.echo(f"{model}: {len(ids)} tokens in sequences of {window}")
    found: dict[torch.dtype, float] = {}
    for dtype in DTYPES:
        found[dtype] = perplexity(loaded, ids, window, dtype)
        against = found[dtype] / found[DTYPES[0]] - 1
        size = kv_bytes_per_token(models.geometry(loaded), dtype)
        click.echo(f"  KV {str(dtype)[6:]:9s} {size:7d} bytes a token  perplexity {found[dtype]:9.4f}  {100 * against:+.3f} %")


@torch.inference_mode()
def perplexity(model: Any, token_ids: list[int], window: int, kv_dtype: torch.dtype) -> float:
    """Of a text cut into sequences of `window` tokens, each of which begins without context."""
    total, count = 0.0, 0
    for start in range(0, len(token_ids) - 1, window):
        ids = token_ids[start : start + window]
        logits = all_logits(model, ids, kv_dtype)
        losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum")
        total, count = total + losses.item(), count + len(ids) - 1
    return math.exp(total / count)


def all_logits(model: Any, token_ids: list[int], kv_dtype: torch.dtype) -> torch.Tensor:
    """Logits `[len(token_ids), vocab_size]` of one sequence, whose attention reads keys and values from the cache."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = KVCache(models.geometry(model), num_blocks, BLOCK_SIZE, kv_dtype, model.device)
    sequence = Sequence(Request(request_id="", prompt_token_ids=tuple(token_ids)), (0, 0, 0), frozenset())
    sequence.block_table = list(range(1, num_blocks + 1))
    sequence.num_computed_tokens = len(token_ids)
    batch = build([ScheduledSequence(sequence, len(token_ids))], BLOCK_SIZE, model.device)
    batch = replace(batch, logits_indices=torch.arange(len(token_ids), device=model.device))
    return forward(model, batch, cache, attention_kernels(model.device))


if __name__ == "__main__":
    main()
