"""A worker process with a real server and the fake engine: what producers and clients may rely on."""

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgpack
import psutil
import pytest

from tests.support import fake_engine
from tests.support.jobs import Producer, answer, events, text, token_ids, words
from tests.support.server import embedded_server
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker, WorkerUnderTest, workers
from worker.broker import Broker
from worker.claims import Emission
from worker.connection import connect
from worker.embedded import EmbeddedServer, free_port
from worker.frames import ControlFrame, TokenFrame, encode_frame

SLOW_S = 0.02
"""A step of the fake engine that leaves time to interfere."""


# ---- one job


def test_a_raw_entry_from_redis_cli_is_answered(shared: Producer) -> None:
    result = shared.result(shared.add_json(prompt="w5 w6", max_tokens=4, temperature=0))
    assert (result.state, result.choices[0].token_ids) == ("succeeded", tuple(answer("w5 w6", 4)))


def test_log_and_channel_carry_the_same_frames_and_the_result_their_sum(shared: Producer) -> None:
    job_id = uuid.uuid4().hex
    with shared.listening([job_id]) as heard:
        result = shared.result(shared.add(job_id, prompt="w5 w6", max_tokens=40))
        wait_until(lambda: "end" in events(heard[job_id]), message="an end on the channel")
    assert heard[job_id] == shared.log(job_id)
    assert token_ids(heard[job_id]) == list(result.choices[0].token_ids) == answer("w5 w6", 40)
    assert text(heard[job_id]) == result.choices[0].text == words(answer("w5 w6", 40))
    assert events(heard[job_id]) == ["start", "end"]


def test_the_same_id_twice_gives_one_result(shared: Producer) -> None:
    job_id = shared.add(prompt="w5 w6", max_tokens=8)
    shared.add(job_id, prompt="w7 w8", max_tokens=3)
    result = shared.result(job_id)
    wait_until(lambda: shared.entries() == 0, message="empty lanes")
    assert shared.result(job_id) == result
    assert events(shared.log(job_id)).count("end") == 1


def test_an_id_that_only_the_body_names_is_the_job_s(shared: Producer) -> None:
    job_id = uuid.uuid4().hex
    shared.add_json(id=job_id, prompt="w5", max_tokens=2)
    assert shared.result(job_id).state == "succeeded"


def test_a_refusal_under_an_id_that_only_the_body_names_is_found_there(shared: Producer) -> None:
    job_id = uuid.uuid4().hex
    shared.add_json(id=job_id, prompt="w5", max_tokens=-3)
    assert shared.result(job_id).code == "invalid"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": -3}, "max_tokens: -3"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temprature": 0.5}, "temperature"),
        ({"model": "other"}, "model: other: this worker serves fake"),
        ({"prompt": " ".join(["w5"] * 600)}, "prompt: 600 tokens"),
        ({"prompt": "w5 " * 4_000_000}, "body: "),
        ({"prompt": None, "messages": [{"role": "user", "content": "w5"}]}, "messages"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "+".join(value),
)
def test_a_job_that_cannot_be_served_ends_as_invalid_and_names_the_field(
    shared: Producer, body: dict[str, object], named: str
) -> None:
    result = shared.result(shared.add(**{"prompt": "w5"} | body))
    assert (result.state, result.code) == ("failed", "invalid")
    assert result.error is not None
    assert named in result.error
    assert len(result.error) < 300


def test_a_truncated_body_ends_as_invalid(shared: Producer) -> None:
    packed = msgpack.packb({"prompt": "w5 w6", "max_tokens": 4})
    result = shared.result(shared.add_raw(uuid.uuid4().hex, packed[:-1]))
    assert (result.state, result.code) == ("failed", "invalid")


def test_an_unknown_version_goes_to_the_dead_letters(shared: Producer) -> None:
    result = shared.result(shared.add(prompt="w5", v=9))
    assert (result.state, result.code) == ("dead", "unknown_version")
    assert shared.client.xlen(shared.keys.dead) >= 1


def test_a_stop_string_cuts_text_and_tokens_at_the_match(shared: Producer) -> None:
    ids = answer("w5 w6", 6)
    job_id = shared.add(prompt="w5 w6", max_tokens=200, stop=f"w{ids[4]} w{ids[5]}")
    choice = shared.result(job_id).choices[0]
    assert (choice.text, choice.finish_reason) == (words(ids[:4]) + " ", "stop")
    assert list(choice.token_ids) == ids
    assert text(shared.log(job_id)) == choice.text


