"""Batch files through a queue: what the scripts count, what commands write, and what is left on the server."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai.types
import pytest
import redis

from tests.support.jobs import answer, words
from tests.support.server import end_of
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker, WorkerUnderTest
from worker import cli, command
from worker.batch import ledger as ledger_module
from worker.batch import queue_commands, queue_road
from worker.batch.ledger import Ledger
from worker.broker import Broker
from worker.client import Client
from worker.errors import InvalidJob
from worker.keys import Keys

Run = Callable[..., int]
Capture = pytest.CaptureFixture[str]

NUM_LINES = 30


def line(number: int, **body: Any) -> dict[str, Any]:
    request = {"model": "fake", "prompt": f"w{number % 60 + 2} w7", "max_tokens": 3, "temperature": 0} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": request}


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def read(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for path in paths if path.exists() for each in path.read_text().splitlines()]


def ids(*paths: Path) -> list[str]:
    return [each["custom_id"] for each in read(*paths)]


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A file of its own content, so that it makes a batch of its own."""
    return write_lines(tmp_path / "in.jsonl", *(line(i, user=str(tmp_path)) for i in range(1, NUM_LINES + 1)))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def errors(out: Path) -> Path:
    return out.with_name("out.errors.jsonl")


@pytest.fixture
def batch(redis_url: str, queue: str) -> Run:
    """batch("list") on the test's queue, which nobody serves; the exit code."""
    return lambda *words: command.run(cli.cli, ["batch", *map(str, words), "--redis-url", redis_url, "--queue", queue])


@pytest.fixture
def served(redis_url: str, shared_queue: str, shared_worker: WorkerUnderTest) -> Run:
    """The same on a queue with a worker."""
    del shared_worker
    return lambda *words: command.run(cli.cli, ["batch", *map(str, words), "--redis-url", redis_url, "--queue", shared_queue])


@pytest.fixture
def ledger(redis_client: redis.Redis, queue: str) -> Iterator[Ledger]:
    return Ledger(redis_client, queue)


def added(batch: Run, given: Path, capsys: Capture, *more: object) -> str:
    """Submit without an output; the id of the batch."""
    assert batch("submit", "-i", given, *more) == 0
    return capsys.readouterr().out.strip()


