"""What one step counted: where each slot went, how full the KV cache is, where the time went."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCounts:
    """Slots of one step by state; they sum to `max_slots`."""

    decode: int = 0
    prefill: int = 0
    finished: int = 0
    """Held by a request that has ended (request-level scheduling only)."""
    no_memory: int = 0
    """A request waits, but its blocks do not fit."""
    no_budget: int = 0
    """A request waits, but the step's token budget is spent."""
    no_work: int = 0
    """Nothing waits."""

    @property
    def total(self) -> int:
        return self.decode + self.prefill + self.finished + self.no_memory + self.no_budget + self.no_work


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCounts:
    """Blocks and positions of the KV pool after a step."""

    capacity_blocks: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    free_blocks: int = 0
    allocated_tokens: int = 0
    """Positions in used blocks and in blocks set aside."""
    filled_tokens: int = 0
    """Positions that hold a computed token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step by part."""

    schedule_s: float = 0.0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    update_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.schedule_s + self.prepare_s + self.forward_s + self.sample_s + self.update_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """The record of one step. `num_tokens == 0` marks a report without a step (after an abort, so that gauges stay true)."""

    slots: SlotCounts
    kv: KVCounts
    times: StepTimes
    num_tokens: int
    """Tokens computed."""
    num_prefill_tokens: int
    num_generated_tokens: int
    num_running: int
    """Sequences that hold slots after the step: one, or one for each choice that is still to fork from it."""
    num_slots_taken: int
    num_waiting: int
    num_preemptions: int
    num_swap_preemptions: int = 0
    """Of those, the ones by swap; the others are computed again."""
    num_preempted_tokens: int = 0
    """Computed positions given up by preemption in this step, to be computed again."""
    num_swapped_tokens: int = 0
    """Computed positions swapped out in this step."""
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_copied_blocks: int = 0
    """Copies on write."""
    num_prefix_queries: int = 0
    """Tokens that sequences which started in this step knew, where the prefix cache was asked."""
    num_prefix_hits: int = 0
    """Of those, found in the cache."""
    num_leaked_blocks: int = 0
    """Blocks that a fault had lost, found and taken back when nothing was left."""
    num_wasted_tokens: int = 0
    """Tokens computed for sequences that ended, were aborted or preempted before these were read (run-ahead only)."""
