"""`worker top` on real workers: what it says is what is, and who does not answer is silent."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import redis

from tests.support.jobs import Producer
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker, WorkerUnderTest
from worker import cli, command
from worker.connection import connect, hear, subscribe
from worker.control import MAX_ANSWERS_PER_S
from worker.keys import LANES, Keys, names_of
from worker.snapshot import decode
from worker.top.watch import ANSWER_S, Watch

Capture = pytest.CaptureFixture[str]
Look = Callable[..., dict[str, Any]]


@pytest.fixture
def look(redis_url: str, queue: str, capsys: Capture) -> Look:
    """One look as `worker top --once --json` prints it."""

    def run(*options: str) -> dict[str, Any]:
        assert command.run(cli.cli, ["top", "--once", "--json", "--redis-url", redis_url, "--queue", queue, *options]) == 0
        [line] = capsys.readouterr().out.splitlines()
        return json.loads(line)

    return run


def only(data: dict[str, Any]) -> dict[str, Any]:
    [worker] = data["workers"]
    return worker


def snapshot_when(look: Look, holds: Callable[[dict[str, Any]], bool], *options: str) -> dict[str, Any]:
    """The first snapshot of the only worker of which this holds."""

    def seen() -> dict[str, Any] | None:
        snapshot = only(look(*options))["snapshot"]
        return snapshot if snapshot and holds(snapshot) else None

    return wait_until(seen, 20.0, "a look")


@contextmanager
def stopped(worker: WorkerUnderTest) -> Iterator[None]:
    os.kill(worker.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.process.pid, signal.SIGCONT)


def test_a_look_is_the_truth(make_worker: WorkerMaker, producer: Producer, look: Look) -> None:
    worker = make_worker("--max-slots", "8", delay_s=0.02)
    ids = {producer.add(f"job-{lane}", lane=lane, prompt="w20 w21 w22", max_tokens=400): lane for lane in LANES}
    wide = producer.add("wide", prompt="w30", max_tokens=400, n=3, ignore_eos=True)
    told = snapshot_when(look, lambda now: sum(each["tokens"] > 20 for each in now["requests"]) == 4)
    requests = {each["id"]: each for each in told["requests"]}
    assert {job_id: requests[job_id]["lane"] for job_id in ids} == ids
    assert (requests[wide]["width"], requests[wide]["max_tokens"]) == (3, 1200)
    assert {(each["phase"], each["resumed"]) for each in told["requests"]} == {("decode", 0)}
    assert {each["prompt_tokens"] for job_id, each in requests.items() if job_id in ids} == {3}
    [engine] = told["engines"]
    assert (engine["slots"], engine["phases"]["decode"], engine["is_up"]) == (8, 6, True)
    assert engine["step"]["decode"] == 6
    samples = worker.samples()
    kv = sum(samples["kv_blocks", name] for name in ("used", "free"))
    assert kv == engine["kv"]["capacity_blocks"] == 1024
    assert (told["state"], told["model"], told["pid"]) == ("serving", "fake", worker.process.pid)


def test_counters_and_latencies_are_those_of_the_registry(make_worker: WorkerMaker, producer: Producer, look: Look) -> None:
    worker = make_worker()
    for i in range(3):
        producer.result(producer.add(prompt=f"w{20 + i}", max_tokens=30))
    told = snapshot_when(look, lambda now: now["counters"]["jobs_finished.succeeded.length"] == 3)
    samples = worker.samples()
    for name, value in told["counters"].items():
        metric, *labels = name.split(".")
        if metric != "slot_steps":  # the engine goes on reporting
            assert samples[f"{metric}_total", ",".join(reversed(labels))] == value
    assert told["counters"]["generated_tokens"] == 90
    observed = sum(value for (name, _), value in samples.items() if name == "inter_token_latency_seconds_count")
    assert sum(told["latencies"]["between_tokens"]["counts"]) == observed == 87
    buckets = told["latencies"]["first_token"]
    for number, bound in enumerate(buckets["bounds"]):
        upto = sum(samples["time_to_first_token_seconds_bucket", f"{bound},{lane}"] for lane in LANES)
        assert sum(buckets["counts"][: number + 1]) == upto


def test_the_queue_is_as_queue_stats_tell_it(
    make_worker: WorkerMaker, look: Look, redis_url: str, queue: str, capsys: Capture
) -> None:
    make_worker()
    seen = look()["queue"]
    assert command.run(cli.cli, ["queue", "stats", "--json", "--redis-url", redis_url, "--queue", queue]) == 0
    stats = json.loads(capsys.readouterr().out)
    names = [[worker["id"] for worker in each.pop("workers")] for each in (seen, stats)]  # a heartbeat may come in between
    assert names[0] == names[1] != []
    assert seen == stats


def test_a_worker_that_does_not_answer_is_silent(make_worker: WorkerMaker, look: Look) -> None:
    worker = make_worker("--max-slots", "5")
    wait_until(lambda: only(look())["snapshot"], message="an answer")
    with stopped(worker):
        silent = only(look())
    assert (silent["is_silent"], silent["snapshot"], silent["figures"]) == (True, None, None)
    assert silent["heartbeat"]["pid"] == str(worker.process.pid)
    wait_until(lambda: not only(look())["is_silent"], message="an answer again")


def test_several_workers_answer_each_for_itself(make_worker: WorkerMaker, producer: Producer, look: Look) -> None:
    made = [make_worker("--max-slots", "2", delay_s=0.02) for _ in range(2)]
    ids = {producer.add(prompt=f"w{i}", max_tokens=400) for i in range(20, 24)}

    def both() -> list[dict[str, Any]] | None:
        snapshots = [worker["snapshot"] for worker in look()["workers"] if worker["snapshot"]]
        return snapshots if sum(len(each["requests"]) for each in snapshots) == 4 and len(snapshots) == 2 else None

    seen = wait_until(both, 20.0, "four requests at two workers")
    assert {each["pid"] for each in seen} == {worker.process.pid for worker in made}
    assert {each["id"] for worker in seen for each in worker["requests"]} == ids


def test_a_worker_of_partitions_is_one_worker(
    make_worker: WorkerMaker, redis_client: redis.Redis, queue: str, look: Look
) -> None:
    make_worker("--partitions", "2", "--max-slots", "4", delay_s=0.02)
    for name in names_of(queue, 2):
        Producer(redis_client, name).add(f"job-of-{name}", prompt="w20", max_tokens=400)
    told = snapshot_when(look, lambda now: len(now["requests"]) == 2, "--partitions", "2")
    assert {each["id"] for each in told["requests"]} == {f"job-of-{name}" for name in names_of(queue, 2)}
    assert look("--partitions", "2")["queue"]["lanes"]["normal"]["held"] == 2


def test_many_who_look_at_once_share_their_answers(make_worker: WorkerMaker, redis_client: redis.Redis, queue: str) -> None:
    make_worker()
    keys = Keys(queue)
    with closing(subscribe(redis_client, keys.look)) as answers:
        assert hear(answers, 5.0) is not None
        with redis_client.pipeline() as pipe:
            for _ in range(50):
                pipe.publish(keys.control, "look")
            pipe.execute()
        first = hear(answers, 5.0)
        assert first is not None
        assert decode(first[1]).state == "serving"
        more = 0
        while hear(answers, 3 / MAX_ANSWERS_PER_S):
            more += 1
        assert more <= 2


def test_what_strangers_write_to_the_channel_breaks_no_look(
    make_worker: WorkerMaker, redis_client: redis.Redis, redis_url: str, queue: str
) -> None:
    worker, noises = make_worker(), [b"\xff\xfe", b"\x81", b"x" * 1_000_000, b""]

    def talk() -> bool:
        while noises:
            redis_client.publish(Keys(queue).look, noises.pop())
        return True

    with connect(redis_url, queue) as client, closing(Watch([client], queue, [queue])) as watch:
        wait_until(lambda: all(each.now for each in watch.look().workers), message="an answer")
        with stopped(worker):
            assert watch.look(talk).unreadable == 4
        wait_until(lambda: [each.now and each.now.state for each in watch.look().workers] == ["serving"], message="an answer")


def test_what_strangers_write_as_a_heartbeat_breaks_no_look(redis_client: redis.Redis, queue: str, look: Look) -> None:
    keys = Keys(queue)
    said = {
        "bytes": {b"\xff": b"\xfe"},
        "names": {"id": "another", "seen_s": "x"},
        "numbers": {"pid": "x", "slots": "9" * 5000},
    }
    redis_client.zadd(keys.workers, dict.fromkeys([*said, "no-map"], float("inf")))
    for name, fields in said.items():
        redis_client.hset(keys.worker(name), mapping=fields)
    redis_client.set(keys.worker("no-map"), "?")
    for key in (keys.workers, *map(keys.worker, [*said, "no-map"])):
        redis_client.expire(key, 60)
    told = look()["queue"]["workers"]
    assert [(each["id"], each["seen_s"]) for each in told] == [(name, 0.0) for name in sorted([*said, "no-map"])]
    assert [(each["pid"], each["slots"]) for each in told if "pid" in each] == [(0, 0)]


def test_the_first_look_at_partitions_is_of_the_time_since_the_start(make_worker: WorkerMaker, queue: str, look: Look) -> None:
    make_worker("--partitions", "2")
    worker = wait_until(lambda: (seen := only(look("--partitions", "2")))["snapshot"] and seen, message="an answer")
    assert worker["figures"]["seconds"] == pytest.approx(worker["snapshot"]["up_s"], abs=0.001)


def test_what_was_said_between_two_looks_is_not_the_present(
    make_worker: WorkerMaker, redis_client: redis.Redis, redis_url: str, queue: str
) -> None:
    worker, keys = make_worker(), Keys(queue)
    with connect(redis_url, queue) as client, closing(Watch([client], queue, [queue])) as watch:
        wait_until(lambda: all(each.now for each in watch.look().workers), message="an answer")
        with closing(subscribe(redis_client, keys.look)) as answers:
            assert hear(answers, 5.0) is not None
            redis_client.publish(keys.control, "look")  # somebody else looks
            assert hear(answers, 5.0) is not None
        with stopped(worker):
            wait_until(lambda: not watch.look().workers[0].now, message="silence")
            seen = [watch.look().workers[0].now for _ in range(2)]
    assert seen == [None, None]


def test_a_worker_whose_heartbeat_was_deleted_is_asked_all_the_same(
    make_worker: WorkerMaker, redis_client: redis.Redis, redis_url: str, queue: str
) -> None:
    make_worker()
    with connect(redis_url, queue) as client, closing(Watch([client], queue, [queue])) as watch:
        before = wait_until(lambda: [each.now for each in watch.look().workers if each.now], message="an answer")
        redis_client.delete(Keys(queue).workers)
        [after] = [each.now for each in watch.look().workers]
    assert after is not None
    assert after.up_s > before[0].up_s


def test_who_talks_without_end_holds_up_no_look(redis_client: redis.Redis, redis_url: str, queue: str) -> None:
    keys, noise = Keys(queue), b"\xff" * 50_000
    with connect(redis_url, queue) as client, closing(Watch([client], queue, [queue])) as watch:
        watch.look()
        for _ in range(400):
            redis_client.publish(keys.look, noise)
        redis_client.zadd(keys.workers, {"nobody": float("inf")})
        redis_client.expire(keys.workers, 60)
        began = time.monotonic()
        seen = watch.look()
    assert time.monotonic() - began < ANSWER_S + 2.0
    assert (seen.unreadable, [worker.id for worker in seen.workers]) == (0, ["nobody"])


def test_a_cancel_behind_a_look_is_heard(make_worker: WorkerMaker, producer: Producer, redis_client: redis.Redis) -> None:
    make_worker(delay_s=0.05)
    job = producer.add(prompt="w20", max_tokens=400)
    wait_until(lambda: producer.num_logged(job), message="a token")
    for word in ("look", "look at me", f"cancel {job}", "look"):
        redis_client.publish(producer.keys.control, word)
    assert producer.result(job).state == "cancelled"


def test_an_empty_queue_says_how_to_start_a_worker(redis_url: str, queue: str, capsys: Capture) -> None:
    assert command.run(cli.cli, ["top", "--redis-url", redis_url, "--queue", queue]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        " no worker serves this queue",
        f" start one: `worker start --queue {queue} --redis-url {redis_url}`",
    ]


def test_a_closed_output_is_no_terminal(redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert command.run(cli.cli, ["top", "--redis-url", redis_url, "--queue", queue]) == 0


def test_without_a_server_it_is_one_line_and_code_5(capsys: Capture) -> None:
    assert command.run(cli.cli, ["top", "--redis-url", "redis://127.0.0.1:1/0"]) == 5
    told = capsys.readouterr()
    assert (told.out, len(told.err.splitlines())) == ("", 1)
    assert told.err.startswith("worker: redis server 127.0.0.1:1: ")


HEARS_CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs are without
from worker.cli import main
main()
"""


@pytest.mark.parametrize("how", ["q", "ctrl-c", "sigterm"])
def test_on_a_terminal_it_is_a_live_screen_that_is_left_as_it_was_found(
    make_worker: WorkerMaker, redis_url: str, queue: str, how: str
) -> None:
    make_worker("--max-slots", "3")
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command_words = [sys.executable, "-c", HEARS_CTRL_C, "top", "--redis-url", redis_url, "--queue", queue]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "90", "LINES": "20"}
    process = subprocess.Popen(command_words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    shown = b""

    def sees(text: bytes) -> bool:
        nonlocal shown
        if select.select([ours], [], [], 0.05)[0]:
            shown += os.read(ours, 65536)
        return text in shown

    try:
        wait_until(lambda: sees(b"q quit") and sees(b"no_work 3"), 20.0, "a screen")
        if how == "q":
            os.write(ours, b"q")
        else:
            process.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
        wait_until(lambda: sees(b"\x1b[?1049l"), message="the screen as it was before")
        assert process.wait(10.0) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
