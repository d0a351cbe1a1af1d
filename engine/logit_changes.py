"""What a request wants changed in its logits: bias, banned and allowed ids, min_tokens, penalties, a grammar's mask.

Relies on the token ids that sequences know, and keeps nothing between steps: so a preempted, forked or resumed sequence is
penalised as if nothing had happened. Tensors hold one entry for each (row, token id) that changes, not a row of the vocabulary.
The arithmetic is in kernels/sampling.py; which rows are changed together, and what is chosen, is settled in sampler.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sequence import Sequence
from engine.staging import Staging
from kernels import sampling as kernel

_ID_BITS = 32
_NO_ID = 2**_ID_BITS - 1
"""Beyond any vocabulary."""
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def is_changed(sequence: Sequence, index: int) -> bool:
    """Whether anything changes the logits of the sequence's output token `index`; for most rows the answer is no."""
    params = sequence.request.params
    return bool(
        index < params.min_tokens
        or sequence.matcher is not None
        or params.repetition_penalty != 1  # as in _is_penalised: a call for every row costs as much as all of this
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.banned_token_ids
        or params.allowed_token_ids
    )


def why_none_is_left(params: SamplingParams) -> str:
    """One line for a row that has no token to choose, naming the fields that can be the cause."""
    fields = {
        "min_tokens": params.min_tokens,
        "allowed_token_ids": params.allowed_token_ids,
        "banned_token_ids": params.banned_token_ids,
        "logit_bias": params.logit_bias,
        "repetition_penalty": params.repetition_penalty != 1,
        "response_format": params.grammar,
    }
    suspects = " and ".join(name for name, is_used in fields.items() if is_used)
    broken = "logits: NaN, infinity or nothing above -inf, from the model or its dtype"
    return f"{broken}; or {suspects} left no token to choose: relax it" if suspects else broken


@dataclass(frozen=True, slots=True)
class _Entries:
    """Numbers for single logits."""

    slots: np.ndarray
    """`[m]` the entries' rows, ascending, on the host: where a piece of the rows begins and ends."""
    rows: Tensor
    """The same, int64."""
    columns: tuple[Tensor, ...]
    """Each `[m, ...]`."""

    @classmethod
    def of(cls, slots: np.ndarray, staging: Staging, *columns: np.ndarray) -> "_Entries | None":
        """Entries that the next `send` fills; None if there are none."""
        if not len(slots):
            return None
        return cls(slots, staging.add(slots), tuple(staging.add(column) for column in columns))

    def between(self, start: int, stop: int) -> tuple[Tensor, ...] | None:
        """Rows counted from `start`, and columns, of the entries in rows [start, stop); None if there are none."""
        first, last = np.searchsorted(self.slots, (start, stop))
        return (self.rows[first:last] - start, *(c[first:last] for c in self.columns)) if first < last else None


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """The changes of some rows, in their order, on the logits' device."""

    allowed: _Entries | None
    """Ids."""
    added: _Entries | None
    """Ids and what is added: biases, and -inf for what is banned."""
    penalties: _Entries | None
    """Ids, factors, and what is taken away."""
    mask: _Entries | None
    """One entry for each row with a grammar: its words."""

    @classmethod
    def of(cls, rows: list[tuple[Sequence, int]], staging: Staging, vocab_size: int | None) -> "LogitChanges":
        """The changes of (sequence, output index) pairs, which the next `send` fills.

        `vocab_size`, the logits' width, is needed where one has a grammar.
        """
        return cls(_allowed(rows, staging), _added(rows, staging), _penalties(rows, staging), _mask(rows, staging, vocab_size))

    def apply(self, logits: Tensor, start: int = 0) -> None:
        """Change `logits` [n, vocab] float32, which are those of rows start to start + n, in place."""
        stop = start + len(logits)
        for entries, change in (
            (self.allowed, kernel.allow_only),
            (self.added, kernel.add),
            (self.penalties, kernel.penalize),
            (self.mask, kernel.allow_set_bits),
        ):
            if entries and (piece := entries.between(start, stop)):
                change(logits, *piece)


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _allowed(rows: list[tuple[Sequence, int]], staging: Staging) -> _Entries | None:
    allowed = [sequence.request.params.allowed_token_ids for sequence, _ in rows]
    slots = np.repeat(np.arange(len(rows)), [len(ids) for ids in allowed])
    return _Entries.of(slots, staging, _known(np.fromiter(chain.from_iterable(allowed), np.float64)))


