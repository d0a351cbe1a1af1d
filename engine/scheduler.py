"""Who runs next, with how many tokens, and who gives way when blocks run out.

One idea: a sequence has tokens it knows and tokens it has computed, and a step spends its token budget on closing gaps.
Prompt, chunk, prefix hit, decode, resumption, continuation of an earlier attempt: the same gap and the same lines.

Pure bookkeeping over `BlockPool`: no tensors, no clock, no I/O. `schedule()` decides, the caller moves blocks, computes and
samples, `update()` records. How much is set aside is answered in `reservation`, who comes first in `fairness`, why a sequence
ends in `stopping`, which request runs alone in `isolation`; what can never fit is refused by `admission` before it gets here.
Places and slots are kept in `lineup`, blocks in `tables`; choices and beams are made in `forks`, and a step in the making is a
`Draft`.

    policy             starts                                              goes on
    continuous         whenever a slot, blocks and budget are left         decodes, then prefills in chunks of what is left
    iteration_level    the same, whole prompts and no budget (Orca)        all
    request_level      a batch when nothing runs (FasterTransformer)       all, and slots are held until the last has ended
"""

from collections import abc
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from engine.beam import BeamSearch
from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.decision import Candidates, Ended, Sampled, ScheduledSequence, SchedulerOutput
from engine.draft import Draft, is_scoring
from engine.fairness import FairShare
from engine.forks import Forks
from engine.isolation import Isolation, is_alone
from engine.lineup import Lineup
from engine.request import Request
from engine.reservation import Fit, Reservation, fit
from engine.sequence import Order, Sequence
from engine.stats import KVCounts, SlotCounts
from engine.stopping import check_stop, ends_with_stop_id
from engine.tables import BlockTables


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What giving up and getting back KV costs, in seconds, as measured; infinite while unknown."""

    swap_s_per_block: float = float("inf")
    """Out and in again."""
    recompute_s_per_token: float = float("inf")


class _Blocked(Enum):
    """Why the head of the waiting sequences did not start although a slot is free."""

    MEMORY = "no_memory"
    BUDGET = "no_budget"


class Scheduler:
    """Decides every step of one engine.

    Invariants:
    1. Nothing overtakes: of two sequences the later in order does not start while the earlier waits.
    2. The first running sequence can preempt all others and no sequence outgrows the pool: a step with work computes something.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._tables = BlockTables(config, pool)
        self._reservation = Reservation(config)
        self._fair_share = FairShare(config.aging)
        self._is_static = config.scheduling == "request_level"
        self._num_arrived = 0
        self._lineup = Lineup(config.max_slots, self._tables)
        self._forks = Forks(config, self._lineup, self._tables)
        self._isolation = Isolation(self._lineup)
        self._in_flight: list[tuple[SchedulerOutput, set[Sequence]]] = []
        """Decisions that are not recorded yet, and whose tokens are to be dropped: ended, aborted or preempted meanwhile."""
        self.costs = PreemptionCosts()
        """The caller keeps them up to date."""

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot and blocks."""
        return len(self._lineup.running) + len(self._lineup.ended)

    @property
    def num_slots_taken(self) -> int:
        """Slots that they hold."""
        return self._lineup.num_slots_taken

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no slot: new, preempted or swapped out."""
        return len(self._lineup.waiting)

    @property
    def head(self) -> Sequence | None:
        """The sequence that starts next."""
        return self._lineup.waiting[-1] if self._lineup.waiting else None

    @property
    def first(self) -> Sequence | None:
        """The sequence that goes on first."""
        return self._lineup.running[0] if self._lineup.running else None

    def holds(self, request_id: str, choice: int) -> bool:
        """Whether that choice of the request waits or runs."""
        return any(s.choice <= choice < s.choice + s.width for s in self._lineup.live(request_id))

    def next_order(self, request: Request) -> Order:
        """The place of a request that arrives now."""
        self._num_arrived += 1
        width = max(request.params.n, request.params.beam_width)
        return self._fair_share.stamp(request, width), self._num_arrived, request.choice

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn. `admission` has refused what is empty or longer than a sequence may be."""
        request = sequence.request
        assert 0 < sequence.num_tokens <= self._config.max_sequence_tokens, (
            f"a sequence of {sequence.num_tokens} tokens is added"
        )
        assert sequence.width <= self._config.max_slots, f"a sequence of {sequence.width} choices is added"
        assert not self.holds(request.request_id, sequence.choice), f"request {request.request_id} is added twice"
        sequence.num_tokens_limit = min(sequence.num_tokens_limit, self._config.max_sequence_tokens)
        if request.params.beam_width:
            sequence.beam_search = BeamSearch(request.params.beam_width, sequence.stop_token_ids)
        if request.isolated_steps:
            self._isolation.add(sequence)
        self._lineup.add(sequence)

    def abort(self, request_id: str, choice: int | None = None, *, is_broken: bool = False) -> bool:
        """Forget a request, or one choice of it, and free its blocks at once, also between `schedule` and `update`.

        A beam search has no choices before its end: it is forgotten as a whole.

        False if it is unknown. Failing takes the same road: whoever fails a sequence says so to the outside and aborts it here,
        with `is_broken` when what it has computed must not be shared.
        """
        live = [s for s in self._lineup.live(request_id) if choice in (None, s.choice) or s.beam_search is not None]
        for sequence in live:
            if is_broken:
                self._tables.forget(sequence)
            self._remove(sequence)
        return bool(live)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and extend the block tables of those it runs.

        Running decodes go on first, then prefills, each with as much of its gap as the budget allows; a decode that finds the
        pool dry preempts from the end of the order. Then waiting ones start, up to the first that does not fit.

        While there is a suspect all this is done with it alone, and the others keep what they hold.
        """
        step = Draft.of(self._config)
        step.suspect = self._isolation.suspect(is_closed=self._is_closed)
        if step.suspect:
            self._run_alone(step)
            return self._finish(step, _Blocked.BUDGET)
        blocked = self._start_waiting(step) if self._config.prefill_first else None
        if not step.scheduled:
            self._continue_prefills(step, self._continue_decodes(step, len(self._lineup.running)))
            blocked = self._start_waiting(step)
        return self._finish(step, blocked)

    def dropped(self) -> abc.Set[Sequence]:
        """Of the oldest step that is not recorded, the sequences whose tokens `update` will drop."""
        return self._in_flight[0][1]

    def update(self, output: SchedulerOutput, sampled: abc.Sequence[Sampled]) -> list[Ended]:
        """Record the oldest step that is not recorded: the sampled token of each scheduled sequence, None where it has none.

        Returns those that end with it; their blocks are free. Tokens of sequences that were aborted or preempted since
        `schedule` are dropped.
        """
        assert self._in_flight[:1], "update() does not follow its schedule()"
        expected, dropped = self._in_flight.pop(0)
        assert output is expected, "update() does not follow its schedule()"
        ended: list[Ended] = []
        beams: dict[BeamSearch, list[tuple[Sequence, Candidates]]] = {}
        for item, token in zip(output.scheduled, sampled, strict=True):
            sequence = item.sequence
            if dropped and sequence in dropped:
                continue
            if item.num_samples == 1 and type(token) is int:
                sequence.num_in_flight -= 1
                token_ids = sequence.token_ids
                token_ids.append(token)
                if sequence.matcher is not None:
                    _advance_grammar(sequence)
                elif len(token_ids) < sequence.num_tokens_limit and token not in sequence.stop_token_ids:
                    continue
                self._end_if_over(sequence, ended)
            elif not item.num_samples:
                assert token is None, f"request {sequence.request.request_id}: a token too many"
                if not sequence.gap and not self._is_in_flight(sequence):  # max_tokens 0, or it came with all it may hold
                    self._end_if_over(sequence, ended)
            elif sequence.beam_search is not None:
                beams.setdefault(sequence.beam_search, []).append((sequence, token))  # type: ignore[arg-type]
            else:
                assert type(token) is list, f"request {sequence.request.request_id}: a token is missing"
                self._record_choices(sequence, token, ended)
        for rows in beams.values():
            if end := self._forks.advance(rows):
                self._end(end, ended)
        if not self._lineup.running:
            ended += self._release_batch()
        self._isolation.record(output)
        return ended

    def take_cleared(self) -> tuple[str, ...]:
        """The requests that live and have run alone for long enough since the last call."""
        return self._isolation.take_cleared()

    def idle_slots(self) -> SlotCounts:
        """The slots when there is no step."""
        return SlotCounts(no_work=self._config.max_slots)

    def kv_counts(self) -> KVCounts:
        """Blocks and positions as they are now."""
        return self._tables.counts(self._lineup.held)

    def repair(self) -> int:
        """When nothing is left, take back blocks that a fault has lost; how many. A service goes on, a test fails."""
        assert self._lineup.is_empty, "there are sequences"
        return self._tables.repair()

    def check(self) -> None:
        """Audit everything; AssertionError names what is wrong. For tests, and for the engine when it is idle."""
        self._lineup.check()

    def _record_choices(self, root: Sequence, tokens: list[int], ended: list[Ended]) -> None:
        for fork, token in zip(self._forks.choices(root), tokens, strict=True):
            fork.token_ids.append(token)
            _advance_grammar(fork)
            self._end_if_over(fork, ended)

    def _finish(self, step: Draft, blocked: _Blocked | None) -> SchedulerOutput:
        output = step.finish(self._tables.take_moves(), self._count_slots(step, blocked))
        self._in_flight.append((output, set()))
        return output

    # Going on

    def _continue_decodes(self, step: Draft, end: int) -> list[Sequence]:
        """Schedule the first `end` running sequences that have one token to compute; returns the prefills among the others."""
        prefills = []
        block_size = self._config.block_size
        scheduled, running, runs_ahead = step.scheduled, self._lineup.running, self._config.run_ahead
        index = 0
        while index < end:
            sequence = running[index]
            index += 1
            computed = sequence.num_computed_tokens
            if len(sequence.token_ids) + sequence.num_in_flight - computed != 1 or computed < sequence.num_prompt_tokens:
                prefills.append(sequence)
            elif runs_ahead and not _is_ready(sequence):
                continue
            elif sequence.beam_search is not None:
                index = self._continue_beams(step, index - 1)
                end = min(end, len(running))
            elif step.budget > 0:
                if not computed % block_size or sequence.shares_tail:
                    has_room = self._extend(step, [sequence], 1)
                    end = min(end, len(running))
                    if not has_room:
                        continue
                sequence.num_computed_tokens = computed + 1
                sequence.num_in_flight += 1
                scheduled.append(sequence.decode or _decode(sequence))
                step.budget -= 1
        step.num_decodes = len(scheduled)
        return [sequence for sequence in prefills if sequence.block_table]

    def _continue_beams(self, step: Draft, first: int) -> int:
        """Schedule the beams of one search, from place `first` on, all or none; the place behind them."""
        running = self._lineup.running
        search = running[first].beam_search
        beams = list(takewhile(lambda sequence: sequence.beam_search is search, running[first:]))
        if len(beams) <= step.budget and self._extend(step, beams, 1):
            for beam in beams:
                self._schedule_part(step, beam, 1)
            return first + len(beams)
        return min(first + len(beams), len(running))

    def _continue_prefills(self, step: Draft, prefills: list[Sequence]) -> None:
        """Compute more of prompts, or of what preempted sequences knew; the blocks were set aside when they started."""
        for sequence in prefills:
            if not sequence.block_table or sequence.gap <= 0 or (self._config.run_ahead and not _is_ready(sequence)):
                continue
            num_tokens = step.chunk(sequence, sequence.gap)
            if num_tokens and self._extend(step, [sequence], num_tokens):
                self._schedule_part(step, sequence, num_tokens)

    def _extend(self, step: Draft, sequences: list[Sequence], num_tokens: int) -> bool:
        """Give running sequences the blocks for their next tokens, all or none, preempting from the end of the order.

        False when they themselves had to give way. What is scheduled already is never preempted: prefills have their blocks
        set aside, and of decodes the earlier go on first.
        """
        while self._tables.num_missing(sequences, num_tokens) > self._tables.num_available:
            victim = self._lineup.running[-1]
            self._preempt(step, victim)
            if victim is sequences[-1]:
                return False
        self._tables.grow(sequences, num_tokens)
        return True

    # Alone

    def _run_alone(self, step: Draft) -> None:
        """Continue and start the suspect, the first in order. The others keep what they hold unless it lacks room."""
        lineup, suspect = self._lineup, step.suspect
        num_running = sum(1 for _ in takewhile(is_alone, lineup.running))  # of one request: the next waits for its end
        self._continue_prefills(step, self._continue_decodes(step, num_running))
        if self._is_closed:
            return
        while lineup.waiting and (head := lineup.waiting[-1]).request.request_id == suspect and head not in step.preempted:
            has_slots = lineup.num_slots_taken + head.width <= self._config.max_slots
            blocked = self._start(step, head) if has_slots else _Blocked.MEMORY
            if blocked is _Blocked.BUDGET or (blocked and not self._make_room(step)):
                return

    def _make_room(self, step: Draft) -> bool:
        """Preempt the last in order for a suspect; False when nothing else runs."""
        running = self._lineup.running
        if not running or is_alone(running[-1]):
            return False
        self._preempt(step, running[-1])
        return True

    # Starting

    def _start_waiting(self, step: Draft) -> _Blocked | None:
        """Start waiting sequences until one does not fit; why it did not, or None when nothing waits or no slot is free.

        One that was preempted in this step does not come back in it, even if a window or a shared block makes room again.
        """
        if self._is_closed:
            return _Blocked.BUDGET
        lineup = self._lineup
        while lineup.waiting and lineup.num_slots_taken < self._config.max_slots:
            sequence = lineup.waiting[-1]
            if lineup.num_slots_taken + sequence.width > self._config.max_slots:
                return _Blocked.BUDGET
            if sequence in step.preempted:
                return _Blocked.MEMORY
            if blocked := self._start(step, sequence):
                return blocked
        return None

    @property
    def _is_closed(self) -> bool:
        """With request_level: whether a batch runs, so that nothing starts."""
        return self._is_static and self.num_running > 0

    def _start(self, step: Draft, sequence: Sequence) -> _Blocked | None:
        """Start the head of the waiting sequences, or say what it lacks."""
        cached = [] if is_scoring(sequence) else self._tables.find(sequence)
        num_computed = max(len(cached) * self._config.block_size, sequence.num_computed_tokens)
        num_tokens = step.chunk(sequence, sequence.num_tokens - num_computed)
        if not num_tokens:
            return _Blocked.BUDGET
        num_total = self._reservation.num_blocks(sequence) - sequence.num_released_blocks
        watermark = self._config.watermark_blocks if self._lineup.running else 0
        num_wanted = self._tables.num_wanted(num_total, cached)
        if fit(num_wanted, self._tables.num_available, self._config.num_blocks, watermark) is not Fit.NOW:
            return _Blocked.MEMORY
        self._lineup.start_head()
        self._fair_share.admitted(sequence.order[0], sequence.request.priority)
        self._tables.start(sequence, cached, num_tokens, num_total)
        if self._config.prefix_caching:
            step.count_hits(sequence, len(cached) * self._config.block_size)
        self._schedule_part(step, sequence, num_tokens)
        return None

    def _schedule_part(self, step: Draft, sequence: Sequence, num_tokens: int) -> None:
        """Put the next tokens of a sequence, whose table covers them, into the step."""
        step.put(sequence, num_tokens)
        self._tables.index_full_blocks(sequence)

    # Giving up

    def _preempt(self, step: Draft, sequence: Sequence) -> None:
        """Back to waiting: it keeps its tokens and its place, and its KV is swapped out or computed again."""
        if sequence.beam_search is not None:
            self._restart_search(step, sequence)
            return
        step.preempted.append(sequence)
        self._drop_in_flight(sequence)
        # Of a token that was dropped in flight the position before is computed again, so that it is sampled again.
        sequence.num_in_flight = 0
        num_computed = min(sequence.num_computed_tokens, len(sequence.token_ids) - 1)
        if num_blocks := self._num_to_swap(sequence, num_computed):
            self._tables.swap_out(sequence, num_blocks)
            step.num_swap_preemptions += 1
            step.num_swapped_tokens += num_computed
        else:
            step.num_preempted_tokens += sequence.num_computed_tokens
        self._lineup.stop(sequence)
        sequence.num_computed_tokens = num_computed if num_blocks else 0
        sequence.num_released_blocks = sequence.num_released_blocks if num_blocks else 0
        sequence.num_preemptions += 1
        self._lineup.wait_again(sequence)
        self._reservation.preempted()

    def _num_to_swap(self, sequence: Sequence, num_tokens: int) -> int | None:
        """How many blocks go to host memory: there is room, and it is forced or costs less than computing them again."""
        num_blocks = self._tables.num_to_swap(sequence, num_tokens)
        if num_blocks is None or self._config.preemption == "recompute":
            return None
        swap_s, recompute_s = num_blocks * self.costs.swap_s_per_block, num_tokens * self.costs.recompute_s_per_token
        return num_blocks if self._config.preemption == "swap" or swap_s < recompute_s else None

    def _restart_search(self, step: Draft, beam: Sequence) -> None:
        """Preempt all beams of a search. It begins again from its prompt: it has shown nothing yet, and ends the same."""
        beams = [s for s in self._lineup.running if s.beam_search is beam.beam_search]
        step.preempted.append(beams[0])
        step.num_preempted_tokens += sum(s.num_computed_tokens - s.num_prompt_tokens for s in beams[1:])
        step.num_preempted_tokens += beams[0].num_computed_tokens
        for other in beams[1:]:
            self._remove(other)
        root = beams[0]
        self._drop_in_flight(root)
        self._lineup.stop(root)
        assert root.beam_search is not None
        root.restart()
        self._lineup.wait_again(root)

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return any(item.sequence is sequence for output, _ in self._in_flight for item in output.scheduled)

    def _drop_in_flight(self, sequence: Sequence) -> None:
        for _, dropped in self._in_flight:
            dropped.add(sequence)

    # Ending

    def _end_if_over(self, sequence: Sequence, ended: list[Ended]) -> None:
        if stop := check_stop(sequence, self._config.max_model_len):
            self._end(Ended(sequence, stop.reason, stop.detail), ended)

    def _end(self, end: Ended, ended: list[Ended]) -> None:
        """Free what the sequence held; with request_level it holds slot and blocks until the batch ends."""
        sequence = end.sequence
        self._reservation.ended(sequence)
        if not self._is_static:
            self._remove(sequence)
            ended.append(end)
            return
        self._drop_in_flight(sequence)
        self._lineup.hold(end)

    def _release_batch(self) -> list[Ended]:
        """With request_level: all of a batch return together, when the last of it has ended."""
        batch = self._lineup.ended.copy()
        for end in batch:
            self._remove(end.sequence)
        return batch

    def _remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is, with all it holds and what is in flight of it."""
        if self._lineup.remove(sequence):
            self._isolation.left(sequence.request.request_id)
            self._drop_in_flight(sequence)
            sequence.num_in_flight = 0

    # Counting

    def _count_slots(self, step: Draft, blocked: _Blocked | None) -> SlotCounts:
        """Where each slot of the step went. The slots of choices that share a prefill are all prefilling."""
        num_prefills = sum(item.sequence.width for item in step.prefills)
        lineup = self._lineup
        num_idle = self._config.max_slots - lineup.num_slots_taken
        num_blocked = min(num_idle, sum(s.width for s in lineup.waiting[-num_idle:])) if num_idle else 0
        num_held_up = lineup.num_slots_taken - len(lineup.ended) - step.num_decodes - num_prefills
        return SlotCounts(
            decode=step.num_decodes,
            prefill=num_prefills,
            finished=len(lineup.ended),
            no_memory=num_blocked if blocked is _Blocked.MEMORY else 0,
            no_budget=num_held_up + (num_blocked if blocked is _Blocked.BUDGET else 0),
            no_work=num_idle - (num_blocked if blocked else 0),
        )


def _advance_grammar(sequence: Sequence) -> None:
    """Take its last token, unless that is the end, of which a grammar knows nothing."""
    if sequence.matcher is not None and not ends_with_stop_id(sequence):
        sequence.matcher.accept(sequence.token_ids[-1])


def _decode(sequence: Sequence) -> ScheduledSequence:
    sequence.decode = ScheduledSequence(sequence, 1, 1)
    return sequence.decode


def _is_ready(sequence: Sequence) -> bool:
    """Running ahead: whether the next step can be decided before the last one's token is read."""
    if not sequence.num_in_flight:
        return True
    return not sequence.reads_tokens and sequence.width == 1 and sequence.num_tokens < sequence.num_tokens_limit