def test_a_stop_id_ends_the_output(shared: Producer) -> None:
    ids = answer("w5 w6", 6)
    choice = shared.result(shared.add(prompt="w5 w6", max_tokens=200, stop_token_ids=[ids[5]])).choices[0]
    assert (list(choice.token_ids), choice.finish_reason) == (ids, "stop")


def test_no_tokens_are_asked_for_and_none_come(shared: Producer) -> None:
    result = shared.result(shared.add(prompt="w5 w6", max_tokens=0))
    assert (result.state, result.choices[0].token_ids, result.usage.prompt_tokens) == ("succeeded", (), 2)


def test_a_job_without_a_stream_is_silent_until_its_end(shared: Producer) -> None:
    job_id = uuid.uuid4().hex
    with shared.listening([job_id]) as heard:
        shared.result(shared.add(job_id, prompt="w5 w6", max_tokens=100, stream=False))
        wait_until(lambda: heard[job_id], message="an end on the channel")
    assert [type(frame) for frame in heard[job_id]] == [ControlFrame]
    assert token_ids(shared.log(job_id)) == answer("w5 w6", 100)


def test_a_deadline_that_has_passed_ends_the_job_without_a_token(shared: Producer) -> None:
    result = shared.result(shared.add(prompt="w5", deadline_ms=1))
    assert (result.state, result.choices[0].token_ids) == ("expired", ())


def test_the_gauges_are_true_when_all_is_done(shared: Producer, shared_worker: WorkerUnderTest) -> None:
    shared.result(shared.add(prompt="w5 w6", max_tokens=30))
    idle = {
        "slots_active",
        "requests_running",
        "requests_waiting",
        "kv_usage_ratio",
        "kv_tokens_allocated",
        "publish_buffer_tokens",
    }
    wait_until(lambda: not any(shared_worker.metric(name) for name in idle), message="gauges at zero")
    found = shared_worker.samples()
    assert found["slots", ""] == 8
    assert found["redis_connected", ""] == found["worker_state", "serving"] == 1
    assert found["kv_blocks", "free"] == found["kv_blocks_capacity", ""] == fake_engine.NUM_BLOCKS


# ---- interference


def test_a_cancelled_job_ends_with_what_it_has(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker(delay_s=SLOW_S)
    job_id = producer.add(prompt="w5 w6", max_tokens=400)
    wait_until(lambda: producer.num_logged(job_id) > 3, message="tokens")
    assert worker.metric("slots_active") == 1
    producer.client.hset(producer.keys.job(job_id), "cancel", "1")
    result = producer.result(job_id)
    ids = list(result.choices[0].token_ids)
    assert result.state == "cancelled"
    assert ids == answer("w5 w6", len(ids)) == token_ids(producer.log(job_id))
    wait_until(lambda: worker.metric("slots_active") == 0, message="a free slot")


def test_a_job_that_is_silent_hears_of_its_cancel_at_once(make_worker: WorkerMaker, producer: Producer, broker: Broker) -> None:
    worker = make_worker(delay_s=10 * SLOW_S)
    job_id = producer.add(prompt="w5 w6", max_tokens=400, stream=False)
    wait_until(lambda: worker.metric("slots_active") == 1, message="a running job")
    broker.cancel(job_id)
    assert producer.result(job_id, timeout_s=2).state == "cancelled"


def test_a_deadline_in_the_middle_ends_the_job_with_what_it_has(make_worker: WorkerMaker, producer: Producer) -> None:
    make_worker(delay_s=SLOW_S)
    started_ms = time.time() * 1000
    result = producer.result(producer.add(prompt="w5 w6", max_tokens=500, deadline_ms=int(started_ms + 1000)))
    assert result.state == "expired"
    assert 0 < len(result.choices[0].token_ids) < 500
    assert time.time() * 1000 - started_ms >= 1000


def test_a_killed_worker_s_streams_go_on_elsewhere_without_repeat_or_gap(make_worker: WorkerMaker, producer: Producer) -> None:
    first = make_worker("--lease-s", "1.5", delay_s=SLOW_S)
    jobs = {uuid.uuid4().hex: f"w{i} w9" for i in range(8)}
    with producer.listening(list(jobs)) as heard:
        for job_id, prompt in jobs.items():
            producer.add(job_id, prompt=prompt, max_tokens=60)
        wait_until(lambda: all(producer.num_logged(job_id) > 5 for job_id in jobs), message="eight streams")
        first.process.kill()
        second = make_worker("--lease-s", "1.5")
        results = {job_id: producer.result(job_id) for job_id in jobs}
        wait_until(lambda: all("end" in events(frames) for frames in heard.values()), message="eight ends")
    for job_id, prompt in jobs.items():
        assert token_ids(heard[job_id]) == list(results[job_id].choices[0].token_ids) == answer(prompt, 60)
        assert events(heard[job_id]) == ["start", "start", "end"]
        assert results[job_id].usage.resumed_tokens > 5
    assert second.metric("jobs_claimed_total", "reclaimed") == 8


def test_the_engine_of_a_killed_worker_leaves_too(make_worker: WorkerMaker) -> None:
    worker = make_worker()
    engine = worker.engine()
    worker.process.kill()
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, message="the engine's end")


