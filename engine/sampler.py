"""Logits in, the next token id of each row out, with log probabilities where they are asked for; a broken row fails alone.

Relies on logit_changes.py for what a request wants changed and on kernels/sampling.py for the numbers. Leaves to others which
rows are sampled (scheduler), and what an id means for its sequence (stopping, beam).

Order: log probabilities of the logits as they are; allowed ids, bias, bans and min_tokens, penalties, the grammar's mask; then
per row greedy (temperature 0), or temperature, min-p, top-k, top-p and one draw. Rows that are treated alike form a group, and
rows that want nothing but the largest logit none: they pay for nobody else.
"""

from collections import defaultdict
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.beam import num_candidates
from engine.logit_changes import LogitChanges, is_changed, why_none_is_left
from engine.messages import TokenLogprobs
from engine.request import SamplingParams
from engine.sequence import Sequence
from engine.staging import Reading, Staging, staging_for
from kernels import sampling as kernel
from kernels.dispatch import sampling_kernels

# Most logits ranked at first; rows that need more are ranked again by themselves, so that they do not delay the others. Of 443
# positions of real prompts (SmolLM2-135M, temperature 1) 10 % need more at top_p 0.9 and 21 % at 0.95.
_MAX_WIDTH = 256
# Rows are drawn in pieces that fit a CPU's cache. 64 rows of 49,152 took 5.4 ms in pieces of 8 and 24 ms at once, most of it
# for fresh memory (2 cores of an AMD EPYC, torch 2.13, November 2026).
_CHUNK_ELEMENTS = {"cpu": 1 << 19}
_CHUNK_ELEMENTS_GPU = 1 << 26


