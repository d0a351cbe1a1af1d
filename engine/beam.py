"""Beam search over one request: which continuations of its beams live on, which are done, and when none can get better.

The rules are those of transformers' `generate` with `num_beams` (length penalty 1, early stopping off), so that scores and
sequences agree. Pure: takes log probabilities, gives back decisions. The scheduler turns them into forks and freed blocks.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from engine.request import FinishReason


class Hypothesis(NamedTuple):
    """An output that is done."""

    score: float
    """Sum of its log probabilities divided by their number."""
    token_ids: tuple[int, ...]
    reason: FinishReason


class Survivor(NamedTuple):
    """A beam of the next step: the beam it continues, by its place, and the token it continues with."""

    parent: int
    token_id: int


def num_candidates(width: int, num_stop_ids: int) -> int:
    """Likeliest tokens of each beam that a step looks at: enough that `width` go on whichever of them end."""
    return max(2, 1 + num_stop_ids) * width


class BeamSearch:
    """The state of one search beside the beams' tokens."""

    def __init__(self, width: int, stop_token_ids: frozenset[int]) -> None:
        self.width = width
        self._stop_token_ids = stop_token_ids
        self.restart()

    def restart(self) -> None:
        """Forget everything: the search begins again from the prompt."""
        self.scores = [0.0]
        """Sum of log probabilities of each beam."""
        self.hypotheses: list[Hypothesis] = []
        """At most `width`, best first."""

    def advance(
        self, candidates: Sequence[Sequence[tuple[int, float]]], outputs: Sequence[Sequence[int]], *, is_last: bool
    ) -> list[Survivor]:
        """One step: from each beam's likeliest (token id, log probability) and its output so far to the next beams.

        Returns the `width` survivors, best first, or none when the search is over; `hypotheses` are its outcome then.
        `is_last`: with its next token every beam is as long as it may be.
        """
        ranked = self._ranked(candidates)
        survivors, scores = [], []
        length = len(outputs[0]) + 1
        finished = []
        for rank, (score, parent, token_id) in enumerate(ranked):
            is_stop = token_id in self._stop_token_ids
            if not (is_stop or is_last):
                survivors.append(Survivor(parent, token_id))
                scores.append(score)
            elif rank < self.width:
                reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
                finished.append(Hypothesis(score / length, (*outputs[parent], token_id), reason))
        self.hypotheses = sorted([*self.hypotheses, *finished], key=lambda h: h.score, reverse=True)[: self.width]
        self.scores = scores[: self.width]
        return survivors[: self.width] if self._can_improve(length) else []

    def arrange(self, places: Sequence[int]) -> None:
        """Say where in the next step's candidates each survivor will stand, best first."""
        self.scores = [score for _, score in sorted(zip(places, self.scores, strict=True))]

    def _ranked(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, int, int]]:
        """(score, beam, token id) of the best continuations over all beams."""
        totals = [
            (self.scores[beam] + logprob, beam, token_id)
            for beam, found in enumerate(candidates)
            for token_id, logprob in found
        ]
        return sorted(totals, key=itemgetter(0), reverse=True)[: num_candidates(self.width, len(self._stop_token_ids))]

    def _can_improve(self, length: int) -> bool:
        """Whether a running beam could still beat the worst of a full set of hypotheses."""
        if not self.scores:
            return False
        return len(self.hypotheses) < self.width or self.scores[0] / length > self.hypotheses[-1].score
