"""A worker with two engines and a real server: jobs go to both, and the end of one is no matter of the other's."""

from pathlib import Path

import psutil

from tests.support import fake_engine
from tests.support.jobs import Producer, answer
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker, WorkerUnderTest, workers
from worker.bridge import MAX_FAILED_STARTS

NUM_TOKENS = 60
ROWS = range(20, 28)
SLOW_S = 0.02
"""A step of the fake engine that leaves time to interfere."""


def two_engines(make_worker: WorkerMaker) -> WorkerUnderTest:
    worker = make_worker("--engines", "2", "--max-slots", "4", delay_s=SLOW_S)
    wait_until(lambda: (worker.metric("engine_up", "0"), worker.metric("engine_up", "1")) == (1, 1), message="two engines")
    return worker


def active(worker: WorkerUnderTest) -> tuple[float, float]:
    return worker.metric("engine_slots_active", "0"), worker.metric("engine_slots_active", "1")


def test_jobs_are_spread_over_both_engines(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = two_engines(make_worker)
    jobs = [producer.add(prompt=f"w{row}", max_tokens=NUM_TOKENS) for row in ROWS]
    wait_until(lambda: active(worker) == (4, 4), message="four jobs on each")
    for row, job in zip(ROWS, jobs, strict=True):
        assert list(producer.result(job).choices[0].token_ids) == answer(f"w{row}", NUM_TOKENS)
    assert worker.metric("jobs_finished_total", "length,succeeded") == len(jobs)
    assert (worker.metric("slots"), worker.metric("slots_active")) == (8, 0)


def test_an_engine_that_dies_takes_its_own_jobs_along_only(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = two_engines(make_worker)
    jobs = [producer.add(prompt=f"w{row}", max_tokens=NUM_TOKENS) for row in ROWS]
    wait_until(lambda: active(worker) == (4, 4), message="four jobs on each")
    victim = worker.engine()
    victim.kill()
    results = [producer.result(job) for job in jobs]
    assert [list(result.choices[0].token_ids) for result in results] == [answer(f"w{row}", NUM_TOKENS) for row in ROWS]
    assert sorted(result.attempts for result in results) == [1] * 4 + [2] * 4
    assert worker.metric("jobs_finished_total", "length,succeeded") == len(jobs)
    wait_until(lambda: worker.metric("slots") == 8, message="the engine again")
    assert not psutil.pid_exists(victim.pid)


def test_a_worker_goes_on_with_one_engine_when_the_other_cannot_start_again(
    redis_url: str, queue: str, producer: Producer, tmp_path: Path
) -> None:
    model = fake_engine.save_model(tmp_path / "model")
    with workers(redis_url, queue, model) as make:
        worker = two_engines(make)
        (model / "tokenizer.json").unlink()
        worker.engines()[1].kill()
        wait_until(lambda: len(worker.logged("engine_down")) > MAX_FAILED_STARTS, message="failed starts")
        assert worker.get("/readyz")[0] == 200
        result = producer.result(producer.add(prompt="w20", max_tokens=4))
        assert (result.state, result.attempts) == ("succeeded", 1)