_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Below it a temperature is 0 in float32, and so greedy."""


class Row(NamedTuple):
    """One token to sample. Forks of one prompt are rows of the same sequence."""

    sequence: Sequence
    choice: int
    index: int  # type: ignore[assignment]  # hides the method of tuples
    """Of the token among the outputs, those of earlier attempts included."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of a batch that are treated alike."""

    rows: Tensor
    """`[n]` int64."""
    width: int | None
    """How many logits are ranked at first; 0 draws from all of them without ranking, None takes the largest."""
    has_min_p: bool
    changes: LogitChanges | None


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Rows whose log probabilities are asked for; those with beams or without."""

    rows: Tensor
    """`[n]` int64."""
    num_top: list[int]
    """Ascending, so that neighbours ask for about as many."""
    order: list[int]
    """`rows` on the host."""
    changes: LogitChanges | None
    """Of rows with beams: their log probabilities are changed, not their logits."""
    is_beam: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInput:
    """Parameters of the sampled rows, in row order, on the logits' device. Make it with `of`, and `send` before it is used."""

    params: list[SamplingParams]
    temperature: Tensor
    """[R] float32; 0 is greedy."""
    top_p: Tensor
    """[R] float32; 1 is off."""
    min_p: Tensor
    """[R] float32; 0 is off."""
    top_k: Tensor
    """[R] int64; 0 is off."""
    seed: Tensor
    """[R] int64: a 64-bit pattern, two's complement."""
    choice: Tensor
    """[R] int64."""
    index: Tensor
    """[R] int64: index of the token among the outputs, those of earlier attempts included."""
    groups: tuple[_Group, ...]
    """Rows that are drawn, changed or both; without beams."""
    rankings: tuple[_Ranking, ...]

    @classmethod
    def of(cls, rows: Collection[Row], staging: Staging, vocab_size: int | None = None) -> "SamplingInput":
        """The parameters of `rows`, which the next `send` fills; which of them go together is settled here, on the host.

        `vocab_size` is the logits' width, needed where a sequence has a grammar. What a sequence that `reads_tokens` depends on
        is read from its `token_ids` and its `matcher` as they are now.
        """
        rows = list(rows)
        params = [row.sequence.request.params for row in rows]
        # numpy reads nested lists in a third of the time that torch takes.
        shares = np.array(
            ([p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]), dtype=np.float32
        )
        numbers = np.array(
            (
                [max(p.top_k, 0) for p in params],
                [signed64(p.seed) for p in params],
                [row.choice for row in rows],
                [row.index for row in rows],
            ),
            dtype=np.int64,
        )
        temperature, top_p, min_p = staging.add(shares)
        top_k, seed, choice, index = staging.add(numbers)
        return cls(
            params=params,
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            top_k=top_k,
            seed=seed,
            choice=choice,
            index=index,
            groups=_groups(rows, staging, vocab_size),
            rankings=_rankings(rows, staging, vocab_size),
        )


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was chosen."""

    token_ids: list[int]
    """One per row; -1 where the row failed."""
    failed: dict[int, str]
    """Row -> why it has no token."""
    logprobs: dict[int, TokenLogprobs]
    """Row -> log probabilities where they are asked for; tokens of probability 0 are not among `top`. Of a row with beams `top`
    holds the likeliest continuations, without stop ids below min_tokens, and the token is the first of them."""


class _Ranked(NamedTuple):
    """Log probabilities of a piece of the rows, on the device."""

    rows: list[int]
    num_top: list[int]
    chosen: Tensor
    """`[n]` float32."""
    top: Tensor
    """`[n, k]` float32."""
    ids: Tensor
    """`[n, k]` int64."""


@dataclass(frozen=True, slots=True)
class Pending:
    """What was launched and is on its way to the host."""

    token_ids: Tensor
    """[R] int64 on the device; -1 where the row failed. No view of the logits, which the next step may overwrite."""
    _params: list[SamplingParams]
    _ranked: list[_Ranked]
    _reading: Reading

    @classmethod
    def of(cls, token_ids: Tensor, params: list[SamplingParams], ranked: list[_Ranked]) -> "Pending":
        """Start the copy of all of it at once."""
        flat = token_ids
        if ranked:  # float64 holds every id and every float32
            parts = (part for piece in ranked for part in (piece.chosen, piece.top, piece.ids))
            flat = torch.cat([token_ids.double(), *(part.flatten().double() for part in parts)])
        return cls(token_ids, params, ranked, Reading(flat))

    def read(self) -> SamplerOutput:
        """Wait for the copy, not for what was launched since."""
        flat = self._reading.wait()
        chosen = flat[: len(self._params)].astype(np.int64).tolist()
        logprobs = _unpack(flat[len(self._params) :], self._ranked)
        failed = {row: why_none_is_left(self._params[row]) for row, token_id in enumerate(chosen) if token_id < 0}
        return SamplerOutput(chosen, failed, {row: found for row, found in logprobs.items() if row not in failed})


def sample(logits: Tensor, sampling: SamplingInput) -> SamplerOutput:
    """Choose one id per row of `logits` [R, vocab] float32, which stay as they are; one read by the host."""
    return launch(logits, sampling).read()


def launch(logits: Tensor, sampling: SamplingInput) -> Pending:
    """The same without the read, but for top-k and top-p, which look at the device to see whether they have ranked enough."""
    fast = sampling_kernels(logits.device)
    # The largest value tells of NaN too: it spreads. So this one pass serves greedy rows and finds broken ones.
    largest, token_ids = fast.largest(logits)
    drawn = any(group.width is not None for group in sampling.groups)
    uniform = fast.uniform(sampling.seed, sampling.choice, sampling.index) if drawn else None
    for group in sampling.groups:
        for start, rows in _pieces(group.rows, logits):
            values = logits.index_select(0, rows)  # four times as fast as logits[rows]
            if group.changes:
                group.changes.apply(values, start)
                # No change mends a broken row: NaN stays, and infinity stays or becomes NaN.
                largest[rows], token_ids[rows] = fast.largest(values)
            if group.width is not None:
                assert uniform is not None
                token_ids[rows] = _draw(values, sampling, group, rows, uniform[rows])
    ranked = [piece for ranking in sampling.rankings for piece in _rank_all(logits, ranking, token_ids, largest)]
    return Pending.of(torch.where(largest.isfinite(), token_ids, -1), sampling.params, ranked)


def score(logits: Tensor, target_ids: Items[int], num_top: Collection[int]) -> list[TokenLogprobs]:
    """Log probabilities of given tokens: row i of `logits` [P, vocab] scores `target_ids[i]` and its `num_top[i]` likeliest.

    Computed in pieces, so that it needs little memory beside the logits, of any float dtype. Rows of NaN give NaN.
    """
    staging = staging_for(logits.device)
    targets = staging.add(np.array(target_ids, dtype=np.int64))
    staging.send()
    tops, order = list(num_top), list(range(len(logits)))
    scored: list[TokenLogprobs] = []
    for start, ids in _pieces(targets, logits):
        stop = start + len(ids)
        found = _rank(logits[start:stop].float().log_softmax(1), order[start:stop], tops[start:stop], ids)
        flat = torch.cat([part.flatten().double() for part in found[2:]])
        scored.extend(_unpack(Reading(flat).wait(), [found]).values())
    return scored


def signed64(seed: int) -> int:
    """The 64-bit pattern of `seed` as int64 holds it: two's complement."""
    return (seed + 2**63) % 2**64 - 2**63


def _groups(rows: list[Row], staging: Staging, vocab_size: int | None) -> tuple[_Group, ...]:
    """Rows by how they are drawn and whether their logits are changed; rows of neither kind are in none."""
    found: defaultdict[tuple[str, bool, bool], list[int]] = defaultdict(list)
    for row, (sequence, _, index) in enumerate(rows):
        params = sequence.request.params
        changed = is_changed(sequence, index)
        kind = _kind(params.temperature, params.top_k, params.top_p)
        if (changed or kind != "greedy") and not params.beam_width:
            found[kind, params.min_p > 0 and kind != "greedy", changed].append(row)
    groups = []
    for (kind, has_min_p, changed), members in found.items():
        widths = {"greedy": None, "plain": 0, "top_p": _MAX_WIDTH}
        if kind == "top_k":
            widths[kind] = min(max(rows[row].sequence.request.params.top_k for row in members) + 1, _MAX_WIDTH)
        changes = (
            LogitChanges.of([(rows[r].sequence, rows[r].index) for r in members], staging, vocab_size) if changed else None
        )
        groups.append(_Group(staging.add(np.array(members)), widths[kind], has_min_p, changes))
    return tuple(groups)


