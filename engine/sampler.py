"""Logits in, the next token id of each row out; a row whose logits are broken fails alone.

Relies on kernels/sampling.py for random numbers and draws. Leaves to others which rows are sampled (scheduler), and what an id
means for its sequence (stopping).

Order: banned ids, then per row greedy (temperature 0), or temperature, top-k, top-p and one draw.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sequence import Sequence
from kernels import sampling as kernel

BROKEN = "logits: NaN, infinity or nothing above -inf; the model, its dtype or what min_tokens bans leaves no token to choose"

# Most logits ranked at first; rows that need more are ranked again by themselves, so that they do not delay the others. Of 443
# positions of real prompts (SmolLM2-135M, temperature 1) 10 % need more at top_p 0.9 and 21 % at 0.95.
_MAX_WIDTH = 256
# Rows are drawn in pieces that fit a CPU's cache. 64 rows of 49,152 took 5.4 ms in pieces of 8 and 24 ms at once, most of it
# for fresh memory (2 cores of an AMD EPYC, torch 2.13, November 2026).
_CHUNK_ELEMENTS = {"cpu": 1 << 19}
_CHUNK_ELEMENTS_GPU = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """Parameters of the sampled rows, in row order, on the logits' device. Make it with `of`."""

    temperature: Tensor
    """[R] float32; 0 is greedy."""
    top_k: Tensor
    """[R] int64; 0 is off."""
    top_p: Tensor
    """[R] float32; 1 is off."""
    seed: Tensor
    """[R] int64: a 64-bit pattern, two's complement."""
    index: Tensor
    """[R] int64: index of the token among the outputs, those of earlier attempts included."""
    banned: list[tuple[int, ...]]
    """Per row, ids that must not be chosen: EOS and stop ids below min_tokens."""
    plain_rows: Tensor
    """int64 rows drawn from the whole distribution."""
    top_k_rows: Tensor
    """int64 rows drawn after top-k, and top-p if it is on."""
    top_p_rows: Tensor
    """int64 rows drawn after top-p alone."""
    max_top_k: int

    @classmethod
    def of(cls, sequences: Collection[Sequence], device: torch.device) -> "SamplingInput":
        """The parameters of `sequences`, one row each; which rows take which way is settled here, on the host."""
        params = [sequence.request.params for sequence in sequences]

        def tensor(values: Collection[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        kinds = [_kind(p.temperature, p.top_k, p.top_p) for p in params]

        def rows(kind: str) -> Tensor:
            return tensor([row for row, its_kind in enumerate(kinds) if its_kind == kind], torch.int64)

        return cls(
            temperature=tensor([p.temperature for p in params], torch.float32),
            top_k=tensor([max(p.top_k, 0) for p in params], torch.int64),
            top_p=tensor([p.top_p for p in params], torch.float32),
            seed=tensor([signed64(p.seed) for p in params], torch.int64),
            index=tensor([sequence.num_output_tokens for sequence in sequences], torch.int64),
            banned=[_banned(sequence) for sequence in sequences],
            plain_rows=rows("plain"),
            top_k_rows=rows("top_k"),
            top_p_rows=rows("top_p"),
            max_top_k=max((p.top_k for p in params), default=0),
        )


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was chosen."""

    token_ids: list[int]
    """One per row; -1 where the row failed."""
    failed: dict[int, str]
    """Row -> why it has no token."""


def sample(logits: Tensor, sampling: SamplingInput) -> SamplerOutput:
    """Choose one id per row of `logits` [R, vocab] float32, which stay as they are; one read by the host."""
    logits = _without_banned(logits, sampling.banned)
    # The largest value tells of NaN too: it spreads. So this one pass serves greedy rows and finds broken ones.
    largest, token_ids = logits.max(dim=1)
    if sampling.plain_rows.numel() + sampling.top_k_rows.numel() + sampling.top_p_rows.numel():
        _draw(logits, sampling, token_ids)
    chosen: list[int] = torch.where(largest.isfinite(), token_ids, -1).tolist()
    return SamplerOutput(chosen, {row: BROKEN for row, token_id in enumerate(chosen) if token_id < 0})


def signed64(seed: int) -> int:
    """The 64-bit pattern of `seed` as int64 holds it: two's complement."""
    return (seed + 2**63) % 2**64 - 2**63


def _draw(logits: Tensor, sampling: SamplingInput, token_ids: Tensor) -> None:
    """Write the ids of the random rows into `token_ids` [R]."""
    uniform = kernel.uniform(sampling.seed, sampling.index)

    def plain(rows: Tensor) -> Tensor:
        return kernel.draw(logits[rows], sampling.temperature[rows], uniform[rows])

    def truncated(width: int) -> Callable[[Tensor], Tensor]:
        parameters = (sampling.temperature, sampling.top_k, sampling.top_p, uniform)
        return lambda rows: kernel.draw_truncated(logits[rows], *(p[rows] for p in parameters), width=width)

    chunk = max(1, _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS_GPU) // logits.shape[1])
    for group, choose in (
        (sampling.plain_rows, plain),
        (sampling.top_k_rows, truncated(min(sampling.max_top_k + 1, _MAX_WIDTH))),
        (sampling.top_p_rows, truncated(_MAX_WIDTH)),
    ):
        for rows in torch.split(group, chunk):
            if rows.numel():
                token_ids[rows] = choose(rows)


_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Below it a temperature is 0 in float32, and so greedy."""


def _kind(temperature: float, top_k: int, top_p: float) -> str:
    if temperature < _LEAST_TEMPERATURE:
        return "greedy"
    if top_k > 0:
        return "top_k"
    return "top_p" if top_p < 1 else "plain"


def _banned(sequence: Sequence) -> tuple[int, ...]:
    is_below = sequence.num_output_tokens < sequence.request.params.min_tokens
    return tuple(sorted(sequence.stop_token_ids)) if is_below else ()


def _without_banned(logits: Tensor, banned: list[tuple[int, ...]]) -> Tensor:
    """A copy of `logits` with the banned ids at -inf; `logits` itself where nothing is banned."""
    pairs = [(row, token_id) for row, ids in enumerate(banned) for token_id in ids if 0 <= token_id < logits.shape[1]]
    if not pairs:
        return logits
    rows, ids = torch.tensor(pairs, device=logits.device).T
    return logits.index_put((rows, ids), torch.tensor(-torch.inf, device=logits.device))