def _added(rows: list[tuple[Sequence, int]], staging: Staging) -> _Entries | None:
    """Biases and bans; an infinity that meets a bias stays one."""
    pairs: list[Iterable[tuple[int, float]]] = []
    lengths = []
    for sequence, index in rows:
        params = sequence.request.params
        banned = params.banned_token_ids + (tuple(sequence.stop_token_ids) if index < params.min_tokens else ())
        pairs += (params.logit_bias, zip(banned, repeat(-np.inf)))
        lengths.append(len(params.logit_bias) + len(banned))
    ids, values = np.fromiter(chain.from_iterable(chain.from_iterable(pairs)), np.float64).reshape(-1, 2).T
    return _Entries.of(np.repeat(np.arange(len(rows)), lengths), staging, _known(ids), values.astype(np.float32))


def _known(ids: np.ndarray) -> np.ndarray:
    """Ids as int64, read as float64, which numbers of any size fit; what cannot be an id is beyond any vocabulary."""
    return np.where((ids >= 0) & (ids < _NO_ID), ids, _NO_ID).astype(np.int64)


def _penalties(rows: list[tuple[Sequence, int]], staging: Staging) -> _Entries | None:
    """Each distinct token of the penalised rows, found by sorting (row, id, is output) as one number for all rows at once.

    64 rows of 1,000 tokens take 3.6 ms, a third of it to read the lists (one core of an AMD EPYC, numpy 2, November 2026).
    """
    penalised = [(slot, s, s.request.params) for slot, (s, _) in enumerate(rows) if _is_penalised(s.request.params)]
    if not penalised:
        return None
    tokens: list[list[int]] = []
    lengths: list[int] = []
    for _, sequence, params in penalised:
        # The prompt counts for repetition only; without, its tokens are not looked at.
        skipped = 0 if params.repetition_penalty != 1 else sequence.num_prompt_tokens
        tokens.append(sequence.token_ids[skipped:])
        lengths += (sequence.num_prompt_tokens - skipped, len(sequence.token_ids) - sequence.num_prompt_tokens)
    keys = np.fromiter(chain.from_iterable(tokens), np.int64, sum(lengths))
    keys <<= 1
    segments = [(owner << (_ID_BITS + 1)) + is_output for owner in range(len(penalised)) for is_output in (0, 1)]
    keys += np.repeat(np.array(segments), lengths)
    keys.sort()
    starts = np.flatnonzero(np.diff(keys >> 1, prepend=-1))
    counts = np.add.reduceat(keys & 1, starts) if len(keys) else keys
    pairs = keys[starts] >> 1
    slots, owner = np.array([slot for slot, _, _ in penalised]), pairs >> _ID_BITS
    factor = np.array([p.repetition_penalty for _, _, p in penalised]).clip(_LEAST, _MOST).astype(np.float32)
    frequency = np.array([p.frequency_penalty for _, _, p in penalised], np.float32)
    presence = np.array([p.presence_penalty for _, _, p in penalised], np.float32)
    minus = frequency[owner] * counts.astype(np.float32) + presence[owner] * (counts > 0)
    return _Entries.of(slots[owner], staging, pairs & (2**_ID_BITS - 1), factor[owner], minus)


def _mask(rows: list[tuple[Sequence, int]], staging: Staging, vocab_size: int | None) -> _Entries | None:
    """The words that the matchers write; a matcher stands where its sequence stands, so the words are made anew each step."""
    matchers = [(slot, sequence.matcher) for slot, (sequence, _) in enumerate(rows) if sequence.matcher is not None]
    if not matchers:
        return None
    assert vocab_size, "a row with a grammar needs the vocabulary's size"
    words = torch.full((len(matchers), -(-vocab_size // 32)), -1, dtype=torch.int32)
    for row, (_, matcher) in zip(words, matchers, strict=True):
        matcher.fill(row)
    return _Entries.of(np.array([slot for slot, _ in matchers]), staging, words.numpy())
