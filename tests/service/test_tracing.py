"""A job's trace: to its result, its lines of the log and, where a collector is named, its spans."""

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.support import fake_engine
from tests.support.collector import Collector, Span, bad_collector, collector
from tests.support.jobs import Producer
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker
from worker.client import Client

SLOW_S = 0.02
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collector() as kept:
        yield kept


def check_stages(kept: Collector, job: Span, *names: str) -> None:
    """These stages fill the span, each beginning where the last one ends."""
    stages = kept.inside(job)
    assert [stage.name for stage in stages] == list(names)
    assert [stage.start_s for stage in stages] == [job.start_s, *[stage.end_s for stage in stages[:-1]]]
    assert stages[-1].end_s == job.end_s
    assert sum(stage.duration_s for stage in stages) == pytest.approx(job.duration_s, abs=1e-5)


# ---- without spans


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ({}, "succeeded"),
        ({"max_tokens": -3}, "failed"),
        ({"model": "other"}, "failed"),
        ({"deadline_ms": 1}, "expired"),
        ({"v": 9}, "dead"),
        ({"prompt": f"w{fake_engine.ALWAYS_FAULT_ID} w5", "max_attempts": 1}, "failed"),
    ],
    ids=["ended", "refused", "other model", "expired", "unknown version", "engine's fault"],
)
def test_every_ending_tells_the_trace_in_result_and_log(shared: Producer, shared_worker, body: dict, state: str) -> None:
    job_id = shared.add(**{"prompt": "w5 w6", "max_tokens": 4, "traceparent": PARENT} | body)
    result = shared.result(job_id)
    assert (result.state, result.traceparent) == (state, PARENT)
    line = wait_until(lambda: [each for each in shared_worker.logged("job_ended") if each["job"] == job_id])[0]
    assert line["trace_id"] == TRACE


def test_a_job_whose_traceparent_is_none_runs_without_one(shared: Producer, shared_worker) -> None:
    job_id = shared.add(prompt="w5 w6", max_tokens=4, traceparent="00-x")
    assert (shared.result(job_id).state, shared.result(job_id).traceparent) == ("succeeded", None)
    line = wait_until(lambda: [each for each in shared_worker.logged("job_ended") if each["job"] == job_id])[0]
    assert "trace_id" not in line


def test_a_client_gives_the_trace_and_gets_it_back(shared: Producer, shared_queue: str, redis_url: str) -> None:
    with Client(redis_url, shared_queue) as client:
        assert client.result(client.enqueue("w5 w6", max_tokens=3, traceparent=PARENT)).traceparent == PARENT


def test_enqueue_takes_the_trace_of_its_environment(
    shared: Producer, shared_queue: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEPARENT", PARENT)
    job_id = uuid.uuid4().hex
    command = ["enqueue", "w5 w6", "--id", job_id, "--redis-url", redis_url, "--queue", shared_queue, "--max-tokens", "2"]
    subprocess.run([sys.executable, "-m", "worker.cli", *command], check=True, stdout=subprocess.DEVNULL)
    assert shared.result(job_id).traceparent == PARENT


def test_a_worker_without_spans_imports_nothing_that_makes_them() -> None:
    """redis-py loads OpenTelemetry's metrics by itself where they are installed."""
    code = "import sys, worker.cli, worker.process; print([n for n in sys.modules if 'etry.sdk.trace' in n or 'exporter' in n])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_spans_without_the_extra_are_refused_in_one_line() -> None:
    hidden = "import sys; sys.modules['opentelemetry'] = None; from worker.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        hidden,
        "start",
        "--cpu",
        "--metrics-port",
        "0",
        "--otlp-endpoint",
        "http://127.0.0.1:4318",
    ]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "worker: start: --otlp-endpoint: http://127.0.0.1:4318: OpenTelemetry's SDK is not installed; "
        "pip install 'slotmill[otel]'"
    ]


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317", "http://", "http://x:99999"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    command = [sys.executable, "-m", "worker.cli", "start", "--cpu", "--metrics-port", "0", "--otlp-endpoint", url]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"--otlp-endpoint: {url}: not an http or https URL" in refused.stderr


# ---- with spans


def test_a_job_s_spans_say_where_its_time_went(
    make_worker: WorkerMaker, producer: Producer, queue: str, spans: Collector
) -> None:
    worker = make_worker("--otlp-endpoint", spans.url, delay_s=SLOW_S)
    job_id = producer.add(prompt="w5 w6", max_tokens=10, traceparent=PARENT)
    result = producer.result(job_id)
    [job] = spans.wait_for_job(job_id)
    assert (job.trace_id, job.parent_id, job.is_error, spans.paths) == (TRACE, CALLER, False, {"/v1/traces"})
    check_stages(spans, job, "queue", "prepare", "prefill", "decode")
    queued, _, _, decode = spans.inside(job)
    assert queued.duration_s == pytest.approx(result.timings.queued_s, abs=1e-5)
    assert decode.duration_s >= 4 * SLOW_S  # of nine steps; the first token may be heard of late
    assert result.timings.e2e_s - 1 < job.duration_s <= result.timings.e2e_s + 0.001  # which is written a moment later
    told = {"messaging.destination.name": queue, "gen_ai.usage.output_tokens": 10, "gen_ai.response.finish_reasons": ["length"]}
    assert {name: job.attributes[name] for name in told} == told
    assert job.resource["service.name"] == "slotmill-worker"
    assert worker.wait_for_log("job_ended")["span_id"] == job.span_id


