"""Spans of attempts, made when they have left this worker and exported as OpenTelemetry's OTLP over HTTP; an optional extra.

Relies on the times that an attempt keeps (`Attempt.claimed_at` and so on), and on the SDK, which is imported when spans are
asked for and not before, for batches, bounds, retries and its own `OTEL_*` variables. Leaves to others what is noted, and when.

    job       enqueue, or of a later attempt the claim ------------------------------> end
      queue     enqueue -> claim
      prepare             claim -> handed to the engine
      prefill                        handed over -> first token, a wait for a slot included
      decode                                           first token -> end

1. Nothing here fails or delays a job: spans are handed to a thread, and what a collector does not take is lost.
2. All attempts at a job share a trace, also across workers: the job's own, or one that is made from its id.
3. No span holds text of a prompt or an answer.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from worker import log
from worker.connection import hide_password
from worker.errors import InvalidOption
from worker.keys import GROUP
from worker.traceparent import TraceParent, parse

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from worker.attempt import Attempt

FLUSH_S = 2.0
"""How long a leaving worker tries to hand over its last spans."""
LINE_S = 60.0
"""Between two lines of the log about a collector that does not take spans."""
REMEDY = "pip install 'slotmill[otel]'"
MAX_ERROR_CHARS = 500
_TRACES_PATH = "/v1/traces"

_log = log.get("tracing")


class Tracing:
    """Makes spans of attempts. Threads may share it."""

    def __init__(self, endpoint: str, *, worker_id: str, queue: str, gpu: str, model: str) -> None:
        """Export to the collector at `endpoint`, a base URL. `InvalidOption` for one that is none, or without the extra."""
        _check(endpoint)
        try:
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise _no_extra(endpoint) from error
        own = {"service.name": "slotmill-worker", "service.instance.id": worker_id, "slotmill.gpu": gpu}
        self._ids = _ids()
        _quieten()
        self._provider = TracerProvider(
            resource=Resource.create(own).merge(OTELResourceDetector().detect()),
            id_generator=self._ids,
            shutdown_on_exit=False,  # without a bound
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("slotmill")
        self._worker_id, self._queue, self._model = worker_id, queue, model
        self._lock = threading.Lock()
        self._throttle = log.Throttle(LINE_S)
        self._skew_s = 0.0
        """Our clock less the server's, as the last first claim had it: the times of an enqueue are the server's."""

    def note(self, attempt: "Attempt", state: str, code: str = "", error: str = "") -> None:
        """Make the spans of an attempt that has left, as `state` says; sets its `span_id` where they are exported."""
        if not attempt.trace_id:
            return  # its body was never looked at
        try:
            with self._lock:
                self._make(attempt, state, code, error)
        except Exception:  # noqa: BLE001  it never stands in a job's way
            self._throttle.write(_log.warning, "span_failed", exc_info=True)

    def stop(self) -> None:
        """Hand over what is left, for `FLUSH_S` at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="tracing-flush", daemon=True)
        thread.start()
        thread.join(FLUSH_S)

    def _make(self, attempt: "Attempt", state: str, code: str, error: str) -> None:
        from opentelemetry import trace

        stages = self._stages(attempt)
        self._ids.trace_id = int(attempt.trace_id, 16)
        span = self._tracer.start_span(
            "job",
            context=_parent(parse(attempt.traceparent)),
            kind=trace.SpanKind.CONSUMER,
            attributes=self._attributes(attempt, state, code),
            start_time=stages[0][1],
        )
        if not span.is_recording():
            return
        attempt.span_id = f"{span.get_span_context().span_id:016x}"
        if _is_error(state, code):
            span.set_status(trace.Status(trace.StatusCode.ERROR, error[:MAX_ERROR_CHARS] or code or state))
        inside = trace.set_span_in_context(span)
        for name, start, end in stages:
            self._tracer.start_span(name, context=inside, start_time=start).end(end)
        span.end(stages[-1][2])

    def _stages(self, attempt: "Attempt") -> list[tuple[str, int, int]]:
        """Name, start and end of each stage that it came to, in unix nanoseconds; each begins where the last one ends."""
        delivery, begun = attempt.delivery, []
        if delivery.attempt == 1:  # of a later one nobody knows since when it waited
            self._skew_s = attempt.claimed_at - delivery.started_ms / 1000
            begun.append(("queue", delivery.enqueued_ms / 1000 + self._skew_s))
        begun.append(("prepare", attempt.claimed_at))
        if attempt.entered_at is not None:
            begun.append(("prefill", attempt.entered_at))
        if attempt.first_token_at is not None:
            begun.append(("decode", attempt.first_token_at))
        starts = [begun[0][1]]
        for _, at in [*begun[1:], ("", attempt.ended_at or time.time())]:
            starts.append(max(at, starts[-1]))  # a clock may be set back
        marks = [int(at * 1e9) for at in starts]
        return [(name, marks[i], marks[i + 1]) for i, (name, _) in enumerate(begun)]

    def _attributes(self, attempt: "Attempt", state: str, code: str) -> dict[str, "AttributeValue"]:
        """By OpenTelemetry's conventions for messaging and generative AI where they have a name for it."""
        usage = attempt.usage()
        attributes: dict[str, Any] = {
            "messaging.system": "redis",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.destination.name": self._queue,
            "messaging.consumer.group.name": GROUP,
            "messaging.client.id": self._worker_id,
            "messaging.message.id": attempt.delivery.job_id,
            "gen_ai.provider.name": "slotmill",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.finish_reasons": [output.finish_reason or "" for output in attempt.outputs],
            "slotmill.state": state,
            "slotmill.attempt": attempt.delivery.attempt,
            "slotmill.lane": attempt.priority,
            "slotmill.resumed_tokens": usage.resumed_tokens,
        }
        if attempt.delivery.queue not in ("", self._queue):
            attributes["messaging.destination.partition.id"] = attempt.delivery.queue
        if _is_error(state, code):
            attributes["error.type"] = code or state
        if job := attempt.job:
            attributes |= {
                "gen_ai.operation.name": "chat" if job.messages is not None else "text_completion",
                "gen_ai.request.max_tokens": job.max_tokens,
                "gen_ai.request.temperature": job.temperature,
                "gen_ai.request.top_p": job.top_p,
                "gen_ai.request.choice.count": job.num_choices,
            }
        return attributes