def record(batch: Run, batch_id: str, capsys: Capture) -> dict[str, Any]:
    capsys.readouterr()
    assert batch("status", batch_id, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# What the scripts keep


def test_a_record_counts_what_was_added_once_and_how_it_ended(ledger: Ledger, broker: Broker) -> None:
    ledger.open("b", total=3)
    for _ in range(2):
        ledger.add("b", "low", [(f"b-{i}", b"") for i in (1, 2, 3)])
    done, dead, _ = broker.fetch(3)
    for _ in range(2):
        broker.finish([end_of(done), end_of(dead, "dead", code="dead_letter")])
    found = ledger.find("b")
    assert (found["added"], found["succeeded"], found["dead"], found.num_ended, found.has_ended) == (3, 1, 1, 2, False)


def test_a_replay_takes_the_count_of_a_dead_job_back(ledger: Ledger, broker: Broker, redis_client: redis.Redis) -> None:
    ledger.open("b", total=1)
    ledger.add("b", "low", [("b-1", b"body")])
    broker.finish([end_of(job, "dead") for job in broker.fetch(1)])
    [(row, _)] = redis_client.xrange(broker.keys.dead)
    for _ in range(2):
        broker._scripts.run("replay", [broker.keys.job("b-1"), broker.keys.dead], broker.keys.prefix, "b-1", row)
    assert (ledger.find("b")["dead"], ledger.find("b")["added"]) == (0, 1)


def test_a_producer_that_only_names_a_batch_makes_no_record(broker: Broker, ledger: Ledger, redis_client: redis.Redis) -> None:
    broker.enqueue("j", "low", b"", batch_id="b")
    broker.finish([end_of(job) for job in broker.fetch(1)])
    assert not redis_client.exists(broker.keys.batch("b"), broker.keys.batches)
    assert ledger.records() == []


@pytest.mark.parametrize(("state", "is_known"), [("succeeded", True), ("failed", False), ("cancelled", False)])
def test_only_a_job_that_ended_without_success_is_forgotten(
    ledger: Ledger, broker: Broker, redis_client: redis.Redis, state: str, is_known: bool
) -> None:
    ledger.open("b", total=1)
    ledger.add("b", "low", [("b-1", b"")])
    assert ledger.forget(["b-1", "b-2"]) == ["queued", None]
    broker.finish([end_of(job, state) for job in broker.fetch(1)])
    assert ledger.forget(["b-1"]) == [state]
    assert ledger.add("b", "low", [("b-1", b"")])[0].status == ("duplicate" if is_known else "queued")
    assert (ledger.find("b")["added"], ledger.find("b")[state]) == (1, int(is_known))
    assert bool(redis_client.exists(broker.keys.result("b-1"))) == is_known


def test_what_is_settled_goes_soon_and_what_has_not_ended_stays(
    ledger: Ledger, broker: Broker, redis_client: redis.Redis
) -> None:
    ledger.add("b", "low", [("b-1", b""), ("b-2", b"")])
    broker.finish([end_of(job) for job in broker.fetch(1)])
    for _ in range(2):
        ledger.settle(["b-1", "b-2", "b-3"])
    keys = broker.keys
    assert not redis_client.exists(keys.log("b-1"))
    ended = [redis_client.ttl(key("b-1")) for key in (keys.job, keys.result)]
    assert all(0 < ttl <= ledger_module.SETTLED_TTL_S for ttl in ended)
    assert redis_client.ttl(keys.job("b-2")) > ledger_module.SETTLED_TTL_S


# submit with an output


def test_each_line_is_answered_once_and_let_go_of_on_the_server(
    served: Run, given: Path, out: Path, errors: Path, redis_client: redis.Redis, shared_queue: str, capsys: Capture
) -> None:
    assert served("submit", "-i", given, "-o", out, "--window", 7, "--id", "let-go") == 0
    assert sorted(ids(out)) == sorted(f"c{i}" for i in range(1, NUM_LINES + 1))
    assert command.run(cli.cli, ["batch", "verify", "-i", str(given), "-o", str(out)]) == 0
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in read(out)}
    assert texts["c3"] == words(answer("w5 w7", 3))
    lives = [redis_client.ttl(Keys(shared_queue).result(f"let-go-{i}")) for i in range(1, NUM_LINES + 1)]
    assert max(lives) <= ledger_module.SETTLED_TTL_S
    found = openai.types.Batch.model_validate(record(served, "let-go", capsys))
    assert (found.status, found.request_counts.completed) == ("completed", NUM_LINES)
    assert read(errors) == []


def test_the_order_of_the_input_holds_within_a_small_window(served: Run, given: Path, out: Path) -> None:
    assert served("submit", "-i", given, "-o", out, "--window", 5, "--order", "input") == 0
    assert ids(out) == [f"c{i}" for i in range(1, NUM_LINES + 1)]


