"""The engine: one step decides, acts and records.

Relies on a `Runner` for everything that touches tensors, so that a test can drive a whole engine without a model. Leaves who
runs next to `Scheduler`, the numbers to `ModelRunner` and `sampler`, and the pipe to `serve`.
"""

import time
from typing import Protocol

import torch

from engine.batch import ModelInput, build
from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.errors import RequestRefused
from engine.geometry import ModelGeometry
from engine.messages import StepReport, TokenEvent
from engine.request import FinishReason, Request, SamplingParams
from engine.sampler import SamplerOutput, sample
from engine.scheduler import Ended, Scheduler, SchedulerOutput
from engine.sequence import Sequence
from engine.stats import StepStats, StepTimes
from engine.stopping import check_stop

MAX_STALLED_STEPS = 16
"""Steps with something waiting and nothing scheduled before the head is failed: reaching it is a bug that reports itself."""


class Runner(Protocol):
    """What the engine needs of a model."""

    @property
    def scheduler_config(self) -> SchedulerConfig: ...
    @property
    def geometry(self) -> ModelGeometry: ...
    @property
    def device(self) -> torch.device: ...
    def forward(self, model_input: ModelInput) -> torch.Tensor:
        """Logits `[num_sampled, vocab_size]`, float32."""
        ...