def _check(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        example = "give the base of an OTLP/HTTP receiver, as in http://127.0.0.1:4318"
        raise InvalidOption(f"--otlp-endpoint: {hide_password(endpoint)[:200]}: not an http or https URL; {example}")


def _no_extra(endpoint: str) -> InvalidOption:
    return InvalidOption(f"--otlp-endpoint: {hide_password(endpoint)[:200]}: OpenTelemetry's SDK is not installed; {REMEDY}")


def _is_error(state: str, code: str) -> bool:
    return state not in ("succeeded", "cancelled") and (state, code) != ("released", "drain")


def _parent(named: TraceParent | None) -> Any:
    """The context of the span that caused the job; an empty one begins a trace."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    if named is None:
        return Context()
    flags = trace.TraceFlags(int(named.flags, 16))
    caller = trace.SpanContext(int(named.trace_id, 16), int(named.parent_id, 16), is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(caller), Context())


def _ids() -> Any:
    """Makes ids of spans, and as the id of a new trace gives the one that it was told."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        trace_id = 0

        def generate_trace_id(self) -> int:
            return self.trace_id

    return Ids()


def _exporter(endpoint: str) -> Any:
    """The SDK's, but that it never reads what a collector answers, for an answer without an end would fill the memory, and goes
    nowhere else: a redirect would take spans and secret headers along, or count as an answer that all is well.
    """
    try:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise _no_extra(endpoint) from error

    class Session(requests.Session):
        def request(self, *args: Any, **options: Any) -> requests.Response:
            response = super().request(*args, **options | {"stream": True, "allow_redirects": False})
            response.close()
            if 300 <= response.status_code < 400:
                where = response.headers.get("Location", "elsewhere")
                raise requests.TooManyRedirects(f"it redirects to {where}; give --otlp-endpoint the address that answers")
            return response

    base = endpoint.rstrip("/")
    return OTLPSpanExporter(endpoint=base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH, session=Session())


def _quieten() -> None:
    """What the SDK says of its exports becomes one line now and then."""
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers = [_Trouble()]


class _Trouble(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._throttle = log.Throttle(LINE_S)

    def emit(self, record: logging.LogRecord) -> None:
        self._throttle.write(_log.warning, "spans_not_taken", error=log.message_of(record)[:MAX_ERROR_CHARS])
