"""Workers that are told to leave under load: jobs move on, tokens flow meanwhile, no attempt is counted."""

import signal
import time
from functools import partial
from typing import Any

import pytest

from tests.support.chaos import Run
from tests.support.jobs import Producer, answer, token_ids
from tests.support.load import fake_jobs
from tests.support.wait import wait_until
from tests.support.worker import ForkedWorker, WorkerMaker, WorkerUnderTest

STEP_S = 0.02
NUM_TOKENS = 150
"""3 seconds' worth."""


def start(make_worker: WorkerMaker, *options: str, **how: Any) -> WorkerUnderTest:
    return make_worker("--max-slots", "4", *options, delay_s=STEP_S, kind=ForkedWorker, **how)


def streams(producer: Producer, number: int) -> dict[str, str]:
    """Jobs under way, by id their prompt."""
    jobs = {producer.add(prompt=f"w{i} w9", max_tokens=NUM_TOKENS): f"w{i} w9" for i in range(20, 20 + number)}
    wait_until(lambda: all(producer.num_logged(job_id) > 3 for job_id in jobs), message="streams")
    return jobs


def check(producer: Producer, jobs: dict[str, str]) -> None:
    for job_id, prompt in jobs.items():
        result = producer.result(job_id, timeout_s=30)
        assert token_ids(producer.log(job_id)) == list(result.choices[0].token_ids) == answer(prompt, NUM_TOKENS)
        assert (result.state, result.attempts) == ("succeeded", 1)


def test_tokens_flow_while_a_worker_drains_and_it_leaves_within_its_grace(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = start(make_worker, "--drain-s", "1")
    jobs = streams(producer, 4)
    worker.process.terminate()
    terminated_at = time.monotonic()
    worker.wait_for_log("draining")
    before = {job_id: producer.num_logged(job_id) for job_id in jobs}
    wait_until(lambda: all(producer.num_logged(job_id) > before[job_id] + 8 for job_id in jobs), 1, "tokens during the drain")
    assert worker.wait() == 0
    assert time.monotonic() - terminated_at < 1 + 3  # what a drain may take, and an engine's way out
    start(make_worker)
    check(producer, jobs)


def test_jobs_of_a_leaving_worker_move_on_before_any_lease_is_over(make_worker: WorkerMaker, producer: Producer) -> None:
    first = start(make_worker, "--drain-s", "0.2")
    jobs = streams(producer, 4)
    second = start(make_worker)
    assert first.stop() == 0
    wait_until(lambda: second.metric("slots_active") == 4, 3, "four jobs with the second worker, whose lease is 30 s")
    check(producer, jobs)


def test_a_second_sigterm_leaves_at_once_and_no_job_is_the_poorer(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = start(make_worker, "--drain-s", "60")
    jobs = streams(producer, 4)
    worker.process.terminate()
    worker.wait_for_log("draining")
    worker.process.terminate()
    assert worker.wait(timeout_s=5) == 0
    start(make_worker)
    check(producer, jobs)


def test_a_signal_to_the_whole_group_drains_as_one_to_the_worker_does(make_worker: WorkerMaker, producer: Producer) -> None:
    """As `docker stop` with an init that passes it on, or a terminal, does: the engine must not leave first."""
    worker = start(make_worker, "--drain-s", "10")
    jobs = streams(producer, 4)
    for process in (worker.engine(), worker.process):
        process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    check(producer, jobs)


@pytest.mark.timeout(120)
def test_a_rolling_restart_of_every_worker_under_load_costs_no_attempt(
    make_worker: WorkerMaker, redis_url: str, queue: str
) -> None:
    one = partial(start, make_worker, "--drain-s", "0.3", is_awaited=False)
    with Run(redis_url, queue, one, fake_jobs, num_workers=3, num_clients=10, lease_s=30) as run:
        leaving = [partial(run.chaos.drain, worker) for worker in run.fleet.members]
        run.disturb(leaving, mean_pause_s=0.6)
        wait_until(lambda: run.fleet.num_started == 6, 30, "six starts")
        told = run.check()
    assert {of_one.result.attempts for of_one in told if of_one.result} == {1}