def test_a_worker_survives_its_engine_and_streams_go_on(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker(delay_s=SLOW_S)
    job_id = producer.add(prompt="w5 w6", max_tokens=60)
    wait_until(lambda: producer.num_logged(job_id) > 5, message="tokens")
    worker.engine().kill()
    result = producer.result(job_id)
    assert token_ids(producer.log(job_id)) == list(result.choices[0].token_ids) == answer("w5 w6", 60)
    assert worker.metric("jobs_released_total", "engine") == 1
    assert result.attempts == 2


def test_a_job_that_kills_its_engine_ends_as_a_dead_letter_and_the_worker_goes_on(
    make_worker: WorkerMaker, producer: Producer
) -> None:
    worker = make_worker()
    result = producer.result(producer.add(prompt=f"w{fake_engine.POISON_ID} w5", max_attempts=2), timeout_s=20)
    assert (result.state, result.code) == ("dead", "dead_letter")
    assert worker.metric("jobs_released_total", "engine") == 2
    assert producer.result(producer.add(prompt="w5 w6", max_tokens=2)).state == "succeeded"


def test_a_draining_worker_goes_on_with_its_streams_and_takes_nothing_new(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker("--max-slots", "2", delay_s=SLOW_S)
    jobs = [producer.add(prompt=f"w{i} w9", max_tokens=40) for i in range(2)]
    wait_until(lambda: all(producer.num_logged(job_id) > 0 for job_id in jobs), message="two streams")
    worker.process.terminate()
    wait_until(lambda: worker.logged("draining"), message="a drain")
    assert worker.get("/readyz") == (503, "draining\n")
    late = producer.add(prompt="w7", max_tokens=2)
    assert worker.wait() == 0
    assert [token_ids(producer.log(job_id)) for job_id in jobs] == [answer(f"w{i} w9", 40) for i in range(2)]
    assert [producer.state(job_id).get("state") for job_id in (*jobs, late)] == ["succeeded", "succeeded", None]


def test_what_a_drain_cannot_finish_goes_on_elsewhere_without_a_counted_attempt(
    make_worker: WorkerMaker, producer: Producer
) -> None:
    first = make_worker("--drain-s", "0.3", delay_s=SLOW_S)
    jobs = [producer.add(prompt=f"w{i} w9", max_tokens=100) for i in range(4)]
    wait_until(lambda: all(producer.num_logged(job_id) > 0 for job_id in jobs), message="four streams")
    assert first.stop() == 0
    assert all(producer.state(job_id)["state"] == "queued" for job_id in jobs)
    make_worker()
    for i, job_id in enumerate(jobs):
        result = producer.result(job_id)
        assert token_ids(producer.log(job_id)) == list(result.choices[0].token_ids) == answer(f"w{i} w9", 100)
        assert result.attempts == 1


def test_a_second_interrupt_leaves_at_once_and_still_gives_jobs_back(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker(delay_s=SLOW_S)
    job_id = producer.add(prompt="w5 w6", max_tokens=500)
    wait_until(lambda: producer.num_logged(job_id) > 0, message="tokens")
    worker.process.send_signal(2)
    wait_until(lambda: worker.logged("draining"), message="a drain")
    assert worker.stop(2, timeout_s=5) == 0
    assert producer.state(job_id)["state"] == "queued"


def test_a_burst_leaves_when_the_queue_is_empty(make_worker: WorkerMaker, producer: Producer) -> None:
    jobs = [producer.add(prompt=f"w{i}", max_tokens=5) for i in range(20)]
    worker = make_worker("--burst", is_awaited=False)
    assert worker.wait() == 0
    assert all(producer.result(job_id, 0.1).state == "succeeded" for job_id in jobs)
    assert producer.entries() == 0


def test_a_burst_without_a_server_is_one_line_and_exit_code_5(make_worker: WorkerMaker) -> None:
    worker = make_worker("--burst", "--redis-url", f"redis://:secret@127.0.0.1:{free_port()}/0", is_awaited=False)
    assert worker.wait() == 5
    assert "mend it, or start a server with `worker redis`" in worker.lines[-1]
    assert "secret" not in "".join(worker.lines)


def test_an_attempt_above_the_limit_is_a_dead_letter(make_worker: WorkerMaker, producer: Producer) -> None:
    job_id = producer.add(prompt="w5", max_attempts=1)
    producer.client.hset(producer.keys.job(job_id), mapping={"attempt": "1", "released": "0"})
    make_worker()
    result = producer.result(job_id)
    assert (result.state, result.code) == ("dead", "dead_letter")


def test_a_log_that_is_complete_ends_without_a_step(make_worker: WorkerMaker, producer: Producer, broker: Broker) -> None:
    ids = tuple(answer("w5 w6", 4))
    job_id = producer.add(prompt="w5 w6", max_tokens=4)
    [job] = broker.fetch(1)
    frame = encode_frame(TokenFrame(1, 0, 0, ids, words(ids), 0))
    broker.emit([Emission(job_id, job.lease, job.attempt, 0, 4, frame)])
    broker.release([job])
    worker = make_worker()
    result = producer.result(job_id)
    assert (result.choices[0].token_ids, result.choices[0].finish_reason) == (ids, "length")
    assert (worker.metric("generated_tokens_total"), worker.metric("resumed_tokens_total")) == (0, 4)


def test_a_job_longer_than_the_lease_runs_once(make_worker: WorkerMaker, producer: Producer) -> None:
    for _ in range(2):
        make_worker("--lease-s", "0.5", delay_s=SLOW_S)
    job_id = producer.add(prompt="w5 w6", max_tokens=125)
    result = producer.result(job_id)
    assert events(producer.log(job_id)) == ["start", "end"]
    assert result.timings.e2e_s > 5 * 0.5


def test_jobs_that_are_taken_ahead_are_not_taken_for_abandoned(make_worker: WorkerMaker, producer: Producer) -> None:
    for _ in range(2):
        make_worker("--lease-s", "0.5", "--max-slots", "1", delay_s=SLOW_S)
    jobs = [producer.add(prompt=f"w{i} w9", max_tokens=40) for i in range(20, 26)]
    results = [producer.result(job_id) for job_id in jobs]
    assert [result.attempts for result in results] == [1] * 6
    assert max(result.timings.e2e_s for result in results) > 2 * 0.5


def test_a_free_slot_is_filled_in_the_next_step_while_there_is_a_backlog(make_worker: WorkerMaker, producer: Producer) -> None:
    jobs = [producer.add(prompt=f"w{i} w9", max_tokens=10) for i in range(12)]
    worker = make_worker("--max-slots", "2", delay_s=2 * SLOW_S)
    for job_id in jobs:
        producer.result(job_id)
    found = worker.samples()
    assert found["slot_steps_total", "decode"] == 12 * 10
    assert found["slot_steps_total", "no_work"] <= 6  # at the very start and the very end


# ---- the server


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server that a test may hurt."""
    with embedded_server() as server:
        yield server


@pytest.fixture
def on_own_server(own_server: EmbeddedServer, fake_model: Path) -> Iterator[tuple[WorkerMaker, Producer]]:
    with workers(own_server.url, "q", fake_model) as make, connect(own_server.url) as client:
        yield make, Producer(client, "q")


def test_streams_survive_a_server_that_is_killed_and_comes_back(
    own_server: EmbeddedServer, on_own_server: tuple[WorkerMaker, Producer]
) -> None:
    make, producer = on_own_server
    producer.client.config_set("appendfsync", "always")
    worker = make(delay_s=SLOW_S)
    jobs = {producer.add(prompt=f"w{i} w9", max_tokens=80): f"w{i} w9" for i in range(3)}
    wait_until(lambda: all(producer.num_logged(job_id) > 5 for job_id in jobs), message="three streams")
    own_server.kill()
    wait_until(lambda: worker.get("/readyz")[0] == 503, message="a worker that notices")
    own_server.start()
    for job_id, prompt in jobs.items():
        result = producer.result(job_id)
        assert token_ids(producer.log(job_id)) == list(result.choices[0].token_ids) == answer(prompt, 80)
        assert events(producer.log(job_id)) == ["start", "end"]
    wait_until(lambda: worker.get("/readyz")[0] == 200, message="a ready worker")
    assert len(worker.logged("server_unusable")) < 20


def test_cancels_are_heard_again_after_the_server_came_back(
    own_server: EmbeddedServer, on_own_server: tuple[WorkerMaker, Producer]
) -> None:
    make, producer = on_own_server
    worker = make(delay_s=10 * SLOW_S)
    own_server.kill()
    own_server.start()
    wait_until(
        lambda: dict(producer.client.pubsub_numsub(producer.keys.control))[producer.keys.control.encode()], message="a listener"
    )
    job_id = producer.add(prompt="w5 w6", max_tokens=400, stream=False)
    wait_until(lambda: worker.metric("slots_active") == 1, message="a running job")
    Broker(producer.client, "q", "client").cancel(job_id)
    assert producer.result(job_id, timeout_s=2).state == "cancelled"


def test_a_worker_goes_on_after_flushall(on_own_server: tuple[WorkerMaker, Producer]) -> None:
    make, producer = on_own_server
    worker = make(delay_s=SLOW_S)
    lost = producer.add(prompt="w5 w6", max_tokens=400)
    wait_until(lambda: producer.num_logged(lost) > 0, message="tokens")
    producer.client.flushall()
    assert producer.result(producer.add(prompt="w7", max_tokens=2)).state == "succeeded"
    wait_until(lambda: worker.metric("slots_active") == 0, message="the lost job's slot")
    assert worker.metric("jobs_fenced_total", "emit") == 1


def test_the_engine_does_not_wait_for_a_slow_server(on_own_server: tuple[WorkerMaker, Producer]) -> None:
    make, producer = on_own_server
    worker = make(delay_s=0.01)
    job_id = producer.add(prompt="w5 w6", max_tokens=100)
    wait_until(lambda: producer.num_logged(job_id) > 5, message="tokens")
    producer.client.execute_command("CLIENT", "PAUSE", "4000", "ALL")
    wait_until(lambda: worker.metric("generated_tokens_total") == 100, timeout_s=3.9, message="all tokens during the pause")
    assert worker.metric("publish_buffer_tokens") > 0
    producer.result(job_id)
    assert token_ids(producer.log(job_id)) == answer("w5 w6", 100)


# ---- the process


def test_a_worker_without_a_server_waits_and_is_not_ready(make_worker: WorkerMaker, fake_model: Path) -> None:
    with workers("redis://127.0.0.1:1/0", "q", fake_model) as make:
        worker = make(is_awaited=False)
        worker.wait_for_log("engine_ready")
        assert worker.get("/readyz") == (503, "the server does not answer, or refuses\n")
        assert worker.get("/livez")[0] == 200
        assert worker.metric("redis_connected") == 0
        assert 1 <= len(worker.logged("server_unusable")) <= 5
        assert worker.stop() == 0


def test_an_engine_that_cannot_start_ends_the_worker_with_its_reason(redis_url: str, queue: str, tmp_path: Path) -> None:
    with workers(redis_url, queue, tmp_path) as make:
        worker = make(is_awaited=False)
        assert worker.wait() == 6
    assert worker.lines[-1].startswith(f"worker: no engine: model: {tmp_path} is not a directory")


def test_a_port_that_is_taken_is_one_line(make_worker: WorkerMaker) -> None:
    taken = make_worker().wait_for_log("worker_started")["metrics"].split(":")[2].split("/")[0]
    worker = make_worker("--metrics-port", taken, is_awaited=False)
    assert worker.wait() == 2
    assert len(worker.lines) == 1
    assert f"--metrics-port {taken}: cannot listen" in worker.lines[0]


def test_the_queue_side_never_imports_torch_and_stays_under_100_mb(shared_worker: WorkerUnderTest) -> None:
    loaded = {Path(region.path).name for region in shared_worker.process.memory_maps() if ".so" in region.path}
    assert not {name for name in loaded if "torch" in name}
    assert shared_worker.process.memory_info().rss < 100e6


def test_a_waiting_worker_idles(shared_worker: WorkerUnderTest) -> None:
    before = shared_worker.process.cpu_times()
    time.sleep(3)  # what is measured is the passing of time
    after = shared_worker.process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.02 * 3


def test_nothing_of_a_prompt_is_logged(shared: Producer, shared_worker: WorkerUnderTest) -> None:
    shared.result(shared.add(prompt="w111 w112 w113", max_tokens=3, min_tokens=9))
    shared.result(shared.add(prompt="w111 w112 w113", max_tokens=3))
    assert not any("w111" in line for line in shared_worker.lines)
