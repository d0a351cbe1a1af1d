"""What a step is about to do and what it sampled, in plain data.

The scheduler makes a decision; batch building, moving blocks and recording follow it.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from engine.request import FinishReason
from engine.sequence import Sequence
from engine.stats import SlotCounts


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step.

    num_computed_tokens of the sequence counts the step already: positions num_computed_tokens - num_tokens ..
    num_computed_tokens are computed.
    """

    sequence: Sequence
    num_tokens: int
    num_samples: int = 0
    """Tokens sampled from the last position: 1 when every known token is computed then, one for each choice of a prompt that
    several continue, 0 otherwise."""
    num_scored: int = 0
    """Of the positions that are followed by a prompt token, so many, the last ones, have their log probabilities computed."""


Moves = Items[tuple[int, int]]
"""(from, to) block ids."""


class BlockMoves(NamedTuple):
    """Blocks that move before a step computes, in this order.

    A block freed by a swap out may be copied or swapped to, and one that was copied from may be swapped to.
    """

    swapped_out: Moves = ()
    """(device block, host block)."""
    copied: Moves = ()
    """(device block, device block): on the first write to a shared block."""
    swapped_in: Moves = ()
    """(host block, device block)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The decision of one step. Block tables and computed counts of the sequences cover it already."""

    scheduled: Items[ScheduledSequence]
    """Decodes, then prefills that go on, then what starts; each in the order of the running sequences."""
    preempted: Items[Sequence]
    moves: BlockMoves
    slots: SlotCounts
    num_tokens: int
    num_prefill_tokens: int
    num_swap_preemptions: int = 0
    num_preempted_tokens: int = 0
    """Computed positions given up by `preempted`, to be computed again."""
    num_swapped_tokens: int = 0
    """Those that were swapped out."""
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    suspect: str = ""
    """The request that the step runs alone; empty when it may run all."""


class Ended(NamedTuple):
    """A sequence that is over. It holds no blocks, with request_level from the end of its batch on."""

    sequence: Sequence
    reason: FinishReason
    detail: str = ""
    may_retry: bool = False
    """Of an error: a fault of the engine, not of what was asked."""


Candidates = Items[tuple[int, float]]
"""A beam's likeliest continuations: (token id, log probability)."""
Sampled = int | None | list[int] | Candidates
"""What a scheduled sequence sampled: a token, nothing, a token for each choice, or a beam's candidates."""
