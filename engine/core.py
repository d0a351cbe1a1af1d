"""The engine: one step decides, acts and records.

Relies on a `Runner` for everything that touches tensors, so that a test can drive a whole engine without a model. Leaves what
is refused to `admission`, who runs next to `Scheduler`, the numbers to `ModelRunner` and `sampler`, the pipe to `serve`.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.admission import check_request
from engine.batch import InFlight, ModelInput, build, sampled_rows, scored_positions
from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.decision import Ended, Moves, ScheduledSequence, SchedulerOutput
from engine.errors import RequestRefused
from engine.events import end_events, failures, sampled_by_item, token_events
from engine.geometry import ModelGeometry
from engine.grammar import CompiledGrammar, GrammarCompiler
from engine.messages import RequestRejected, StepReport, TokenEvent
from engine.request import FinishReason, Request
from engine.reservation import max_tokens_held
from engine.sampler import Pending, Row, SamplingInput, launch, score
from engine.scheduler import PreemptionCosts, Scheduler
from engine.sequence import Sequence
from engine.staging import staging_for
from engine.stats import StepStats, StepTimes, SwapTimes
from engine.stopping import check_stop

MAX_STALLED_STEPS = 16
"""Steps with something waiting and nothing scheduled before the head is failed: reaching it is a bug that reports itself."""
COMPILE_WAIT_S = 0.05
"""How long a step without work waits for a grammar to be compiled."""
RATE_WEIGHT = 0.2
"""How much one step moves the measured time of a prefilled token."""


class Runner(Protocol):
    """What the engine needs of a model."""

    @property
    def scheduler_config(self) -> SchedulerConfig: ...
    @property
    def geometry(self) -> ModelGeometry: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def decode_sizes(self) -> Items[int]:
        """Ascending numbers of sequences that a step which only decodes is padded to; none: it is not."""
        ...

    @property
    def tokenizer_dir(self) -> Path: ...
    @property
    def swap_s_per_block(self) -> float:
        """Seconds to copy a block to host memory and back."""
        ...

    def move(self, swapped_out: Moves, copied: Moves, swapped_in: Moves) -> None:
        """Move blocks, before the step that needs them; see `BlockMoves`."""
        ...

    def swap_times(self) -> SwapTimes:
        """Seconds of the swaps that have ended since the last call."""
        ...

    def forward(self, model_input: ModelInput) -> Tensor:
        """Logits `[R, vocab_size]`, float32."""
        ...


class _Clock:
    """Seconds between laps, summed by name."""

    def __init__(self) -> None:
        self.times: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.times[name] += now - self._last
        self._last = now


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that is computed, or being computed, and whose tokens have not been read."""

    output: SchedulerOutput
    rows: list[Row]
    pending: Pending | None
    """None when nothing was scheduled."""
    scored: Items[tuple[Sequence, range]] = ()
    """Prompt positions, whose logits follow each other in `scored_logits`."""
    scored_logits: Tensor | None = None


