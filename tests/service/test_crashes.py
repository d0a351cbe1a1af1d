"""Engines that die, hang or fail in one job: who is blamed, who goes on, who is tried again."""

import pytest
import redis

from tests.support import fake_engine
from tests.support.jobs import Producer, answer, events, token_ids
from tests.support.server import BrokerMaker
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker

ALONE = ("--max-slots", "8")


def innocents(producer: Producer, count: int, max_tokens: int = 40) -> dict[str, str]:
    return {producer.add(prompt=f"w{i} w9", max_tokens=max_tokens): f"w{i} w9" for i in range(20, 20 + count)}


def check_answers(producer: Producer, jobs: dict[str, str], max_tokens: int = 40) -> list[int]:
    """All have ended as if nothing had happened; how many attempts each took."""
    attempts = []
    for job_id, prompt in jobs.items():
        result = producer.result(job_id, timeout_s=30)
        assert (result.state, list(result.choices[0].token_ids)) == ("succeeded", answer(prompt, max_tokens))
        assert token_ids(producer.log(job_id)) == answer(prompt, max_tokens)
        assert events(producer.log(job_id)).count("end") == 1
        attempts.append(result.attempts)
    return attempts


@pytest.mark.parametrize("trouble", [fake_engine.POISON_ID, fake_engine.RAISE_ID], ids=["killed", "exception"])
def test_who_ends_the_engine_twice_while_alone_is_set_aside_and_the_others_succeed(
    make_worker: WorkerMaker, producer: Producer, trouble: int
) -> None:
    worker = make_worker(*ALONE, delay_s=0.005)
    jobs = innocents(producer, 3)
    culprit = producer.add(prompt=f"w{trouble} w5")
    jobs |= innocents(producer, 6)
    result = producer.result(culprit, timeout_s=30)
    assert (result.state, result.code, result.attempts) == ("dead", "dead_letter", 3)
    assert "alone" in (result.error or "")
    assert max(check_answers(producer, jobs)) <= 2
    assert len(worker.logged("engine_down")) == 3
    assert producer.client.xlen(producer.keys.dead) == 1
    assert worker.metric("jobs_dead_total", "dead_letter") == 1


def test_an_engine_that_hangs_is_killed_and_its_jobs_go_on(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker(*ALONE, "--stall-s", "1", delay_s=0.005)
    jobs = innocents(producer, 3)
    culprit = producer.add(prompt=f"w{fake_engine.HANG_ID} w5", max_attempts=1)
    assert producer.result(culprit, timeout_s=30).state == "dead"
    check_answers(producer, jobs)
    [down] = worker.logged("engine_down")
    assert "made no step for 1 s" in down["reason"]


def test_probes_are_answered_while_the_engine_hangs(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker("--stall-s", "2")
    producer.add(prompt=f"w{fake_engine.HANG_ID} w5", max_attempts=1)
    wait_until(lambda: worker.metric("slots_active") == 1, message="a job inside")
    for path in ("/livez", "/readyz", "/healthz", "/metrics"):
        assert worker.get(path)[0] == 200
    worker.wait_for_log("engine_down")


def test_the_reason_of_an_exception_in_a_step_is_logged_in_one_line(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker()
    producer.result(producer.add(prompt=f"w{fake_engine.RAISE_ID} w5", max_attempts=1))
    assert "RuntimeError" in worker.wait_for_log("engine_down")["reason"]


def test_a_fault_of_the_engine_in_one_job_is_tried_again_and_goes_on_from_the_log(
    make_worker: WorkerMaker, producer: Producer
) -> None:
    worker = make_worker()
    prompt = f"w{fake_engine.FAULT_ID} w5"
    jobs = innocents(producer, 2) | {producer.add(prompt=prompt, max_tokens=40): prompt}
    assert check_answers(producer, jobs) == [1, 1, 2]
    assert worker.metric("jobs_released_total", "fault") == 1
    assert worker.logged("engine_down") == []


def test_a_fault_in_every_attempt_fails_the_job_with_what_it_has(make_worker: WorkerMaker, producer: Producer) -> None:
    make_worker()
    prompt = f"w{fake_engine.ALWAYS_FAULT_ID} w5"
    job_id = producer.add(prompt=prompt, max_attempts=2)
    wait_until(lambda: producer.state(job_id).get("state") == "delayed", message="a pause between the attempts")
    result = producer.result(job_id, timeout_s=20)
    assert (result.state, result.code, result.attempts) == ("failed", "internal", 2)
    assert list(result.choices[0].token_ids) == answer(prompt, fake_engine.TROUBLE_INDEX)


def test_a_job_in_its_pause_can_be_cancelled(
    make_worker: WorkerMaker, producer: Producer, redis_client: redis.Redis, broker
) -> None:
    make_worker()
    job_id = producer.add(prompt=f"w{fake_engine.ALWAYS_FAULT_ID} w5")
    wait_until(lambda: producer.state(job_id).get("state") == "delayed", message="a pause between the attempts")
    broker.cancel(job_id)
    result = producer.result(job_id)
    assert (result.state, len(result.choices[0].token_ids)) == ("cancelled", fake_engine.TROUBLE_INDEX)


def test_one_suspect_follows_the_other_without_a_wait_for_new_jobs(
    make_worker: WorkerMaker, make_broker: BrokerMaker, producer: Producer
) -> None:
    broker = make_broker("setup")
    for number in range(12):
        producer.add(prompt=f"w{20 + number}", max_tokens=12)
    broker.release(broker.fetch(12), "batch")
    make_worker()
    wait_until(lambda: producer.entries() == 0, 6.0, "the end of twelve suspects")


def test_a_job_whose_hash_is_no_hash_does_not_stop_the_queue(
    make_worker: WorkerMaker, producer: Producer, redis_client: redis.Redis
) -> None:
    redis_client.set(producer.keys.job("strange"), "x", ex=600)
    worker = make_worker("--lease-s", "1")
    producer.add("strange", prompt="w5")
    wait_until(lambda: worker.metric("redis_errors_total", "response") >= 2, 20, "a claim and a reclaim that fail")
    assert producer.result(producer.add(prompt="w5", max_tokens=3), timeout_s=10).state == "succeeded"
