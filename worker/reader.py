"""What comes back from the engine: tokens become text, ends become endings, counts become metrics.

Runs on the engine reader thread and waits for nothing but locks that are held briefly. Relies on `Output` for text and stop
strings; leaves writing to the publisher. A fault in one job's event fails that job alone.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import one_line
from engine.messages import EngineReady, RequestRejected, StepReport, TokenEvent
from engine.request import FinishReason
from worker import log
from worker.attempt import LOST_WITH_ENGINE, STOPPED, Attempt, Ending, internal_error
from worker.errors import EngineUnavailable
from worker.inflight import InFlight
from worker.keys import LANES
from worker.metrics import Metrics
from worker.text import Tokenizer

_log = log.get("reader")


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """An engine that is ready, and the tokenizer of its model. A new one for each engine process."""

    ready: EngineReady
    tokenizer: Tokenizer


class Reader:
    """Acts on the engine's messages; see `bridge.Handler`."""

    def __init__(self, inflight: InFlight, metrics: Metrics, model: str, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the engine becomes ready."""
        self._inflight = inflight
        self._metrics = metrics
        self._model = model
        self._on_change = on_change
        self._late_tokens = metrics.wasted_tokens.labels("aborted")
        self._inter_token_s = {lane: metrics.inter_token_latency_seconds.labels(lane) for lane in LANES}
        self.serving: Serving | None = None
        """None while there is no engine to send requests to."""
        self._last_report = 0.0

    def stalled_for_s(self) -> float:
        """Seconds without a step while the engine had work; 0 when it has none."""
        if not self._inflight.num_inside or not self.serving:
            return 0.0
        return max(0.0, time.monotonic() - max(self._last_report, self._inflight.busy_since))

    def on_loading(self, phase: str) -> None:
        """See `bridge.Handler`."""
        _log.info("engine_loading", phase=phase)

    def on_ready(self, ready: EngineReady) -> None:
        """See `bridge.Handler`."""
        try:
            serving = Serving(ready, Tokenizer(Path(ready.model_dir)))
        except Exception as error:  # tokenizers raises plain ones
            raise EngineUnavailable(f"tokenizer: the files in {ready.model_dir} cannot be read: {one_line(error)}") from error
        self._metrics.engine_ready(ready, self._model)
        _log.info(
            "engine_ready",
            model=self._model,
            device=ready.device,
            dtype=ready.dtype,
            slots=ready.max_slots,
            kv_blocks=ready.num_blocks,
            max_model_len=ready.max_model_len,
            load_s=round(ready.load_s, 1),
        )
        _log.info("engine_memory", table=ready.memory_table)
        self.serving = serving
        self._on_change()

    def on_down(self) -> None:
        """See `bridge.Handler`. What was inside is given back with an attempt spent: any of it may have killed the engine."""
        self.serving = None  # before the look inside: the consumer checks it after it has put a job there
        self._metrics.engine_down()
        for attempt in self._inflight.inside():
            self._inflight.end(attempt, LOST_WITH_ENGINE, inside=False)

    def on_rejected(self, rejection: RequestRejected) -> None:
        """See `bridge.Handler`."""
        if attempt := self._inflight.get(rejection.request_id):
            error = f"{rejection.field}: {rejection.value}: {rejection.limit}; {rejection.remedy}"
            self._inflight.end(attempt, Ending("failed", "error", "invalid", error))

    def on_report(self, report: StepReport) -> None:
        """See `bridge.Handler`."""
        self._last_report = time.monotonic()
        touched = []
        for event in report.events:
            if attempt := self._inflight.get(event.request_id):
                self._take_guarded(attempt, event)
                touched.append(attempt)
            else:
                self._late_tokens.inc(len(event.token_ids))
        self._inflight.touch(touched)
        self._metrics.step(report.stats)

    def _take_guarded(self, attempt: Attempt, event: TokenEvent) -> None:
        try:
            self._take(attempt, event)
        except Exception as error:  # noqa: BLE001  the other jobs of the step must have their tokens
            _log.error("job_failed", job=attempt.delivery.job_id, error=type(error).__name__)
            _log.debug("traceback", job=attempt.delivery.job_id, exc_info=True)
            self._inflight.end(attempt, internal_error(error))

    def _take(self, attempt: Attempt, event: TokenEvent) -> None:
        output = attempt.output
        assert output is not None, "an attempt inside the engine has an output"
        assert event.index == len(output.token_ids), f"tokens from {event.index} follow {len(output.token_ids)}"
        if late := output.push(event.token_ids):
            self._late_tokens.inc(late)
        attempt.num_cached_tokens = max(attempt.num_cached_tokens, event.num_cached_tokens)
        self._time(attempt, len(event.token_ids))
        is_over = event.finish_reason is not None
        if output.is_stopped:
            self._inflight.end(attempt, STOPPED, inside=not is_over)
        elif event.finish_reason is not None:
            self._inflight.end(attempt, _ending(event.finish_reason, event.detail), inside=False)

    def _time(self, attempt: Attempt, num_tokens: int) -> None:
        if not num_tokens:
            return
        if attempt.last_token_at:
            per_token_s = (self._last_report - attempt.last_token_at) / num_tokens
            self._inter_token_s[attempt.priority].observe(per_token_s)
        elif not attempt.delivery.num_logged:
            attempt.first_token_at = time.time()
            waited_s = max(0.0, attempt.first_token_at - attempt.delivery.enqueued_ms / 1000)
            self._metrics.time_to_first_token_seconds.labels(attempt.priority).observe(waited_s)
        attempt.last_token_at = self._last_report


def _ending(reason: FinishReason, detail: str) -> Ending:
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return Ending("succeeded", reason.value, detail=detail)
    return Ending("failed", "error", "internal", f"engine: {detail or reason.value}")
