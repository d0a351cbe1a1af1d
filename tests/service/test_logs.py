"""What workers log: JSON lines that can be told apart, four of a job at most on any road, and nothing of what it says."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from tests.support import fake_engine
from tests.support.jobs import Producer, words
from tests.support.wait import wait_until
from tests.support.worker import Unread, WorkerMaker, WorkerUnderTest
from worker.broker import Broker

SLOW_S = 0.02
OF_A_JOB = 4
WORD = re.compile(r"\bw\d{1,3}\b")
"""All that prompts and answers of the fake model consist of."""


def job_lines(*workers: WorkerUnderTest) -> Iterator[dict[str, object]]:
    return (line for worker in workers for line in worker.log if "job" in line)


def events_of(job_id: str, *workers: WorkerUnderTest) -> list[object]:
    """In the order of time."""
    lines = sorted(job_lines(*workers), key=lambda line: str(line["timestamp"]))
    return [line["event"] for line in lines if line["job"] == job_id]


def check(*workers: WorkerUnderTest, queue: str) -> None:
    """What holds of every line, and of every job."""
    for worker in workers:
        assert len(worker.log) == len(worker.lines), "a line that is no JSON object"
        for line in worker.log:
            assert list(line)[:4] == ["timestamp", "level", "event", "part"]
            if line["event"] != "device_chosen":  # before it is known who speaks
                assert (line["queue"], str(line["worker"]).endswith(f"-{worker.process.pid}")) == (queue, True)
            assert WORD.search(json.dumps(line)) is None
    assert all("attempt" in line for line in job_lines(*workers))
    most = Counter(str(line["job"]) for line in job_lines(*workers)).most_common(1)
    assert most[0][1] <= OF_A_JOB


def ended(producer: Producer, job_ids: Iterable[str]) -> list[str]:
    return [producer.result(job_id, timeout_s=20).state for job_id in job_ids]


def test_a_job_leaves_one_line_with_where_its_time_went(make_worker: WorkerMaker, producer: Producer, queue: str) -> None:
    worker = make_worker(delay_s=SLOW_S)
    job_id = producer.add(prompt="w5 w6", max_tokens=10)
    timings = producer.result(job_id).timings
    [line] = wait_until(lambda: worker.logged("job_ended"))
    assert events_of(job_id, worker) == ["job_ended"]
    told = {"level": "info", "state": "succeeded", "reason": "length", "lane": "normal", "attempt": 1}
    told |= {"prompt_tokens": 2, "tokens": 10, "cached_tokens": 0, "resumed_tokens": 0}
    assert {name: line[name] for name in told} == told
    assert line["queued_s"] == pytest.approx(timings.queued_s, abs=0.001)
    assert line["ttft_s"] == pytest.approx(timings.ttft_s, abs=0.001)
    assert timings.e2e_s - 0.001 <= line["duration_s"] < timings.e2e_s + 2
    worker.stop()
    check(worker, queue=queue)


def test_every_end_at_one_worker_leaves_four_lines_at_most(
    make_worker: WorkerMaker, producer: Producer, broker: Broker, queue: str
) -> None:
    worker = make_worker(delay_s=0.005)
    ways: dict[str, dict[str, object]] = {
        "succeeded": {"max_tokens": 4},
        "failed": {"max_tokens": -3},
        "expired": {"deadline_ms": 1},
        "dead": {"v": 9},
        "cancelled": {"max_tokens": 400},
    }
    jobs = {state: producer.add(**{"prompt": "w188 w199"} | body) for state, body in ways.items()}
    again = producer.add(prompt=f"w{fake_engine.FAULT_ID} w5", max_tokens=20)
    wait_until(lambda: producer.num_logged(jobs["cancelled"]) > 0, message="tokens")
    broker.cancel(jobs["cancelled"])
    assert ended(producer, jobs.values()) == list(jobs)
    assert ended(producer, [again]) == ["succeeded"]
    poison = producer.add(prompt=f"w{fake_engine.POISON_ID} w5")
    assert ended(producer, [poison]) == ["dead"]
    worker.stop()
    assert [events_of(job_id, worker) for job_id in jobs.values()] == [["job_ended"]] * len(jobs)
    assert events_of(again, worker) == ["job_released", "job_ended"]
    assert events_of(poison, worker) == ["job_released", "job_released", "job_ended"]  # of three that came to no end
    check(worker, queue=queue)


def test_a_job_that_moves_between_workers_leaves_four_lines_at_most(
    make_worker: WorkerMaker, producer: Producer, queue: str
) -> None:
    options = ("--lease-s", "1", "--drain-s", "0.2", "--max-slots", "2")
    frozen = make_worker(*options, delay_s=SLOW_S)
    fenced = producer.add(prompt="w188 w199", max_tokens=80)
    wait_until(lambda: producer.num_logged(fenced) > 3, message="tokens")
    frozen.process.send_signal(signal.SIGSTOP)
    killed = make_worker(*options, delay_s=SLOW_S)
    wait_until(lambda: killed.logged("job_taken_over"), message="a takeover")
    killed.process.kill()
    leaving = make_worker(*options, delay_s=SLOW_S)
    wait_until(lambda: producer.state(fenced)["owner"].endswith(f"-{leaving.process.pid}"), message="another one")
    drained = producer.add(prompt="w188 w190", max_tokens=200)
    wait_until(lambda: producer.num_logged(drained) > 3, message="tokens")
    leaving.stop()
    last = make_worker(*options)
    assert ended(producer, [fenced, drained]) == ["succeeded", "succeeded"]
    frozen.process.send_signal(signal.SIGCONT)
    frozen.wait_for_log("job_fenced")
    workers = [frozen, killed, leaving, last]
    for worker in (frozen, killed, last):
        worker.stop()
    assert events_of(fenced, *workers) == ["job_taken_over", "job_ended", "job_fenced"]
    assert events_of(drained, *workers) == ["job_released", "job_ended"]
    check(*workers, queue=queue)


def test_what_the_engine_writes_on_stderr_is_a_line_as_any_other(
    make_worker: WorkerMaker, producer: Producer, queue: str
) -> None:
    worker = make_worker()
    producer.result(producer.add(prompt=f"w{fake_engine.RAISE_ID} w5", max_attempts=1))
    line = worker.wait_for_log("engine_said")
    assert line["text"].startswith("Traceback (most recent call last)")
    assert line["text"].endswith("RuntimeError: trouble")
    worker.stop()
    check(worker, queue=queue)


def test_an_engine_that_says_very_much_is_neither_held_up_nor_repeated_in_full(
    make_worker: WorkerMaker, producer: Producer
) -> None:
    noisy = (
        f"import os, sys; sys.stderr.write('noise ' * 500_000); sys.stderr.flush(); os.execv({sys.executable!r}, sys.argv[1:])"
    )
    engine = shlex.join([sys.executable, "-c", noisy, *fake_engine.command()])
    worker = make_worker("--engine-command", engine)
    assert producer.result(producer.add(prompt="w5", max_tokens=2)).state == "succeeded"
    said = "".join(line["text"] for line in worker.logged("engine_said"))
    assert 0 < len(said) < 20_000


@pytest.mark.parametrize("reader", ["stands still", "is gone"])
def test_who_reads_the_log_holds_nothing_up(make_worker: WorkerMaker, producer: Producer, reader: str) -> None:
    worker = make_worker(kind=Unread)
    assert isinstance(worker, Unread)
    if reader == "is gone":
        worker.hang_up()
    jobs = [producer.add(prompt="w5 w6", max_tokens=2) for _ in range(40)]
    assert ended(producer, jobs) == ["succeeded"] * len(jobs)
    assert worker.stop() == 0


def test_prompts_and_answers_are_in_the_log_when_asked_for(make_worker: WorkerMaker, producer: Producer) -> None:
    worker = make_worker("--log-prompts")
    result = producer.result(producer.add(prompt="w5 w6", max_tokens=3))
    assert worker.wait_for_log("job_started")["prompt"] == "w5 w6"
    assert worker.wait_for_log("job_ended")["text_0"] == words(result.choices[0].token_ids) == result.choices[0].text


def test_the_log_is_text_where_that_is_asked_for() -> None:
    command = [sys.executable, "-m", "worker.cli", "start", "--cpu", "--metrics-port", "0", "--engine-command", "/nowhere"]
    left = subprocess.run([*command, "--log-format", "text"], capture_output=True, text=True, check=False)
    assert "worker_started" in left.stderr
    assert [line for line in left.stderr.splitlines() if line.startswith("{")] == []


def test_lines_tell_the_time_in_utc(make_worker: WorkerMaker, producer: Producer) -> None:
    before = time.time()
    worker = make_worker()
    producer.result(producer.add(prompt="w5", max_tokens=2))
    worker.wait_for_log("job_ended")
    stamps = [str(line["timestamp"]) for line in worker.log]
    assert stamps[0] >= time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(before))
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", stamp) for stamp in stamps)
