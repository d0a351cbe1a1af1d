"""What is counted of an engine: where its memory went; of each step where slots and time went, and how full the KV cache is."""

from dataclasses import dataclass
from typing import NamedTuple

_MIB = 1 << 20


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
class SwapTimes:
    """Seconds that the swaps of a step took, one number for each direction of each step; known once they are done."""

    out_s: tuple[float, ...] = ()
    in_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounts:
    """Bytes of the GPUs of an engine by use, as planned when it had loaded; they sum to all of it. Zeros on a CPU."""

    weights: int = 0
    kv_cache: int = 0
    activations: int = 0
    """Kept for the largest step."""
    graphs: int = 0
    other: int = 0
    """What was gone beside the weights: the driver's context, other processes."""
    free: int = 0
    """What nothing is planned for."""


class MemoryRow(NamedTuple):
    """A line of the table that says where the device's memory goes."""

    name: str
    size_bytes: int
    note: str = ""


def memory_line(row: MemoryRow) -> str:
    """A row of the table as text."""
    size = f"{row.size_bytes / _MIB:>10.1f} MiB" if row.size_bytes >= _MIB else f"{row.size_bytes:>10} B  "
    return f"{row.name:<19} {size}  {row.note}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """The record of one step. `num_tokens == 0` marks a report without a step (after an abort, so that gauges stay true)."""

    slots: SlotCounts = SlotCounts()
    kv: KVCounts = KVCounts()
    times: StepTimes = StepTimes()
    num_tokens: int = 0
    """Tokens computed."""
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_running: int = 0
    """Sequences that hold slots after the step: one, or one for each choice that is still to fork from it."""
    num_slots_taken: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    """Of those, the ones by swap; the others are computed again."""
    num_preempted_tokens: int = 0
    """Computed positions given up by preemption in this step, to be computed again."""
    num_swapped_tokens: int = 0
    """Computed positions swapped out in this step."""
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    swap_times: SwapTimes = SwapTimes()
    """Of swaps that are done; on a GPU, which goes on meanwhile, often those of an earlier step."""
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