def test_bodies_that_fill_the_memory_set_aside_for_them_go_one_at_a_time(
    served: Run, given: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("WINDOW_BYTES", "PAGE_BYTES"):
        monkeypatch.setattr(queue_road, bound, 1)
    assert served("submit", "-i", given, "-o", out) == 0
    assert ids(out) == [f"c{i}" for i in range(1, NUM_LINES + 1)]


def test_a_line_that_fails_and_a_bad_one_are_error_lines(served: Run, tmp_path: Path, out: Path, errors: Path) -> None:
    lines = (line(1), line(2, model="another"), line(3, temperature=-1), line(4))
    given = write_lines(tmp_path / "in.jsonl", *lines)
    assert served("submit", "-i", given, "-o", out) == 1
    assert (sorted(ids(out)), sorted(ids(errors))) == (["c1", "c4"], ["c2", "c3"])
    assert command.run(cli.cli, ["batch", "verify", "-i", str(given), "-o", str(out)]) == 0


def test_what_the_server_lost_is_added_again_and_what_passed_unheard_is_found(
    batch: Run, given: Path, out: Path, make_worker: WorkerMaker, redis_client: redis.Redis, queue: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(queue_road, "LOOK_S", 0.2)
    keys = Keys(queue)
    code: list[int] = []
    running = threading.Thread(target=lambda: code.append(_submit(redis_client, queue, given, out)))
    running.start()
    wait_until(lambda: redis_client.xlen(keys.lane("low")) == NUM_LINES, message="added lines")
    with redis_client.pipeline() as pipe:
        pipe.delete(keys.lane("low"), *(keys.job(f"b-{i}") for i in range(1, 11))).execute()
    wait_until(lambda: redis_client.xlen(keys.lane("low")) == 10, message="lines added again")
    assert code == []
    running.join(0)
    for i in range(11, NUM_LINES + 1):  # their entries went too, and nobody saw it
        redis_client.delete(keys.job(f"b-{i}"))
    make_worker()
    wait_until(lambda: redis_client.xtrim(keys.done, 0) is not None and not running.is_alive(), 20, "the end of the batch")
    assert (sorted(ids(out)), code) == (sorted(f"c{i}" for i in range(1, NUM_LINES + 1)), [NUM_LINES])


def _submit(client: redis.Redis, queue: str, given: Path, out: Path) -> int:
    """Collect as the command does, on a thread, where no signals can be set."""
    from worker.batch.lines import Rules
    from worker.batch.output import BatchOutput
    from worker.batch.plan import Plan
    from worker.batch.queue_road import Batch, Collector

    plan = Plan(given, Rules())
    with plan, BatchOutput(plan, given, out, out, {}) as output:
        batch = Batch("b", plan, {"total": plan.num_lines, "last": plan.last})
        return Collector(Ledger(client, queue), batch, output, Silent(), 100).run().succeeded


class Silent:
    def progress(self, _num_done: int) -> None: ...
    def full(self) -> None: ...
    def silence(self) -> None: ...


def test_a_batch_whose_record_the_server_lost_too_is_known_again_and_has_ended_when_all_is_written(
    batch: Run, given: Path, out: Path, make_worker: WorkerMaker, redis_client: redis.Redis, queue: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(queue_road, "LOOK_S", 0.2)
    keys, ledger = Keys(queue), Ledger(redis_client, queue)
    running = threading.Thread(target=lambda: _submit(redis_client, queue, given, out))
    running.start()
    wait_until(lambda: redis_client.xlen(keys.lane("low")) == NUM_LINES, message="added lines")
    redis_client.delete(keys.batch("b"), keys.batches, keys.lane("low"), *(keys.job(f"b-{i}") for i in range(1, 11)))
    wait_until(lambda: redis_client.xlen(keys.lane("low")) == 10, message="lines added again")
    assert not ledger.find("b").has_ended
    for i in range(11, NUM_LINES + 1):
        redis_client.delete(keys.job(f"b-{i}"))
    make_worker()
    running.join(20)
    assert ledger.find("b").has_ended
    assert len(ids(out)) == NUM_LINES


def test_the_server_lost_all_between_two_calls_and_the_batch_ends(
    served: Run, given: Path, out: Path, redis_client: redis.Redis, shared_queue: str
) -> None:
    words = ("submit", "-i", given, "-o", out, "--id", f"lost-{out.parent.name}")
    assert served(*words) == 0
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:10]))
    keys = Keys(shared_queue)
    redis_client.delete(keys.batch(words[-1]), *(keys.job(f"{words[-1]}-{i}") for i in range(1, NUM_LINES + 1)))
    assert served(*words, "--resume") == 0
    assert served("tail", words[-1]) == 0


def test_a_name_that_is_not_utf8_is_found_again_by_fetch(served: Run, given: Path, out: Path, capsys: Capture) -> None:
    odd = given.rename(given.with_name(os.fsdecode(b"odd\xff\n .jsonl")))
    assert served("submit", "-i", odd) == 0
    batch_id = capsys.readouterr().out.strip()
    assert served("tail", batch_id) == 0
    assert served("fetch", batch_id, "-o", out, "--wait") == 0
    assert "not there" not in capsys.readouterr().err  # its file was found
    assert served("list") == 0
    assert "odd\ufffd\ufffd .jsonl" in capsys.readouterr().out


# submit without an output, and what follows


