"""A step in the making: what is left of its budgets, whose tokens it computes, what was counted on the way.

Relies on `scheduler` to put sequences in, in the order that it decides. Leaves blocks to `tables`; the finished decision is a
`SchedulerOutput`.
"""

from dataclasses import dataclass, field

from engine.config import SchedulerConfig
from engine.decision import BlockMoves, ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence
from engine.stats import SlotCounts

_UNLIMITED = 1 << 62


@dataclass(slots=True)
class Draft:
    """Everything of a step that is not decided at once."""

    budget: int
    """Tokens that may still be computed."""
    scorable: int
    """Prompt positions that may still be scored."""
    is_chunked: bool
    suspect: str = ""
    """The request that the step runs alone; empty when it may run all."""
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    num_decodes: int = 0
    """The first so many of `scheduled` decode."""
    preempted: list[Sequence] = field(default_factory=list)
    num_swap_preemptions: int = 0
    num_preempted_tokens: int = 0
    num_swapped_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0

    @classmethod
    def of(cls, config: SchedulerConfig) -> "Draft":
        """An empty one. Only `continuous` has a token budget, and chunks."""
        has_budget = config.scheduling == "continuous"
        budget = config.max_num_batched_tokens if has_budget else _UNLIMITED
        return cls(budget, config.max_scored_tokens, config.chunked_prefill and has_budget)

    @property
    def prefills(self) -> list[ScheduledSequence]:
        """What goes on or starts beside the decodes."""
        return self.scheduled[self.num_decodes :]

    def chunk(self, sequence: Sequence, gap: int) -> int:
        """How many tokens of its gap a sequence may compute with what the step has left.

        Without chunking it is all or nothing, and a gap above the whole budget has a step to itself. A prompt whose log
        probabilities are asked for is always chunked: each of its positions costs a row of logits.
        """
        budget = max(self.budget, 0)
        if is_scoring(sequence):
            if _num_unscored(sequence) > self.scorable:
                # What was scored before a preemption and is computed again costs nothing.
                gap = min(gap, max(len(sequence.prompt_logprobs) - (sequence.num_tokens - gap), 0) + self.scorable)
            return min(gap, budget)
        if gap <= budget:
            return gap
        if self.is_chunked:
            return budget
        return gap if not self.scheduled else 0

    def put(self, sequence: Sequence, num_tokens: int) -> None:
        """Put in the next tokens of a sequence, whose table covers them."""
        known = sequence.num_tokens
        computed = sequence.num_computed_tokens + num_tokens
        may_sample = sequence.num_output_tokens < sequence.request.params.max_tokens and known < sequence.num_tokens_limit
        num_samples = sequence.width if computed == known and may_sample else 0
        num_scored = 0
        if sequence.request.params.prompt_logprobs is not None:
            end = min(computed, sequence.num_prompt_tokens - 1)
            num_scored = max(end - max(sequence.num_computed_tokens, len(sequence.prompt_logprobs)), 0)
        self.scheduled.append(ScheduledSequence(sequence, num_tokens, num_samples, num_scored))
        self.budget -= num_tokens
        self.scorable -= num_scored
        sequence.num_computed_tokens = computed
        sequence.num_in_flight += num_samples > 0

    def count_hits(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Count what the prefix cache was asked for a sequence that starts, and what it held."""
        self.num_prefix_queries += sequence.num_tokens
        self.num_prefix_hits += num_cached_tokens
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = min(num_cached_tokens, sequence.num_prompt_tokens)

    def finish(self, moves: BlockMoves, slots: SlotCounts) -> SchedulerOutput:
        """The decision."""
        num_prefill_tokens = sum(item.num_tokens for item in self.prefills)
        return SchedulerOutput(
            scheduled=self.scheduled,
            preempted=tuple(self.preempted),
            moves=moves,
            slots=slots,
            num_tokens=num_prefill_tokens + self.num_decodes,
            num_prefill_tokens=num_prefill_tokens,
            num_swap_preemptions=self.num_swap_preemptions,
            num_preempted_tokens=self.num_preempted_tokens,
            num_swapped_tokens=self.num_swapped_tokens,
            num_prefix_queries=self.num_prefix_queries,
            num_prefix_hits=self.num_prefix_hits,
            suspect=self.suspect,
        )


def is_scoring(sequence: Sequence) -> bool:
    """Whether log probabilities of its prompt are missing, so that all of it must be computed."""
    return sequence.request.params.prompt_logprobs is not None and _num_unscored(sequence) > 0


def _num_unscored(sequence: Sequence) -> int:
    """Prompt positions whose log probabilities are still to be computed."""
    return sequence.num_prompt_tokens - 1 - len(sequence.prompt_logprobs)
