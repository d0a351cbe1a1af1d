"""Spans of attempts whose clocks differ from the server's, or are set back."""

import time
from collections.abc import Iterator

import pytest

from tests.support.collector import Collector, collector
from worker.attempt import Attempt
from worker.claims import Delivery
from worker.tracing import Tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mill")
    with collector() as running:
        yield running


@pytest.fixture
def tracing(kept: Collector) -> Iterator[Tracing]:
    made = Tracing(kept.url + "/v1/traces/", worker_id="host-1", queue="q", gpu="cpu", model="m")
    yield made
    made.stop()


def attempt(*, server_ahead_s: float = 0.0, number: int = 1) -> Attempt:
    """Claimed 3 s ago by our clock, 2 s after it was put in by the server's."""
    now = time.time()
    started_ms = int((now - 3 + server_ahead_s) * 1000)
    claim = ("a", "1-1", "normal", {}, 0, number, number, f"l:{number}", 7, 0, started_ms - 2000, "new", "", started_ms)
    times = {"claimed_at": now - 3, "entered_at": now - 2.5, "first_token_at": now - 2, "ended_at": now - 1}
    return Attempt(Delivery(*claim), trace_id=TRACE, **times)  # type: ignore[arg-type]


@pytest.mark.parametrize("server_ahead_s", [0.0, 3600.0, -3600.0])
def test_the_time_in_the_queue_is_the_server_s_and_the_rest_ours(
    kept: Collector, tracing: Tracing, server_ahead_s: float
) -> None:
    one = attempt(server_ahead_s=server_ahead_s)
    tracing.note(one, "succeeded")
    tracing.stop()
    [job] = kept.jobs()
    lengths = [(stage.name, round(stage.duration_s, 2)) for stage in kept.inside(job)]
    assert lengths == [("queue", 2.0), ("prepare", 0.5), ("prefill", 0.5), ("decode", 1.0)]
    assert job.end_s == pytest.approx(one.ended_at, abs=1e-5)


def test_a_clock_that_is_set_back_makes_no_negative_span(kept: Collector, tracing: Tracing) -> None:
    one = attempt()
    one.first_token_at = one.claimed_at - 100
    tracing.note(one, "succeeded")
    tracing.stop()
    assert min(span.duration_s for span in kept.spans) == 0


def test_an_attempt_whose_body_nobody_looked_at_has_no_span(kept: Collector, tracing: Tracing) -> None:
    one = attempt()
    one.trace_id = ""
    tracing.note(one, "released", "drain")
    tracing.stop()
    assert kept.spans == []


def test_a_fault_in_making_a_span_is_nobody_else_s(kept: Collector, tracing: Tracing) -> None:
    broken = attempt()
    broken.trace_id = "no number"
    tracing.note(broken, "succeeded")
    tracing.note(attempt(number=2), "released", "engine")
    tracing.stop()
    [job] = kept.jobs()
    assert (job.is_error, job.attributes["error.type"], job.parent_id) == (True, "engine", "")
    assert [stage.name for stage in kept.inside(job)] == ["prepare", "prefill", "decode"]


def test_the_environment_names_service_and_resource(kept: Collector, tracing: Tracing) -> None:
    tracing.note(attempt(), "succeeded")
    tracing.stop()
    told = {
        "service.name": "mill",
        "service.instance.id": "host-1",
        "deployment.environment.name": "test",
        "slotmill.gpu": "cpu",
    }
    assert {name: kept.jobs()[0].resource[name] for name in told} == told
