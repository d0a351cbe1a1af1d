"""The forward pass whose bits depend on a sequence alone: not on what else is in the batch, nor on how a prompt was cut.

Matrix products, and functions at the uneven end of a vector, round differently in batches of different sizes. Here the model
always computes exactly `rows` tokens, in tiles that are padded with tokens that nobody reads, so that every operation of it has
one shape; attention is that of kernels/invariant.py, every row by itself. Later tiles read what earlier ones have written.

1. Rows of a tile are independent of each other and of their place: `probe` proves it on this machine, with this model.
2. A row of logits is computed with all others of its tile, or not at all.
3. Changing single logits, log probabilities and draws go row by row already (kernels/sampling.py).

Relies on attention.py for one pass; leaves the option to config.py.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine import attention
from engine.batch import ModelInput, build
from engine.decision import ScheduledSequence
from engine.errors import ConfigError, ModelUnsupported
from engine.geometry import ModelGeometry
from engine.kv_cache import KVCache
from engine.request import Request
from engine.sequence import Sequence
from engine.staging import staging_for
from kernels.dispatch import AttentionKernels
from kernels.reference import HostLengths

_STRIDE = 32
"""torch's elementwise loops take up to so many numbers at once (AVX-512; 16 with AVX2) and what is left over another way."""
_GRAIN = 32_768
"""Numbers of a tensor for each of which torch adds a thread to such a loop (at::internal::GRAIN_SIZE)."""
_MIN_ROWS, _MAX_ROWS = 16, 256
_PROBE_BLOCK_SIZE = 8


def tile_rows(model: Any) -> int:
    """Rows of a tile, the fewest for which no thread's share of an elementwise loop has numbers left over.

    Raises:
        ModelUnsupported: rows of the model are computed in groups that depend on all of them, as by experts.
        ConfigError: no such number for this number of threads.
    """
    body = [module for module in model.modules() if module is not model.get_output_embeddings()]
    if any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        raise ModelUnsupported(
            f"batch_invariant: experts of {type(model).__name__} take more or fewer rows with each batch; leave it out"
        )
    weights = [weight for module in body if (weight := getattr(module, "weight", None)) is not None]
    widths = {size for weight in weights if weight.ndim == 2 for size in weight.shape} - {
        model.get_input_embeddings().weight.shape[0]
    }
    num_threads = torch.get_num_threads()
    for rows in range(_MIN_ROWS, _MAX_ROWS + 1, _MIN_ROWS):
        if all(_is_even(rows * width, num_threads) for width in widths):
            return rows
    raise ConfigError(
        f"num_threads: {num_threads} threads cut no tile of {_MAX_ROWS} rows or fewer evenly; use 2 for batch_invariant"
    )


def _is_even(size: int, num_threads: int) -> bool:
    share = -(-size // min(num_threads, -(-size // _GRAIN)))
    return size % _STRIDE == share % _STRIDE == 0


def forward(model: Any, batch: ModelInput, kv_cache: KVCache, kernels: AttentionKernels, rows: int) -> Tensor:
    """As `attention.forward`, in tiles of `rows` tokens; `kernels` must be invariant too."""
    wanted = batch.logits_indices
    num_tokens = len(batch.input_ids)
    lens = batch.query_start.diff()
    tables = batch.block_tables.repeat_interleave(lens, 0, output_size=num_tokens)
    logits: Tensor | None = None
    for start in range(0, num_tokens, rows):
        is_here = (wanted >= start) & (wanted < start + rows)
        tile = _tile(batch, tables, start, rows, is_wanted=bool(is_here.any()))
        computed = attention.forward(model, tile, kv_cache, kernels)
        if logits is None:
            logits = computed.new_empty(len(wanted), computed.shape[1])
        if len(computed):
            logits[is_here] = computed[wanted[is_here] - start]
    assert logits is not None
    return logits


def _tile(batch: ModelInput, tables: Tensor, start: int, rows: int, *, is_wanted: bool) -> ModelInput:
    """Tokens from `start` on, each a sequence of its own, padded with tokens that are written nowhere and attend to nothing."""
    part = slice(start, start + rows)
    missing = rows - len(batch.input_ids[part])
    positions = batch.positions[part]
    context_lens = F.pad((positions + 1).int(), (0, missing))
    indices = torch.arange(rows, device=positions.device)
    return ModelInput(
        input_ids=F.pad(batch.input_ids[part], (0, missing)),
        positions=F.pad(positions, (0, missing)),
        slot_mapping=F.pad(batch.slot_mapping[part], (0, missing), value=-1),
        block_tables=F.pad(tables[part], (0, 0, 0, missing)),
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=positions.device),
        context_lens=context_lens,
        logits_indices=indices if is_wanted else indices[:0],
        host=HostLengths(np.arange(rows + 1), context_lens.numpy()),
    )


def probe(model: Any, geometry: ModelGeometry, kernels: AttentionKernels, rows: int) -> None:
    """Prove on a few tokens that this model on this machine gives the same bits in other batches, chunks and places.

    Takes seven passes over a tile.

    Raises:
        ModelUnsupported: it does not.
    """
    needle, other = (attention.probe_ids(row, length, geometry.vocab_size) for row, length in enumerate((rows + 3, 5)))
    run = partial(_run, model, geometry, kernels, rows)
    (alone,) = run([needle], [[rows + 3]])
    first, *rest = run([other, needle], [[5, rows - 9], [0, 10], [0, 2]])
    among = torch.cat([first[5:], *rest])
    (places,) = run([needle[:1]] * rows, [[1] * rows])
    if not torch.equal(alone, among) or not torch.equal(places, alone[:1].expand_as(places)):
        raise ModelUnsupported(
            f"batch_invariant: on this machine the bits of {type(model).__name__} depend on the batch "
            f"({torch.get_num_threads()} threads, {model.dtype}); try num_threads 1 and dtype float32, or leave it out"
        )


@torch.inference_mode()
def _run(
    model: Any,
    geometry: ModelGeometry,
    kernels: AttentionKernels,
    rows: int,
    prompts: list[tuple[int, ...]],
    steps: list[list[int]],
) -> list[Tensor]:
    """Logits of all tokens, step by step; each step computes so many tokens of each prompt."""
    num_blocks = -(-max(map(len, prompts)) // _PROBE_BLOCK_SIZE)
    kv_cache = KVCache(geometry, len(prompts) * num_blocks, _PROBE_BLOCK_SIZE, model.dtype, model.device)
    sequences = []
    for row, ids in enumerate(prompts):
        sequence = Sequence(Request(request_id="probe", prompt_token_ids=ids), (0, row, 0), frozenset())
        sequence.block_table = list(range(1 + row * num_blocks, 1 + (row + 1) * num_blocks))
        sequences.append(sequence)
    logits = []
    for counts in steps:
        items = [ScheduledSequence(s, count) for s, count in zip(sequences, counts, strict=True) if count]
        for sequence, count, *_ in items:
            sequence.num_computed_tokens += count
        batch = build(items, _PROBE_BLOCK_SIZE, staging_for(model.device))
        batch = replace(batch, logits_indices=torch.arange(sum(counts), device=model.device))
        logits.append(forward(model, batch, kv_cache, kernels, rows))
    return logits
