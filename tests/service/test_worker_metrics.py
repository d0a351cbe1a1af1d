"""What a worker's metrics say, held against what its jobs really did: no road by which one ends leaves a number behind."""

import gzip
import urllib.request
from collections.abc import Iterator

import pytest
import redis
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from tests.support import fake_engine
from tests.support.jobs import Producer, answer
from tests.support.server import embedded_server
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker, WorkerUnderTest, workers
from worker.broker import Broker
from worker.connection import connect
from worker.embedded import EmbeddedServer
from worker.keys import LANES
from worker.queue_admin import QueueAdmin

AT_REST = (
    *((name, "") for name in ("slots_active", "requests_running", "requests_waiting", "kv_usage_ratio", "kv_tokens_filled")),
    *((name, "") for name in ("publish_buffer_tokens", "lease_age_max_seconds", "kv_tokens_allocated")),
    ("kv_blocks", "used"),
    ("engine_slots_active", "0"),
)
"""Gauges that are 0 when nothing runs."""
SLOW_S = 0.02
Samples = dict[tuple[str, str], float]


def sum_of(found: Samples, name: str) -> float:
    return sum(value for (each, _), value in found.items() if each == name)


def claims_end(found: Samples) -> bool:
    ends = ("jobs_finished_total", "jobs_released_total", "jobs_fenced_total")
    return sum_of(found, "jobs_claimed_total") == sum(sum_of(found, name) for name in ends)


def of_queue(worker: WorkerUnderTest, name: str, label: str = "") -> float | None:
    """None before it was read."""
    return worker.samples().get((name, label))


def wait_for_rest(worker: WorkerUnderTest) -> Samples:
    """The samples once every gauge is at rest and every claim has ended, been given back or fenced."""

    def at_rest() -> Samples | None:
        found = worker.samples()
        return found if claims_end(found) and not any(found[gauge] for gauge in AT_REST) else None

    return wait_until(at_rest, 5.0, "gauges at rest")


