"""Who runs next, with how many tokens, and who gives way when blocks run out.

One idea: a sequence has tokens it knows and tokens it has computed, and a step spends its token budget on closing gaps. Prompt,
chunk, decode, resumption after a preemption and continuation of an earlier attempt are the same gap and the same lines.

Pure bookkeeping over `BlockPool`: no tensors, no clock, no I/O. `schedule()` decides, the caller computes and samples,
`update()` records. What fits at all is refused by `core` before it gets here; why a sequence ends is answered in `stopping`.
"""

from bisect import bisect_left, insort
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter

from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.request import FinishReason
from engine.reservation import Fit, fit
from engine.sequence import Sequence
from engine.stats import KVCounts, SlotCounts
from engine.stopping import check_stop


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step: positions num_computed_tokens .. num_computed_tokens + num_tokens."""

    sequence: Sequence
    num_tokens: int
    samples: bool
    """After this step every known token is computed and one more may follow: a token is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The decision of one step. Block tables already cover it; token counts advance in `Scheduler.update`."""

    scheduled: tuple[ScheduledSequence, ...]
    """In the order of (priority, arrival), running ones before those that start now."""
    preempted: tuple[Sequence, ...]
    slots: SlotCounts
    num_tokens: int
    num_prefill_tokens: int
    num_preempted_tokens: int
    """Computed positions given up by `preempted`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that is over; it holds no blocks any more."""

    sequence: Sequence
    reason: FinishReason
    detail: str


class _Blocked(Enum):
    """Why the head of the waiting sequences did not start although a slot is free."""

    MEMORY = "no_memory"
    BUDGET = "no_budget"


_order = attrgetter("order")


def _reverse_order(sequence: Sequence) -> tuple[int, int]:
    priority, arrival = sequence.order
    return -priority, -arrival


class Scheduler:
    """Continuous batching: at every step the running sequences go on and waiting ones take free slots, first come first served.

    Invariants:
    1. Every live sequence is in exactly one of two sorted lists, and each list ends with the one that is taken next: `_running`
       with the next to be preempted, `_waiting` with the next to start. So a step never looks at what waits behind the head.
    2. Nothing overtakes: of two sequences of one priority, the later does not run while the earlier waits.
    3. The first running sequence can preempt all others and no sequence outgrows the pool: a step with work computes something.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._max_sequence_tokens = config.max_sequence_tokens
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._in_flight: tuple[ScheduledSequence, ...] = ()

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold nothing: new or preempted."""
        return len(self._waiting)

    @property
    def head(self) -> Sequence | None:
        """The sequence that starts next."""
        return self._waiting[-1] if self._waiting else None

    def holds(self, request_id: str) -> bool:
        """Whether the request waits or runs."""
        return request_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn. `core` has refused what is empty or longer than a sequence may be."""
        assert 0 < sequence.num_tokens <= self._max_sequence_tokens, f"a sequence of {sequence.num_tokens} tokens is added"
        assert sequence.request.request_id not in self._sequences, f"request {sequence.request.request_id} is added twice"
        self._sequences[sequence.request.request_id] = sequence
        insort(self._waiting, sequence, key=_reverse_order)

    def abort(self, request_id: str) -> bool:
        """Forget a sequence and free its blocks at once, also between `schedule` and `update`; False if it is unknown.

        Failing takes the same road: whoever fails a sequence says so to the outside and aborts it here.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._remove(sequence)
        return sequence is not None

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and extend the block tables of those it runs.

        Running sequences come first, each with as much of its gap as the budget allows; one that finds the pool dry preempts
        from the end of the order. Then waiting ones start, up to the first that does not fit.
        """
        scheduled: list[ScheduledSequence] = []
        preempted: dict[Sequence, int] = {}
        budget = self._continue_running(scheduled, preempted)
        blocked = self._start_waiting(scheduled, budget)
        self._in_flight = tuple(scheduled)
        prefills = [item.num_tokens for item in scheduled if item.sequence.is_prefilling]
        return SchedulerOutput(
            scheduled=self._in_flight,
            preempted=tuple(preempted),
            slots=self._count_slots(len(scheduled), len(prefills), blocked),
            num_tokens=sum(prefills) + len(scheduled) - len(prefills),
            num_prefill_tokens=sum(prefills),
            num_preempted_tokens=sum(preempted.values()),
        )

    def update(self, output: SchedulerOutput, token_ids: abc.Sequence[int | None]) -> list[Ended]:
        """Record a step: what was computed, and the sampled token of each scheduled sequence, None where it does not sample.

        Returns those that end with it; their blocks are free. Tokens of sequences aborted since `schedule` are dropped.
        """
        assert output.scheduled is self._in_flight, "update() does not follow its schedule()"
        self._in_flight = ()
        ended: list[Ended] = []
        for item, token_id in zip(output.scheduled, token_ids, strict=True):
            sequence = item.sequence
            if self._sequences.get(sequence.request.request_id) is not sequence:
                continue
            assert (token_id is not None) is item.samples, (
                f"request {sequence.request.request_id}: a token is missing or one too many"
            )
            sequence.num_computed_tokens += item.num_tokens
            if token_id is not None:
                sequence.token_ids.append(token_id)
            elif sequence.gap:
                continue  # a chunk: the rest of what it knows comes first
            stop = check_stop(sequence, self._max_sequence_tokens, self._config.max_model_len)
            if stop:
                self._remove(sequence)
                ended.append(Ended(sequence, stop.reason, stop.detail))
        return ended

    def idle_slots(self) -> SlotCounts:
        """The slots when there is no step."""
        return SlotCounts(no_work=self._config.max_slots)

    def kv_counts(self) -> KVCounts:
        """Blocks and positions as they are now."""
        return KVCounts(
            capacity_blocks=self._pool.num_blocks,
            used_blocks=self._pool.num_used_blocks,
            free_blocks=self._pool.num_free_blocks,
            allocated_tokens=self._pool.num_used_blocks * self._pool.block_size,
            filled_tokens=sum(sequence.num_computed_tokens for sequence in self._running),
        )

    def check(self) -> None:
        """Audit everything; AssertionError names what is wrong. For tests, and for the engine when it is idle."""
        ahead = {item.sequence: item.num_tokens for item in self._in_flight}
        for sequence in self._running:
            num_tokens = sequence.num_computed_tokens + ahead.get(sequence, 0)
            assert len(sequence.block_table) == self._pool.blocks_for(num_tokens) > 0, (
                f"request {sequence.request.request_id} holds {len(sequence.block_table)} blocks for {num_tokens} tokens"
            )
        for sequence in self._waiting:
            assert not sequence.block_table, f"request {sequence.request.request_id} waits and holds blocks"
            assert not sequence.num_computed_tokens, f"request {sequence.request.request_id} waits and has computed tokens"
        self._pool.check(sequence.block_table for sequence in self._running)
        assert len(self._running) <= self._config.max_slots, f"{len(self._running)} run in {self._config.max_slots} slots"
        assert self._running == sorted(self._running, key=_order), "running sequences are out of order"
        assert self._waiting == sorted(self._waiting, key=_reverse_order), "waiting sequences are out of order"
        live = {*self._running, *self._waiting}
        assert live == set(self._sequences.values()), "a live sequence is lost or a dead one is kept"
        assert len(live) == self.num_running + self.num_waiting, "a sequence is in two places"

    def _continue_running(self, scheduled: list[ScheduledSequence], preempted: dict[Sequence, int]) -> int:
        """Schedule the running sequences in order, preempting from the end where blocks are short; returns the budget left."""
        budget = self._config.max_num_batched_tokens
        while len(scheduled) < len(self._running):
            sequence = self._running[len(scheduled)]
            num_tokens = self._chunk(sequence, budget)
            if not num_tokens or not self._extend(sequence, num_tokens, preempted):
                break
            scheduled.append(self._part(sequence, num_tokens))
            budget -= num_tokens
        return budget

    def _start_waiting(self, scheduled: list[ScheduledSequence], budget: int) -> _Blocked | None:
        """Start waiting sequences until one does not fit; why it did not, or None when nothing waits or no slot is free.

        One that was preempted in this step does not come back in it: it needs more than it gave up.
        """
        while self._waiting and len(self._running) < self._config.max_slots:
            sequence = self._waiting[-1]
            num_tokens = self._chunk(sequence, budget)
            if not num_tokens:
                return _Blocked.BUDGET
            watermark = self._config.watermark_blocks if self._running else 0
            if fit(sequence.num_tokens, self._pool, watermark) is not Fit.NOW:
                return _Blocked.MEMORY
            insort(self._running, self._waiting.pop(), key=_order)
            sequence.block_table = self._pool.allocate(self._pool.blocks_for(num_tokens))
            scheduled.append(self._part(sequence, num_tokens))
            budget -= num_tokens
        return None

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How many tokens of its gap a sequence may compute with `budget` left.

        Without chunking it is all or nothing, and a gap above the whole budget has a step to itself.
        """
        gap = sequence.gap
        if gap <= budget:
            return gap
        if self._config.chunked_prefill:
            return max(budget, 0)
        return gap if budget == self._config.max_num_batched_tokens else 0

    def _extend(self, sequence: Sequence, num_tokens: int, preempted: dict[Sequence, int]) -> bool:
        """Give a running sequence the blocks for its next tokens, preempting from the end of the order while the pool is short.

        False when the sequence itself had to give way. What is scheduled already comes before it and is never preempted.
        """
        num_missing = self._pool.blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_table)
        if num_missing <= 0:
            return True
        while num_missing > self._pool.num_free_blocks:
            victim = self._running.pop()
            preempted[victim] = victim.num_computed_tokens
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += self._pool.allocate(num_missing)
        return True

    def _part(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        samples = (
            num_tokens == sequence.gap
            and sequence.num_output_tokens < sequence.request.params.max_tokens
            and sequence.num_tokens < self._max_sequence_tokens
        )
        return ScheduledSequence(sequence, num_tokens, samples)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting without blocks; it keeps its tokens and its arrival, and computes again when resumed."""
        self._free_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_cached_tokens = 0
        sequence.num_preemptions += 1
        insort(self._waiting, sequence, key=_reverse_order)

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        if not _discard(self._running, sequence, _order):
            _discard(self._waiting, sequence, _reverse_order)
        self._free_blocks(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_table)
        sequence.block_table = []

    def _count_slots(self, num_scheduled: int, num_prefills: int, blocked: _Blocked | None) -> SlotCounts:
        num_idle = self._config.max_slots - len(self._running)
        num_blocked = min(num_idle, len(self._waiting))
        num_unscheduled = len(self._running) - num_scheduled
        return SlotCounts(
            decode=num_scheduled - num_prefills,
            prefill=num_prefills,
            no_memory=num_blocked if blocked is _Blocked.MEMORY else 0,
            no_budget=num_unscheduled + (num_blocked if blocked is _Blocked.BUDGET else 0),
            no_work=num_idle - num_blocked,
        )


def _discard(sequences: list[Sequence], sequence: Sequence, key: Callable[[Sequence], tuple[int, int]]) -> bool:
    """Remove a sequence from a list sorted by `key`; False when it is not in it."""
    index = bisect_left(sequences, key(sequence), key=key)
    is_found = index < len(sequences) and sequences[index] is sequence
    if is_found:
        del sequences[index]
    return is_found