def test_a_batch_that_was_added_is_listed_followed_and_fetched(
    served: Run, given: Path, out: Path, errors: Path, capsys: Capture
) -> None:
    batch_id = added(served, given, capsys)
    assert served("tail", batch_id, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["counts"]["succeeded"] == NUM_LINES
    assert served("list") == 0
    assert batch_id in capsys.readouterr().out
    given.unlink()
    assert served("fetch", batch_id, "-o", out, "--wait") == 0
    assert ids(out) == [f"c{i}" for i in range(1, NUM_LINES + 1)]
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:9]))
    assert served("fetch", batch_id, "-o", out, "--resume") == 0
    assert sorted(ids(out, errors)) == sorted(f"c{i}" for i in range(1, NUM_LINES + 1))


def test_a_file_that_is_added_again_goes_on_with_its_batch(
    batch: Run, given: Path, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    first = added(batch, given, capsys)
    assert batch("submit", "-i", given) == 0
    said = capsys.readouterr()
    assert (said.out.strip(), redis_client.xlen(Keys(queue).lane("low"))) == (first, NUM_LINES)
    assert f"{NUM_LINES} of its lines were on the queue already" in said.err
    assert added(batch, given, capsys, "--max-tokens", 9) != first


def test_fetch_takes_what_has_ended_and_goes_on_later(
    batch: Run, given: Path, out: Path, make_worker: WorkerMaker, capsys: Capture
) -> None:
    batch_id = added(batch, given, capsys)
    assert batch("fetch", batch_id, "-o", out) == 0
    assert (ids(out), "30 lines have not ended" in capsys.readouterr().err) == ([], True)
    make_worker()
    assert batch("fetch", batch_id, "-o", out, "--resume", "--wait") == 0
    assert len(ids(out)) == NUM_LINES


def test_a_cancelled_batch_ends_and_its_lines_can_be_run_again(
    batch: Run, given: Path, out: Path, errors: Path, make_worker: WorkerMaker, capsys: Capture
) -> None:
    batch_id = added(batch, given, capsys)
    assert batch("cancel", batch_id) == 0
    assert capsys.readouterr().out == f"{batch_id}: {NUM_LINES} jobs asked to end\n"
    assert record(batch, batch_id, capsys)["status"] == "cancelling"
    assert batch("submit", "-i", given) == 3
    assert "was cancelled; `worker batch retry-failed" in capsys.readouterr().err
    make_worker()
    assert batch("tail", batch_id) == 1
    found = record(batch, batch_id, capsys)
    assert (found["status"], found["counts"]["cancelled"]) == ("cancelled", NUM_LINES)
    assert batch("fetch", batch_id, "-o", out) == 1
    assert (len(ids(out)), len(ids(errors))) == (0, NUM_LINES)
    assert batch("retry-failed", batch_id) == 0
    assert batch("tail", batch_id) == 0
    assert batch("fetch", batch_id, "-o", out, "--resume") == 0
    assert (len(ids(out)), len(ids(errors))) == (NUM_LINES, 0)


def test_a_submit_with_an_output_runs_again_what_failed_when_told_to(
    batch: Run, given: Path, out: Path, errors: Path, make_worker: WorkerMaker, capsys: Capture
) -> None:
    batch_id = added(batch, given, capsys)
    assert batch("cancel", batch_id) == 0
    make_worker()
    assert batch("tail", batch_id) == 1
    assert batch("fetch", batch_id, "-o", out) == 1
    assert batch("submit", "-i", given, "-o", out, "--resume") == 3
    assert batch("submit", "-i", given, "-o", out, "--resume", "--retry-failed") == 0
    assert (len(ids(out)), len(ids(errors))) == (NUM_LINES, 0)


def test_a_submit_whose_batch_is_cancelled_ends_by_itself(
    batch: Run, given: Path, out: Path, errors: Path, redis_client: redis.Redis, queue: str, ledger: Ledger, make_worker: Any
) -> None:
    def end() -> None:
        wait_until(lambda: redis_client.xlen(Keys(queue).lane("low")) == 4, message="a full window")
        queue_road.cancel(ledger, ledger.find("b"), Silent())
        make_worker()

    ending = threading.Thread(target=end)
    ending.start()
    assert batch("submit", "-i", given, "-o", out, "--window", 4, "--id", "b") == 3
    ending.join()
    assert ids(out) == []
    assert {each["error"]["code"] for each in read(errors)} == {"batch_cancelled"}


def test_a_full_queue_is_waited_for(
    batch: Run, given: Path, out: Path, make_worker: WorkerMaker, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    redis_client.hset(Keys(queue).config, "max_queued", "5")
    make_worker()
    assert batch("submit", "-i", given, "-o", out) == 0
    assert len(ids(out)) == NUM_LINES
    assert f"queue {queue} is full; waiting for room" in capsys.readouterr().err


@pytest.mark.parametrize("has_output", [True, False])
def test_a_server_without_memory_is_waited_for_and_told_once(
    served: Run, given: Path, out: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, has_output: bool
) -> None:
    refusals = iter(range(2))
    add = Broker.enqueue_many

    def add_when_there_is_room(broker: Broker, jobs: Any, lane: str, batch_id: str) -> Any:
        if next(refusals, None) is None:
            return add(broker, jobs, lane, batch_id)
        add(broker, jobs[:2], lane, batch_id)  # which had room yet
        raise redis.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")

    monkeypatch.setattr(Broker, "enqueue_many", add_when_there_is_room)
    monkeypatch.setattr(ledger_module, "MEMORY_S", 0.01)
    assert served("submit", "-i", given, "--id", f"memory-{has_output}", *(["-o", out] if has_output else [])) == 0
    assert capsys.readouterr().err.count("worker: the server's memory is full; waiting for room") == 1
    assert len(ids(out)) == NUM_LINES * has_output


@pytest.mark.parametrize("has_output", [True, False])
def test_a_closed_queue_is_one_line(
    batch: Run, given: Path, out: Path, redis_client: redis.Redis, queue: str, capsys: Capture, has_output: bool
) -> None:
    redis_client.hset(Keys(queue).config, "closed", "1")
    assert batch("submit", "-i", given, *(["-o", out] if has_output else [])) == 1
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"worker: queue {queue}: closed: it takes no jobs while it is drained; `worker queue resume")


@pytest.mark.parametrize("words", [("status",), ("tail",), ("cancel",), ("retry-failed",), ("fetch", "-o", "out")])
def test_a_batch_that_nobody_knows_is_bad_input(batch: Run, capsys: Capture, words: tuple[str, ...]) -> None:
    assert batch(words[0], "b", *words[1:]) == 2
    assert "batch 'b': not on queue" in capsys.readouterr().err


def test_answers_that_are_not_on_the_server_any_more_are_told(
    served: Run, given: Path, out: Path, redis_client: redis.Redis, shared_queue: str, capsys: Capture
) -> None:
    batch_id = added(served, given, capsys)
    assert served("tail", batch_id) == 0
    keys = Keys(shared_queue)
    redis_client.delete(*(key(f"{batch_id}-{i}") for i in (1, 2) for key in (keys.job, keys.result, keys.log)))
    assert served("fetch", batch_id, "-o", out) == 1
    assert "the answers of 2 lines are not on the server any more" in capsys.readouterr().err


def test_a_batch_that_ran_for_two_outputs_counts_its_lines_once(
    served: Run, given: Path, out: Path, redis_client: redis.Redis, shared_queue: str, capsys: Capture
) -> None:
    keys = Keys(shared_queue)
    for path in (out, out.with_name("out2.jsonl")):
        assert served("submit", "-i", given, "-o", path, "--id", "twice") == 0
        redis_client.delete(*(key(f"twice-{i}") for i in range(1, NUM_LINES + 1) for key in (keys.job, keys.result)))
    assert record(served, "twice", capsys)["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert served("status", "twice") == 0
    assert f"{NUM_LINES} of {NUM_LINES} succeeded, 0 failed" in capsys.readouterr().out


def test_a_batch_holds_one_file(batch: Run, given: Path, tmp_path: Path, capsys: Capture) -> None:
    added(batch, given, capsys, "--id", "mine")
    other = write_lines(tmp_path / "other.jsonl", line(1))
    assert batch("submit", "-i", other, "--id", "mine") == 2
    assert "--id: mine: is a batch of another fingerprint" in capsys.readouterr().err


# Leaving


def interrupt(_seconds: float) -> None:
    raise KeyboardInterrupt


def test_a_submit_that_is_told_to_leave_says_how_to_go_on_and_goes_on(
    batch: Run, given: Path, out: Path, make_worker: WorkerMaker, redis_client: redis.Redis, redis_url: str, queue: str
) -> None:
    words = ["batch", "submit", "-i", given, "-o", out, "--window", "9", "--redis-url", redis_url, "--queue", queue]
    with subprocess.Popen([sys.executable, "-m", "worker.cli", *map(str, words)], stderr=subprocess.PIPE) as process:
        wait_until(lambda: redis_client.xlen(Keys(queue).lane("low")) == 9, message="a full window")
        process.terminate()
        said = process.stderr.read().decode()  # type: ignore[union-attr]
    assert process.returncode == 3
    assert f"0 of {NUM_LINES} lines are done; the same command with --resume goes on" in said
    make_worker()
    assert batch("submit", "-i", given, "-o", out, "--resume") == 0
    assert sorted(ids(out)) == sorted(f"c{i}" for i in range(1, NUM_LINES + 1))


def test_who_leaves_a_tail_leaves_the_batch_running(
    batch: Run, given: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = added(batch, given, capsys)
    monkeypatch.setattr(queue_commands, "time", SimpleNamespace(sleep=interrupt, monotonic=time.monotonic))
    assert batch("tail", batch_id) == 3
    assert f"left; batch {batch_id} goes on: end it with `worker batch cancel {batch_id}" in capsys.readouterr().err
    assert record(batch, batch_id, capsys)["status"] == "in_progress"


def test_a_queue_that_nobody_serves_is_told_once(
    batch: Run, given: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = added(batch, given, capsys)
    left = iter(range(5))
    monkeypatch.setattr(queue_commands, "UNSERVED_S", 0.0)
    pause = lambda _seconds: None if next(left) < 4 else interrupt(0)  # noqa: E731
    monkeypatch.setattr(queue_commands, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    assert batch("tail", batch_id) == 3
    told, _ = capsys.readouterr().err.splitlines()
    assert "no worker serves queue" in told


def test_lines_that_failed_alone_are_run_again_and_what_succeeded_stays(
    batch: Run, given: Path, broker: Broker, ledger: Ledger, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    batch_id = added(batch, given, capsys)
    jobs = broker.fetch(NUM_LINES)
    broker.finish([end_of(job, "failed" if i < 3 else "succeeded") for i, job in enumerate(jobs)])
    assert batch("retry-failed", batch_id) == 0
    assert capsys.readouterr().out == f"{batch_id}: 3 jobs run again\n"
    assert {job.job_id for job in broker.fetch(NUM_LINES)} == {job.job_id for job in jobs[:3]}
    found = ledger.find(batch_id)
    assert (found["added"], found["succeeded"], found["failed"]) == (NUM_LINES, NUM_LINES - 3, 0)
    assert redis_client.exists(Keys(queue).result(jobs[5].job_id))


def test_a_retry_that_was_killed_half_way_is_gone_on_with(
    batch: Run, given: Path, broker: Broker, ledger: Ledger, capsys: Capture
) -> None:
    batch_id = added(batch, given, capsys)
    broker.finish([end_of(job, "failed") for job in broker.fetch(3)])
    ledger.open(batch_id, retrying="1 2 3")
    ledger.forget([f"{batch_id}-{i}" for i in (1, 2)])
    assert batch("retry-failed", batch_id) == 0
    assert (ledger.find(batch_id)["added"], ledger.find(batch_id).num_ended) == (NUM_LINES, 0)


def test_a_client_cannot_add_to_a_batch_that_was_cancelled(ledger: Ledger, redis_client: redis.Redis, queue: str) -> None:
    ledger.open("b", total=1)
    ledger.close("b")
    with pytest.raises(InvalidJob, match="batch_id: b: of a batch that was not cancelled"):
        Client(redis_client, queue).enqueue("w5", batch_id="b")