class Engine:
    """Continuous batching over a paged KV cache. Not thread-safe: one loop owns it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._staging = staging_for(runner.device)
        self._config = runner.scheduler_config
        self._eos = frozenset(runner.geometry.eos_token_ids)
        self._scheduler = Scheduler(self._config, BlockPool(self._config.num_blocks, self._config.block_size))
        self._grammars = GrammarCompiler(runner.tokenizer_dir, runner.geometry.vocab_size, runner.geometry.eos_token_ids)
        self._compiling: list[tuple[Sequence, Future[CompiledGrammar]]] = []
        self._ahead: _Launched | None = None
        self._stalled_steps = 0
        self._num_wasted = 0
        """Tokens that the last step found computed in vain."""
        self._early: list[TokenEvent] = []
        self._suspect = ""
        self.on_alone: Callable[[str], None] | None = None
        """Called with a suspect's request id before the first step that it runs alone."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._early or self._compiling or self._ahead or self._num_sequences)

    @property
    def scheduler(self) -> Scheduler:
        """The bookkeeping, for checks and figures."""
        return self._scheduler

    def add_request(self, request: Request) -> None:
        """Queue a request; `RequestRefused` when it can never be served. Its tokens come out of later steps."""
        check_request(request, self._config, self._runner.geometry)
        name = request.request_id, request.choice
        if self._scheduler.holds(*name) or any((s.request.request_id, s.choice) == name for s, _ in self._compiling):
            raise RequestRefused("request_id", request.request_id, "already running", "choose another id")
        limit = max_tokens_held(request, self._config)
        sequence = Sequence(request, self._scheduler.next_order(request), self._eos, limit)
        if request.params.grammar is None:
            self._admit(sequence)
        else:
            self._compiling.append((sequence, self._grammars.submit(request.params.grammar)))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Free the blocks of a request, or of one choice of it, at once; unknown ids are ignored."""

        def is_meant(an_id: str, a_choice: int) -> bool:
            return an_id == request_id and choice in (None, a_choice)

        self._early = [event for event in self._early if not is_meant(event.request_id, event.choice)]
        self._compiling = [entry for entry in self._compiling if not is_meant(entry[0].request.request_id, entry[0].choice)]
        self._scheduler.abort(request_id, choice)

    def step(self) -> StepReport:
        """One iteration over the batch: schedule, forward, sample, update.

        Running ahead, the step that is recorded is the one before the step that is launched.
        """
        rejected = self._admit_compiled()
        events, self._early = self._early, []
        self._num_wasted = 0
        clock = _Clock()
        output = self._scheduler.schedule()
        if self.on_alone and output.suspect not in ("", self._suspect):
            self.on_alone(output.suspect)
        self._suspect = output.suspect
        clock.lap("schedule_s")
        launched = self._launch(output, clock)
        due = [launched]
        if self._config.run_ahead:
            due = [step for step in (self._ahead, None if output.scheduled else launched) if step]
            self._ahead = launched if output.scheduled else None
        for step in due:
            events += self._record(step, clock)
        if not output.scheduled and due == [launched]:
            events += self._fail_stalled_head()
        elif output.scheduled:
            self._stalled_steps = 0
        num_leaked = 0 if self._num_sequences or self._ahead else self._scheduler.repair()
        self._measure(output, clock.times)
        num_generated = sum([len(event.token_ids) for event in events])
        stats = self._stats(output, StepTimes(**clock.times), num_generated, num_leaked)
        return StepReport(tuple(events), stats, rejected, self._scheduler.take_cleared())

    def idle_report(self) -> StepReport:
        """The state without a step, so that gauges stay true after an abort."""
        return StepReport((), self._stats(None, StepTimes(), 0))

    @property
    def _num_sequences(self) -> int:
        return self._scheduler.num_running + self._scheduler.num_waiting

    # Admission

    def _admit(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn, unless what an earlier attempt made is all of it, or its grammar allows nothing."""
        stop = check_stop(sequence, self._config.max_model_len)
        if stop and (sequence.request.output_token_ids or sequence.matcher):
            self._early += end_events(Ended(sequence, stop.reason, stop.detail))
        else:
            self._scheduler.add(sequence)

    def _admit_compiled(self) -> tuple[RequestRejected, ...]:
        """Let those wait whose grammar is compiled; returns those whose grammar is refused."""
        if not self._compiling:
            return ()
        if not self._num_sequences:
            wait([future for _, future in self._compiling], COMPILE_WAIT_S, FIRST_COMPLETED)
        done = [entry for entry in self._compiling if entry[1].done()]
        self._compiling = [entry for entry in self._compiling if entry not in done]
        rejected = []
        for sequence, future in done:
            request = sequence.request
            try:
                matcher = future.result().matcher(allow_eos=not request.params.ignore_eos)
                for token_id in request.output_token_ids:
                    matcher.accept(token_id)
                if matcher.failure:
                    raise matcher.failure
            except RequestRefused as refusal:
                rejected.append(RequestRejected.of(request.request_id, refusal))
            else:
                sequence.matcher = matcher
                self._admit(sequence)
        return tuple(rejected)

    # Acting

    def _launch(self, output: SchedulerOutput, clock: _Clock) -> _Launched:
        """Compute a decision up to its sampled tokens, which stay on the device."""
        if any(output.moves):
            self._runner.move(*output.moves)
        if not output.scheduled:
            return _Launched(output, [], None)
        rows = sampled_rows(output.scheduled)
        sampling = SamplingInput.of(rows, self._staging, self._runner.geometry.vocab_size)  # sent with the model's input
        logits = self._forward(output.scheduled, clock)
        pending = launch(logits[: len(rows)], sampling)
        clock.lap("sample_s")
        scored = [(item.sequence, scored_positions(item)) for item in output.scheduled if item.num_scored]
        return _Launched(output, rows, pending, scored, logits[len(rows) :])

    def _forward(self, items: Items[ScheduledSequence], clock: _Clock) -> Tensor:
        """Logits of a step. Where the device has no memory for it, of one half and then of the other, and so on down to one."""
        try:
            return self._compute(items, clock)
        except torch.OutOfMemoryError:
            if len(items) < 2:
                raise
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()
        middle = len(items) // 2
        halves = items[:middle], items[middle:]  # in order: a later one may share blocks that an earlier one fills
        # A graph's logits last until its next replay.
        parts = [(self._forward(half, clock).clone(), sum(item.num_samples for item in half)) for half in halves]
        return torch.cat([logits[:num] for logits, num in parts] + [logits[num:] for logits, num in parts])

    def _compute(self, items: Items[ScheduledSequence], clock: _Clock) -> Tensor:
        in_flight = None
        if self._ahead and self._ahead.pending:
            rows = {row.sequence: index for index, row in enumerate(self._ahead.rows)}
            in_flight = InFlight(self._ahead.pending.token_ids.clamp(min=0), rows)
        model_input = build(items, self._config.block_size, self._staging, in_flight, self._runner.decode_sizes)
        clock.lap("prepare_s")
        logits = self._runner.forward(model_input)
        clock.lap("forward_s")
        return logits

    # Recording

    def _record(self, launched: _Launched, clock: _Clock) -> list[TokenEvent]:
        """Hand what was sampled to the scheduler and turn it into events, in the order of the batch."""
        if launched.pending is None:
            return [event for end in self._scheduler.update(launched.output, []) for event in end_events(end)]
        sampled = launched.pending.read()
        clock.lap("sample_s")
        self._keep_scores(launched)
        events: list[TokenEvent] = []
        for end in failures(launched.rows, sampled.failed, self._scheduler.dropped()):
            events += end_events(end)
            self._scheduler.abort(end.sequence.request.request_id, end.sequence.choice, is_broken=True)
        dropped = frozenset(self._scheduler.dropped())
        if self._config.run_ahead and dropped:
            self._num_wasted += sum(item.num_tokens for item in launched.output.scheduled if item.sequence in dropped)
        ended = self._scheduler.update(launched.output, sampled_by_item(launched.output.scheduled, sampled))
        events += token_events(launched.rows, sampled, ended, dropped)
        clock.lap("update_s")
        return events

    def _keep_scores(self, launched: _Launched) -> None:
        """Log probabilities of the prompt positions of the step, as far as they are not known from before a preemption."""
        scored = launched.scored
        if not scored:
            return
        assert launched.scored_logits is not None
        targets = [sequence.token_ids[position + 1] for sequence, positions in scored for position in positions]
        num_top = [sequence.request.params.prompt_logprobs or 0 for sequence, positions in scored for _ in positions]
        scores = iter(score(launched.scored_logits, targets, num_top))
        for sequence, positions in scored:
            for position in positions:
                logprobs = next(scores)
                if position == len(sequence.prompt_logprobs):
                    sequence.prompt_logprobs.append(logprobs)

    def _fail_stalled_head(self) -> list[TokenEvent]:
        """Guarantee of progress: waiting work that no step schedules fails with the state instead of hanging."""
        head = self._scheduler.head or self._scheduler.first
        if head is None:
            return []
        self._stalled_steps += 1
        if self._stalled_steps < MAX_STALLED_STEPS:
            return []
        self._stalled_steps = 0
        kv = self._scheduler.kv_counts()
        self._scheduler.abort(head.request.request_id, head.choice)
        why = f"not scheduled for {MAX_STALLED_STEPS} steps: knows {head.num_tokens} tokens, {kv}"
        return end_events(Ended(head, FinishReason.ERROR, why, may_retry=True))

    # Counting

    def _measure(self, output: SchedulerOutput, times: Mapping[str, float]) -> None:
        """Learn from steps that mostly prefill what a token costs to compute again."""
        if output.num_prefill_tokens * 2 <= output.num_tokens:
            return
        # A GPU is launched and then waited for, where tokens are read: the step before, when it runs ahead.
        spent_s = times["forward_s"] + (times["sample_s"] if self._runner.device.type != "cpu" else 0)
        known, seen = self._scheduler.costs.recompute_s_per_token, spent_s / output.num_tokens
        cost = seen if known == float("inf") else known + RATE_WEIGHT * (seen - known)
        self._scheduler.costs = PreemptionCosts(self._runner.swap_s_per_block, cost)

    def _stats(self, output: SchedulerOutput | None, times: StepTimes, num_generated: int, num_leaked: int = 0) -> StepStats:
        scheduler = self._scheduler
        if output is None:
            slots, counts = scheduler.idle_slots(), {}
        else:
            slots = output.slots
            counts = {
                "num_swap_preemptions": output.num_swap_preemptions,
                "num_preempted_tokens": output.num_preempted_tokens,
                "num_swapped_tokens": output.num_swapped_tokens,
                "num_swapped_out_blocks": len(output.moves.swapped_out),
                "num_swapped_in_blocks": len(output.moves.swapped_in),
                "num_copied_blocks": len(output.moves.copied),
                "num_prefix_queries": output.num_prefix_queries,
                "num_prefix_hits": output.num_prefix_hits,
            }
        return StepStats(
            slots=slots,
            kv=scheduler.kv_counts(),
            times=times,
            num_tokens=output.num_tokens if output else 0,
            num_prefill_tokens=output.num_prefill_tokens if output else 0,
            num_generated_tokens=num_generated,
            num_running=scheduler.num_running,
            num_slots_taken=scheduler.num_slots_taken,
            num_waiting=scheduler.num_waiting + len(self._compiling),
            num_preemptions=len(output.preempted) if output else 0,
            swap_times=self._runner.swap_times(),
            num_leaked_blocks=num_leaked,
            num_wasted_tokens=self._num_wasted if output else 0,
            **counts,
        )