class Engine:
    """Continuous batching over a paged KV cache. Not thread-safe: one loop owns it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._config = runner.scheduler_config
        self._eos = frozenset(runner.geometry.eos_token_ids)
        self._scheduler = Scheduler(self._config, BlockPool(self._config.num_blocks, self._config.block_size))
        self._arrivals = 0
        self._stalled_steps = 0
        self._early: list[TokenEvent] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._early) or self._scheduler.num_running + self._scheduler.num_waiting > 0

    @property
    def scheduler(self) -> Scheduler:
        """The bookkeeping, for checks and figures."""
        return self._scheduler

    def add_request(self, request: Request) -> None:
        """Queue a request; `RequestRefused` when it can never be served. Its tokens come out of later steps."""
        self._refuse_what_never_fits(request)
        sequence = Sequence(request, self._arrivals, self._eos)
        self._arrivals += 1
        stop = check_stop(sequence, self._config.max_sequence_tokens, self._config.max_model_len)
        if stop and request.output_token_ids:
            self._early.append(_final_event(sequence, (), stop.reason, stop.detail))
            return
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Free a request's blocks at once; unknown ids are ignored."""
        self._early = [event for event in self._early if event.request_id != request_id]
        self._scheduler.abort(request_id)

    def step(self) -> StepReport:
        """One iteration over the batch: schedule, forward, sample, update."""
        early, self._early = tuple(self._early), []
        started = time.perf_counter()
        output = self._scheduler.schedule()
        scheduled = time.perf_counter()
        if not output.scheduled:
            return StepReport(early + self._fail_stalled_head(), self._stats(output, StepTimes(), 0))
        self._stalled_steps = 0
        model_input = build(output, self._config.block_size, self._runner.device)
        prepared = time.perf_counter()
        logits = self._runner.forward(model_input)
        computed = time.perf_counter()
        sampled = sample(logits, model_input.sampling)
        drawn = time.perf_counter()
        events = self._record(output, sampled)
        times = StepTimes(
            schedule_s=scheduled - started,
            prepare_s=prepared - scheduled,
            forward_s=computed - prepared,
            sample_s=drawn - computed,
            update_s=time.perf_counter() - drawn,
        )
        return StepReport(early + events, self._stats(output, times, sum(len(event.token_ids) for event in events)))

    def idle_report(self) -> StepReport:
        """The state without a step, so that gauges stay true after an abort."""
        return StepReport((), self._stats(None, StepTimes(), 0))

    def _refuse_what_never_fits(self, request: Request) -> None:
        num_prompt, limit = len(request.prompt_token_ids), self._config.max_sequence_tokens
        if self._scheduler.holds(request.request_id):
            raise RequestRefused("request_id", request.request_id, "already running", "choose another id")
        if not num_prompt:
            raise RequestRefused("prompt", "0 tokens", "at least 1 token", "send a prompt")
        max_tokens, room = request.params.max_tokens, limit if request.params.max_tokens == 0 else limit - 1
        if max_tokens > max(self._config.max_model_len, SamplingParams().max_tokens):  # the default is never refused
            raise RequestRefused(
                "max_tokens", max_tokens, f"at most {self._config.max_model_len}: the model's length", "lower it"
            )
        if num_prompt > room:
            raise RequestRefused("prompt", f"{num_prompt} tokens", *self._room(room))
        vocab_size = self._runner.geometry.vocab_size
        for token_ids in (request.prompt_token_ids, request.output_token_ids):
            if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
                worst = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
                raise RequestRefused("prompt", f"token id {worst}", f"ids 0..{vocab_size - 1}", "use this model's tokenizer")

    def _room(self, room: int) -> tuple[str, str]:
        """The limit on a prompt, and the remedy."""
        model_len, limit = self._config.max_model_len, self._config.max_sequence_tokens
        if limit < model_len:
            return f"at most {room}: the whole KV cache holds {limit}", "shorten the prompt, or serve with more kv_blocks"
        remedy = "shorten the prompt"
        if model_len < self._runner.geometry.max_model_len:
            remedy += ", or serve with a larger max_model_len"
        return f"at most {room}: max_model_len is {limit} with the output", remedy

    def _record(self, output: SchedulerOutput, sampled: SamplerOutput) -> tuple[TokenEvent, ...]:
        """Hand the sampled tokens to the scheduler and turn them into events, in the order of the batch."""
        rows = [item.sequence for item in output.scheduled if item.samples]
        events = [_final_event(rows[row], (), FinishReason.ERROR, f"sampling: {why}") for row, why in sampled.failed.items()]
        for event in events:
            self.abort(event.request_id)
        tokens = iter(sampled.token_ids)
        token_ids = [next(tokens) if item.samples else None for item in output.scheduled]
        ended = {end.sequence: end for end in self._scheduler.update(output, token_ids)}
        for row, (sequence, token) in enumerate(zip(rows, sampled.token_ids, strict=True)):
            if row not in sampled.failed:
                events.append(_token_event(sequence, token, ended.pop(sequence, None)))
        events.extend(_final_event(end.sequence, (), end.reason, end.detail) for end in ended.values())
        return tuple(events)

    def _fail_stalled_head(self) -> tuple[TokenEvent, ...]:
        """Guarantee of progress: waiting work that no step schedules fails with the state instead of hanging."""
        head = self._scheduler.head
        if head is None:
            return ()
        self._stalled_steps += 1
        if self._stalled_steps < MAX_STALLED_STEPS:
            return ()
        self._stalled_steps = 0
        kv = self._scheduler.kv_counts()
        self.abort(head.request.request_id)
        why = f"not scheduled for {MAX_STALLED_STEPS} steps: knows {head.num_tokens} tokens, {kv}"
        return (_final_event(head, (), FinishReason.ERROR, why),)

    def _stats(self, output: SchedulerOutput | None, times: StepTimes, num_generated: int) -> StepStats:
        ran = output if output and output.scheduled else None
        return StepStats(
            slots=output.slots if output else self._scheduler.idle_slots(),
            kv=self._scheduler.kv_counts(),
            times=times,
            num_tokens=ran.num_tokens if ran else 0,
            num_prefill_tokens=ran.num_prefill_tokens if ran else 0,
            num_generated_tokens=num_generated,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=len(output.preempted) if output else 0,
            num_preempted_tokens=output.num_preempted_tokens if output else 0,
        )


def _token_event(sequence: Sequence, token: int, end: Ended | None) -> TokenEvent:
    if end is not None:
        return _final_event(sequence, (token,), end.reason, end.detail)
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.num_output_tokens - 1,
        token_ids=(token,),
        num_cached_tokens=sequence.num_cached_tokens,
    )


def _final_event(sequence: Sequence, token_ids: tuple[int, ...], reason: FinishReason, detail: str) -> TokenEvent:
    return TokenEvent(
        request_id=sequence.request.request_id,
        index=sequence.num_output_tokens - len(token_ids),
        token_ids=token_ids,
        finish_reason=reason,
        detail=detail,
        num_cached_tokens=sequence.num_cached_tokens,
    )