def _kind(temperature: float, top_k: int, top_p: float) -> str:
    if temperature < _LEAST_TEMPERATURE:
        return "greedy"
    if top_k > 0:
        return "top_k"
    return "top_p" if top_p < 1 else "plain"


def _rankings(rows: list[Row], staging: Staging, vocab_size: int | None) -> tuple[_Ranking, ...]:
    """Rows with beams, and other rows that ask for log probabilities."""
    found: defaultdict[bool, list[tuple[int, int]]] = defaultdict(list)
    for row, (sequence, _, _) in enumerate(rows):
        params = sequence.request.params
        if params.beam_width:
            found[True].append((num_candidates(params.beam_width, len(sequence.stop_token_ids)), row))
        elif params.logprobs is not None:
            found[False].append((params.logprobs, row))
    rankings = []
    for is_beam, members in found.items():
        num_top, order = [list(column) for column in zip(*sorted(members), strict=True)]
        changes = LogitChanges.of([(rows[r].sequence, rows[r].index) for r in order], staging, vocab_size) if is_beam else None
        rankings.append(_Ranking(staging.add(np.array(order)), num_top, order, changes, is_beam))
    return tuple(rankings)


def _pieces(rows: Tensor, logits: Tensor) -> list[tuple[int, Tensor]]:
    """`rows` in pieces that are worked on at once, each with where it starts."""
    size = max(1, _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS_GPU) // logits.shape[1])
    return [(start, rows[start : start + size]) for start in range(0, len(rows), size)]


def _draw(values: Tensor, sampling: SamplingInput, group: _Group, rows: Tensor, uniform: Tensor) -> Tensor:
    """Ids [n] drawn for `rows` [n] of a group, whose changed logits are `values` [n, vocab]."""
    temperature = sampling.temperature[rows]
    min_p = sampling.min_p[rows] if group.has_min_p else None
    if not group.width:
        return sampling_kernels(values.device).draw(values, temperature, uniform, min_p=min_p)
    top_k, top_p = sampling.top_k[rows], sampling.top_p[rows]
    return kernel.draw_truncated(values, temperature, top_k, top_p, uniform, min_p=min_p, width=group.width)


def _rank_all(logits: Tensor, ranking: _Ranking, token_ids: Tensor, largest: Tensor) -> list[_Ranked]:
    """Log probabilities piece by piece; rows with beams get their token here."""
    found = []
    for start, rows in _pieces(ranking.rows, logits):
        log_probs = logits.index_select(0, rows).log_softmax(1)
        order, num_top = (part[start : start + len(rows)] for part in (ranking.order, ranking.num_top))
        if ranking.changes:
            ranking.changes.apply(log_probs, start)
        piece = _rank(log_probs, order, num_top, None if ranking.is_beam else token_ids[rows])
        if ranking.is_beam:
            token_ids[rows], largest[rows] = piece.ids[:, 0], piece.chosen
        found.append(piece)
    return found


def _rank(log_probs: Tensor, rows: list[int], num_top: list[int], token_ids: Tensor | None) -> _Ranked:
    """Those of `token_ids` [n], or of the likeliest, and as many of the likeliest as the row that wants most asks for."""
    top, ids = kernel.top(log_probs, max(num_top))
    chosen = top[:, 0] if token_ids is None else log_probs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return _Ranked(rows, num_top, chosen, top, ids)


def _unpack(flat: np.ndarray, ranked: list[_Ranked]) -> dict[int, TokenLogprobs]:
    """Row -> log probabilities, from what `ranked` holds on the device, laid end to end."""
    found: dict[int, TokenLogprobs] = {}
    for rows, num_top, *tensors in ranked:
        sizes = np.cumsum([tensor.numel() for tensor in tensors])
        chosen, top, ids = (
            part.reshape(tensor.shape) for part, tensor in zip(np.split(flat[: sizes[-1]], sizes[:-1]), tensors, strict=True)
        )
        flat = flat[sizes[-1] :]
        is_possible = top > -np.inf
        for i, (row, count) in enumerate(zip(rows, num_top, strict=True)):
            keep = is_possible[i, :count]
            likeliest = zip(ids[i, :count][keep].astype(np.int64).tolist(), top[i, :count][keep].tolist(), strict=True)
            found[row] = TokenLogprobs(float(chosen[i]), tuple(likeliest))
    return found
