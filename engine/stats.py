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
    """Positions in used blocks."""
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
    """Sequences that hold a slot after the step."""
    num_waiting: int
    num_preemptions: int
    num_preempted_tokens: int
    """Computed positions given up by preemption in this step."""