def test_the_numbers_of_jobs_and_tokens_add_up(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker()
    asked = {"high": 5, "normal": 17, "low": 1}
    jobs = {lane: producer.add(lane=lane, prompt="w5 w6 w7", max_tokens=num) for lane, num in asked.items()}
    logs = {lane: (producer.result(job_id), producer.log(job_id))[1] for lane, job_id in jobs.items()}
    found = wait_for_rest(worker)
    assert {lane: found["inter_token_latency_seconds_count", lane] for lane in LANES} == {
        lane: num - 1 for lane, num in asked.items()
    }
    for name in ("queue_time_seconds", "time_to_first_token_seconds", "job_duration_seconds"):
        assert [found[f"{name}_count", lane] for lane in LANES] == [1, 1, 1], name
    assert found["generated_tokens_total", ""] == found["job_generated_tokens_sum", ""] == 23
    assert found["prompt_tokens_total", ""] == found["job_prompt_tokens_sum", ""] == 9
    assert found["published_frames_total", ""] == sum(len(frames) for frames in logs.values())
    assert found["jobs_finished_total", "length,succeeded"] == 3
    assert sum_of(found, "wasted_tokens_total") == 0
    assert sum_of(found, "engine_time_seconds_total") == pytest.approx(sum_of(found, "engine_step_duration_seconds_sum"))


def test_every_end_of_a_job_is_counted_under_its_own_state_and_reason(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker(delay_s=SLOW_S)
    ends = {
        "length,succeeded": producer.add(prompt="w5", max_tokens=2),
        "stop,succeeded": producer.add(prompt="w5", max_tokens=9, stop_token_ids=[answer("w5", 2)[1]]),
        "error,failed": producer.add(prompt="w5", max_tokens=-3),
        "error,dead": "of-a-later-version",
        "expired,expired": producer.add(prompt="w5", max_tokens=400, deadline_ms=1),
        "cancelled,cancelled": producer.add(prompt="w5", max_tokens=400),
    }
    producer.client.xadd(producer.keys.lane("low"), {"v": "99", "id": ends["error,dead"], "m": b"\x80"})
    wait_until(lambda: producer.num_logged(ends["cancelled,cancelled"]) > 2, message="a stream")
    producer.client.publish(producer.keys.control, f"cancel {ends['cancelled,cancelled']}")
    for job_id in ends.values():
        producer.result(job_id)
    found = wait_for_rest(worker)
    assert {end: found["jobs_finished_total", end] for end in ends} == dict.fromkeys(ends, 1)
    assert (found["refused_total", "invalid"], found["refused_total", "unknown_version"]) == (1, 1)
    assert found["jobs_dead_total", "unknown_version"] == 1


def test_a_mass_cancel_leaves_nothing_in_the_gauges(make_worker: WorkerMaker, producer: Producer, broker: Broker) -> None:
    worker = make_worker("--max-slots", "8", delay_s=SLOW_S)
    jobs = [producer.add(prompt="w5 w6", max_tokens=400) for _ in range(12)]
    wait_until(lambda: worker.metric("requests_running") == 8, message="a full batch")
    for job_id in jobs:
        broker.register(job_id)  # a cancel alone misses those that no worker has seen
        broker.cancel(job_id)
    for job_id in jobs:
        assert producer.result(job_id).state == "cancelled"
    found = wait_for_rest(worker)
    assert found["jobs_finished_total", "cancelled,cancelled"] == 12
    assert found["kv_blocks", "free"] == found["kv_blocks_capacity", ""] > 0


def test_a_crash_of_the_engine_leaves_nothing_in_the_gauges(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker(delay_s=SLOW_S)
    job_id = producer.add(prompt="w5 w6", max_tokens=30)
    wait_until(lambda: producer.num_logged(job_id) > 2, message="a stream")
    worker.engine().kill()
    wait_until(lambda: worker.metric("engine_starts_total", "0") == 2, message="a second engine")
    result = producer.result(job_id)
    found = wait_for_rest(worker)
    assert (found["engine_up", "0"], found["slots", ""], found["jobs_released_total", "engine"]) == (1, 8, 1)
    assert found["jobs_claimed_total", "new"] == found["jobs_claimed_total", "released"] == 1
    assert found["queue_time_seconds_count", "normal"] == found["time_to_first_token_seconds_count", "normal"] == 1
    assert found["resumed_tokens_total", ""] == result.usage.resumed_tokens > 2
    made = found["generated_tokens_total", ""] - sum_of(found, "wasted_tokens_total")
    assert made == found["job_generated_tokens_sum", ""] == 30


def test_an_engine_that_is_gone_has_neither_slots_nor_blocks(make_worker: WorkerMaker) -> None:
    worker = make_worker()
    worker.engine().kill()
    wait_until(lambda: worker.metric("engine_starts_total", "0") == 2, message="a second engine")
    worker.engine().kill()  # the third is started after a pause
    found = wait_until(lambda: (found := worker.samples())["engine_up", "0"] == 0 and found, message="no engine")
    assert (found["slots", ""], found["kv_blocks_capacity", ""], found["kv_blocks", "free"]) == (0, 0, 0)
    assert (found["worker_state", "loading"], found["worker_state", "serving"]) == (1, 0)
    wait_until(lambda: worker.metric("engine_up", "0"), message="a third engine")
    assert worker.metric("slots") == 8


def test_what_is_computed_in_vain_is_counted_by_why(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker(delay_s=SLOW_S)
    fenced = producer.add(prompt="w5 w6", max_tokens=400, stream=False)
    wait_until(lambda: worker.metric("generated_tokens_total") > 3, message="tokens")
    producer.client.hset(producer.keys.job(fenced), "lease", "another:1")
    wait_until(lambda: sum_of(worker.samples(), "jobs_fenced_total") == 1, 15.0, "a fenced job")
    found = wait_for_rest(worker)
    in_vain = found["wasted_tokens_total", "fenced"] + found["wasted_tokens_total", "aborted"]
    assert 3 < in_vain <= found["generated_tokens_total", ""]


def test_a_fault_that_is_tried_again_is_given_back_and_its_prompt_counted_twice(
    make_worker: WorkerMaker, producer: Producer
) -> None:
    worker = make_worker()
    job_id = producer.add(prompt=f"w{fake_engine.FAULT_ID} w6", max_tokens=8)
    assert producer.result(job_id).state == "succeeded"
    found = wait_for_rest(worker)
    assert found["jobs_released_total", "fault"] == 1
    assert found["prompt_tokens_total", ""] == 2 * found["job_prompt_tokens_sum", ""]
    assert found["resumed_tokens_total", ""] + found["generated_tokens_total", ""] >= found["job_generated_tokens_sum", ""] == 8
    assert found["time_to_first_token_seconds_count", "normal"] == 1


def test_jobs_that_are_not_due_are_counted_in_their_lane(make_worker: WorkerMaker, broker: Broker) -> None:
    for job_id, lane in (("a", "high"), ("b", "low"), ("c", "low")):
        broker.enqueue(job_id, lane, b"\x80", delay_s=3600)
    worker = make_worker()
    wait_until(lambda: of_queue(worker, "queue_delayed", "low") == 2, message="a heartbeat")
    assert [worker.metric("queue_delayed", lane) for lane in LANES] == [1, 0, 2]


def test_a_pause_is_told_while_all_slots_are_taken(
    make_worker: WorkerMaker, producer: Producer, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    worker = make_worker("--max-slots", "1", delay_s=SLOW_S)
    jobs = [producer.add(prompt="w20", max_tokens=4000) for _ in range(4)]
    wait_until(lambda: worker.metric("slots_active") == 1, message="a job that runs")
    admin = QueueAdmin(redis_client, queue)
    admin.pause()
    wait_until(lambda: of_queue(worker, "queue_paused") == 1, message="a heartbeat")
    admin.resume()
    wait_until(lambda: of_queue(worker, "queue_paused") == 0, message="a heartbeat")
    assert (worker.metric("slots_active"), sum_of(worker.samples(), "jobs_finished_total")) == (1, 0)
    for job_id in jobs:
        broker.cancel(job_id)


def test_jobs_with_hostile_fields_add_no_series(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker("--max-slots", "64")
    wait_until(lambda: of_queue(worker, "dead_entries") == 0, message="a heartbeat")
    before = {key for key in worker.samples() if key[0] != "worker_info"}
    words = ['"} 1\n', "slotmill_evil", "\N{GRINNING FACE}", "a" * 128, "{queue}", "\\"]
    jobs = []
    for number in range(300):
        word = words[number % len(words)]
        body = {"prompt": "w5", "max_tokens": 1, "tenant": f"{word[:100]}{number}", "batch_id": word, "metadata": {"a": word}}
        jobs.append(producer.add(f"{word[:100]}{number}", **body, **({"model": word} if number % 3 == 0 else {})))
    for job_id in jobs:
        producer.result(job_id)
    wait_for_rest(worker)
    assert {key for key in worker.samples() if key[0] != "worker_info"} == before
    assert "evil" not in worker.get("/metrics")[1]


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server that a test may hurt."""
    with embedded_server() as server:
        yield server


def test_without_a_server_the_queue_is_told_as_it_was_last_known_and_redis_connected_says_so(
    own_server: EmbeddedServer, fake_model: object
) -> None:
    with workers(own_server.url, "q", fake_model) as make, connect(own_server.url) as client:  # type: ignore[arg-type]
        client.config_set("appendfsync", "always")
        Broker(client, "q", "x").enqueue("a", "low", b"\x80", delay_s=3600)
        worker = make()
        wait_until(lambda: of_queue(worker, "queue_delayed", "low") == 1, message="a heartbeat")
        own_server.kill()
        wait_until(lambda: worker.metric("redis_connected") == 0, message="a worker that notices")
        found = worker.samples()
        assert (found["queue_delayed", "low"], found["slots_active", ""], found["lease_age_max_seconds", ""]) == (1, 0, 0)
        assert sum_of(found, "redis_errors_total") > 0
        own_server.start()
        wait_until(lambda: worker.metric("redis_connected") == 1, message="a worker that is back")
        Broker(client, "q", "x").cancel("a")
        wait_until(lambda: of_queue(worker, "queue_delayed", "low") == 0, message="what is true now")


def test_before_the_queue_is_read_nothing_is_told_of_it(own_server: EmbeddedServer, fake_model: object) -> None:
    own_server.kill()
    with workers(own_server.url, "q", fake_model) as make:  # type: ignore[arg-type]
        worker = make(is_awaited=False)
        worker.wait_for_log("engine_ready")
        unread = {name for name, _ in worker.samples()}
        own_server.start()
        wait_until(lambda: of_queue(worker, "dead_entries") == 0, message="a heartbeat")
        news = {name for name, _ in worker.samples()} - unread
    assert news == {
        "dead_entries",
        *(f"queue_{name}" for name in ("entries", "pending", "oldest_age_seconds", "delayed", "paused")),
    }


def test_metrics_are_told_as_openmetrics_and_compressed_where_that_is_asked_for(shared_worker: WorkerUnderTest) -> None:
    url = shared_worker.wait_for_log("worker_started")["metrics"]
    asked = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "Accept-Encoding": "gzip"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=asked), timeout=5) as reply:
        kind, text = reply.headers["Content-Type"], gzip.decompress(reply.read()).decode()
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    named = {sample.name for family in open_metrics(text) for sample in family.samples}
    assert named == {f"slotmill_{name}" for name, _ in shared_worker.samples()}
