"""What comes back from the engine: tokens become text, ends become endings, counts become metrics.

Runs on the engine reader thread and waits for nothing but locks that are held briefly. Relies on `Output` for text and stop
strings; leaves writing to the publisher. A fault in one job's event fails that job alone.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.errors import one_line
from engine.messages import EngineReady, RequestRejected, StepReport, TokenEvent
from engine.request import FinishReason
from engine.stats import MemoryRow
from worker import log
from worker.attempt import Attempt, Ending, completed, internal_error
from worker.errors import EngineUnavailable
from worker.inflight import InFlight
from worker.metrics import Metrics
from worker.text import Tokenizer
from worker.verdict import after_crash, after_fault

_log = log.get("reader")


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """An engine that is ready, and the tokenizer of its model. A new one for each engine process."""

    ready: EngineReady
    tokenizer: Tokenizer
    engine: int = 0
    """Its number among the worker's engines."""


class Destination(Protocol):
    """Where jobs go: one engine, or several as one."""

    @property
    def serving(self) -> Serving | None:
        """The engine that the next job goes to; None while there is none."""

    @property
    def num_slots(self) -> int:
        """Places in the batches of those that serve."""

    def has(self, serving: Serving) -> bool:
        """Whether this very engine process still serves."""


class Reader:
    """Acts on the messages of one engine; see `bridge.Handler`."""

    def __init__(
        self, inflight: InFlight, metrics: Metrics, model: str, on_change: Callable[[], None], *, engine: int = 0
    ) -> None:
        """`on_change` is called when the engine, whose number is `engine`, becomes ready."""
        self._inflight = inflight
        self._metrics = metrics
        self._model = model
        self._on_change = on_change
        self._engine = engine
        self._late_tokens = metrics.wasted_tokens.labels("aborted")
        self._gaps: dict[tuple[str, float], int] = {}
        """Of the report at hand, how many tokens came so long after the one before, by lane."""
        self.serving: Serving | None = None
        """None while there is no engine to send requests to."""
        self._last_report = 0.0
        self.step_times = (0.0, 0.0)
        """`time.monotonic` of the reports of the last two steps; the second may still be read."""
        self._is_loading = False
        metrics.engine_stalled_seconds.labels(str(engine)).set_function(self.stalled_for_s)

    @property
    def num_slots(self) -> int:
        """Places in the batch, 0 while there is no engine."""
        return self.serving.ready.max_slots if self.serving else 0

    def has(self, serving: Serving) -> bool:
        """Whether this very engine process still serves."""
        return self.serving is serving

    def stalled_for_s(self) -> float:
        """Seconds without a step while the engine had work; 0 when it has none, or says that it is busy with something else."""
        if self._is_loading or not self._inflight.inside(self._engine) or not self.serving:
            return 0.0
        return max(0.0, time.monotonic() - max(self._last_report, self._inflight.busy_since[self._engine]))

    def on_loading(self, phase: str) -> None:
        """See `bridge.Handler`."""
        self._is_loading = True
        _log.info("engine_loading", engine=self._engine, phase=phase)

    def on_ready(self, ready: EngineReady) -> None:
        """See `bridge.Handler`."""
        try:
            serving = Serving(ready, Tokenizer(Path(ready.model_dir)), self._engine)
        except Exception as error:  # tokenizers raises plain ones
            raise EngineUnavailable(f"tokenizer: the files in {ready.model_dir} cannot be read: {one_line(error)}") from error
        self._metrics.engine_ready(ready, self._model, self._engine)
        _log.info(
            "engine_ready",
            engine=self._engine,
            model=self._model,
            device=ready.device,
            dtype=ready.dtype,
            slots=ready.max_slots,
            kv_blocks=ready.num_blocks,
            max_model_len=ready.max_model_len,
            load_s=round(ready.load_s, 1),
        )
        _log.info("engine_memory", engine=self._engine, **memory_fields(ready.memory_rows))
        self._is_loading = False
        self.serving = serving
        self._on_change()

    def on_down(self) -> bool:
        """See `bridge.Handler`. What was inside is given back: any of it may have killed the engine, but for who was alone."""
        self.serving = None  # before the look inside: the consumer checks it after it has put a job there
        self._metrics.engine_down(self._engine)
        ends = list(after_crash(self._inflight.inside(self._engine)))
        for attempt, ending in ends:
            self._inflight.end(attempt, ending, inside=False)
        return any(ending.blame == "solo" for _, ending in ends)

    def on_rejected(self, rejection: RequestRejected) -> None:
        """See `bridge.Handler`."""
        if attempt := self._inflight.get(rejection.request_id):
            error = f"{rejection.field}: {rejection.value}: {rejection.limit}; {rejection.remedy}"
            self._inflight.end(attempt, Ending("failed", "error", "invalid", error))

    def on_alone(self, request_id: str) -> None:
        """See `bridge.Handler`."""
        if attempt := self._inflight.get(request_id):
            attempt.has_begun_alone = True

    def on_report(self, report: StepReport) -> None:
        """See `bridge.Handler`."""
        self._last_report = time.monotonic()
        if report.stats.num_tokens:
            self.step_times = (self.step_times[1], self._last_report)
        self._is_loading = False
        touched = []
        for event in report.events:
            if attempt := self._inflight.get(event.request_id):
                self._take_guarded(attempt, event)
                touched.append(attempt)
            else:
                self._late_tokens.inc(len(event.token_ids))
        for rejection in report.rejected:
            self.on_rejected(rejection)
        for request_id in report.cleared:
            if attempt := self._inflight.get(request_id):
                attempt.is_alone = False
                touched.append(attempt)
        self._inflight.touch(touched)
        if report.stats.num_leaked_blocks:
            _log.error("kv_blocks_leaked", blocks=report.stats.num_leaked_blocks)
        self._metrics.step(report.stats, self._engine)
        self._metrics.token_gaps(self._gaps)
        self._gaps.clear()

    def _take_guarded(self, attempt: Attempt, event: TokenEvent) -> None:
        try:
            self._take(attempt, event)
        except Exception as error:  # noqa: BLE001  the other jobs of the step must have their tokens
            _log.debug("job_failed", **attempt.about, exc_info=True)
            self._inflight.end(attempt, internal_error(error))

    def _take(self, attempt: Attempt, event: TokenEvent) -> None:
        attempt.num_cached_tokens = max(attempt.num_cached_tokens, event.num_cached_tokens)
        if event.may_retry:
            self._inflight.end(attempt, after_fault(attempt, f"engine: {event.detail or 'error'}"))
            return
        if event.prompt_logprobs is not None:
            attempt.prompt_logprobs = event.prompt_logprobs
        if event.choice == len(attempt.outputs):  # the request that computes the prompt alone
            attempt.is_prompt_pending = event.finish_reason is None
        elif not self._push(attempt, event):
            return
        if event.finish_reason is FinishReason.ERROR:
            self._inflight.end(attempt, Ending("failed", "error", "internal", f"engine: {event.detail or 'error'}"))
        elif attempt.is_complete:
            self._inflight.end(attempt, completed(attempt), inside=event.finish_reason is None)

    def _push(self, attempt: Attempt, event: TokenEvent) -> bool:
        """Add the tokens to their choice; whether the choice has ended with them."""
        output, reason = attempt.outputs[event.choice], event.finish_reason
        if output.finish_reason:  # the engine did not know that yet
            self._late_tokens.inc(len(event.token_ids))
            return False
        assert event.start == len(output.token_ids), f"tokens from {event.start} follow {len(output.token_ids)}"
        if reason is not None:
            output.score = event.score
            output.detail = None if reason is FinishReason.ERROR else event.detail or None
        if late := output.push(event.token_ids, event.logprobs, None if reason is None else reason.value):
            self._late_tokens.inc(late)
        self._time(attempt, len(event.token_ids))
        if output.is_stopped and reason is None and not attempt.is_complete:
            self._inflight.end_choice(attempt, event.choice)
        return output.is_stopped or reason is not None

    def _time(self, attempt: Attempt, num_tokens: int) -> None:
        now, before = self._last_report, attempt.last_token_at
        if not num_tokens or before == now:  # several choices of one step
            return
        if before:  # this runs for every token
            gap = attempt.delivery.lane, (now - before) / num_tokens
            self._gaps[gap] = self._gaps.get(gap, 0) + num_tokens
        else:
            attempt.first_token_at = time.time()
            if (waited_s := attempt.timings().ttft_s) is not None:
                self._metrics.time_to_first_token_seconds.labels(attempt.priority).observe(waited_s)
        attempt.last_token_at = now


def memory_fields(rows: Iterable[MemoryRow]) -> dict[str, int | str]:
    """Where the engine's memory goes as fields of a line: a size in bytes for each row, and a note where it has one."""
    fields: dict[str, int | str] = {}
    for name, size_bytes, note in rows:
        key = re.sub(r"\W+", "_", name).lower()
        fields |= {f"{key}_bytes": size_bytes} | ({key: note} if note else {})
    return fields