def test_names_of_attributes_are_those_of_the_conventions(
    make_worker: WorkerMaker, producer: Producer, spans: Collector
) -> None:
    from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes, messaging_attributes

    known = {
        value
        for module in (error_attributes, gen_ai_attributes, messaging_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    make_worker("--otlp-endpoint", spans.url)
    [job] = spans.wait_for_job(producer.add(prompt="w5", max_tokens=0, n=1, model="other"))
    assert [name for name in job.attributes if name not in known and not name.startswith("slotmill.")] == []


def test_no_span_holds_text_of_a_job(make_worker: WorkerMaker, producer: Producer, spans: Collector) -> None:
    make_worker("--otlp-endpoint", spans.url)
    spans.wait_for_job(producer.add(prompt="w188 w199", max_tokens=20, stop="w177", metadata={"a": "w166"}))
    assert [word for word in ("w188", "w199", "w177", "w166") if word in str(spans.spans)] == []


def test_a_job_that_goes_on_at_another_worker_keeps_its_trace(
    make_worker: WorkerMaker, producer: Producer, spans: Collector
) -> None:
    first = make_worker("--lease-s", "1", "--otlp-endpoint", spans.url, delay_s=SLOW_S)
    job_id = producer.add(prompt="w5 w6", max_tokens=60, traceparent=PARENT)
    wait_until(lambda: producer.num_logged(job_id) > 5, message="tokens")
    first.process.kill()
    second = make_worker("--lease-s", "1", "--otlp-endpoint", spans.url)
    assert producer.result(job_id, timeout_s=15).traceparent == PARENT
    [job] = spans.wait_for_job(job_id)
    assert (job.trace_id, job.parent_id, job.attributes["slotmill.attempt"]) == (TRACE, CALLER, 2)
    assert job.attributes["slotmill.resumed_tokens"] > 5
    check_stages(spans, job, "prepare", "prefill", "decode")
    assert [second.wait_for_log(event)["trace_id"] for event in ("job_taken_over", "job_ended")] == [TRACE, TRACE]


def test_attempts_at_a_job_without_a_trace_share_one(make_worker: WorkerMaker, producer: Producer, spans: Collector) -> None:
    worker = make_worker("--otlp-endpoint", spans.url)
    job_id = producer.add(prompt=f"w{fake_engine.FAULT_ID} w5", max_tokens=20)
    one, two = spans.wait_for_job(job_id, count=2)
    assert (one.trace_id, one.parent_id, one.is_error) == (two.trace_id, "", True)
    assert [one.attributes["slotmill.state"], two.attributes["slotmill.state"]] == ["delayed", "succeeded"]
    assert worker.wait_for_log("job_ended")["trace_id"] == one.trace_id
    assert producer.result(job_id).traceparent is None


def test_what_the_caller_does_not_record_is_not_exported(
    make_worker: WorkerMaker, producer: Producer, spans: Collector
) -> None:
    make_worker("--otlp-endpoint", spans.url)
    producer.result(producer.add(prompt="w5", max_tokens=2, traceparent=f"00-{TRACE}-{CALLER}-00"))
    spans.wait_for_job(producer.add(prompt="w6", max_tokens=2))
    assert len(spans.jobs()) == 1


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("refuses", ["spans_not_taken"]),
        ("error", ["spans_not_taken"]),
        ("redirects", ["spans_not_taken"]),
        ("silent", []),
        ("endless", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_collector_in_trouble_costs_spans_and_nothing_else(
    make_worker: WorkerMaker, producer: Producer, monkeypatch: pytest.MonkeyPatch, kind: str, lines: list[str]
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with bad_collector(kind) as bad:
        worker = make_worker("--otlp-endpoint", bad.url)
        jobs = [producer.add(prompt=f"w{i} w9", max_tokens=5) for i in range(20, 60)]
        assert {producer.result(job_id).state for job_id in jobs} == {"succeeded"}
        wait_until(
            lambda: [line["event"] for line in worker.log if line["part"] == "tracing"] == lines, message="a line or none"
        )
        assert kind != "endless" or bad.hung_up.wait(5)
        started = time.monotonic()
        assert worker.stop() == 0
    assert time.monotonic() - started < 10  # without a bound, until the collector hangs up
    assert [line for line in worker.lines if not line.startswith("{")] == []
