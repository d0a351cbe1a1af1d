"""`worker queue` and `worker dead` on a real server: what they print, what they leave, how they end."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import click
import msgpack
import pytest
import redis

from tests.support.jobs import answer
from tests.support.server import end_of
from tests.support.worker import WorkerMaker
from worker import cli, command, queue_commands
from worker.broker import Broker
from worker.client import Client
from worker.errors import QueueClosed, QueueFull, WaitTimeout
from worker.keys import Keys

PROMPT = "a secret prompt"


@pytest.fixture
def run(redis_url: str, queue: str) -> Callable[..., int]:
    """run("queue", "stats") on the test's queue; the exit code."""
    return lambda *words: command.run(cli.cli, [*words, "--redis-url", redis_url, "--queue", queue])


Run = Callable[..., int]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A terminal on which somebody answers no; what was asked."""
    questions: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", lambda question, **_: questions.append(question))
    return questions


def on_sleep(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Calls `act` whenever a command would pause."""
    monkeypatch.setattr(queue_commands, "time", SimpleNamespace(sleep=lambda _: act(), monotonic=time.monotonic))


def interrupt() -> None:
    raise KeyboardInterrupt


def settings(client: redis.Redis, queue: str) -> dict[bytes, bytes]:
    return client.hgetall(Keys(queue).config)  # type: ignore[return-value]


def die(broker: Broker, *job_ids: str, error: str = "it crashed") -> None:
    for job_id in job_ids:
        broker.enqueue(job_id, "normal", msgpack.packb({"prompt": PROMPT}))
        broker.release(broker.fetch(1), "batch")
        broker.finish([end_of(broker.fetch(1)[0], "dead", code="dead_letter", error=error)])


# worker queue


def test_stats_are_a_screen_of_the_queue(run: Run, broker: Broker, capsys: Capture) -> None:
    broker.enqueue("a", "low", b"")
    broker.heartbeat({"model": "m", "slots": 8, "active": 3, "state": "serving"})
    assert run("queue", "stats") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["low", "1", "1", "0", "0", "0", "0", "0", "s"] in rows
    assert any(row[:5] == ["me", "m", "8", "3", "serving"] for row in rows)


def test_stats_are_one_line_of_json(run: Run, broker: Broker, capsys: Capture) -> None:
    broker.enqueue("a", "low", b"")
    assert run("queue", "stats", "--json") == 0
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["lanes"]["low"]["waiting"] == 1


def test_a_watch_goes_on_until_ctrl_c_which_is_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    left = iter([True, False])
    on_sleep(monkeypatch, lambda: next(left) or interrupt())
    assert run("queue", "stats", "--watch", "--json") == 0
    shown = capsys.readouterr()
    assert (len(shown.out.splitlines()), shown.err) == (2, "")


def test_pause_and_resume_may_be_repeated(run: Run, redis_client: redis.Redis, queue: str, capsys: Capture) -> None:
    assert [run("queue", "pause"), run("queue", "pause")] == [0, 0]
    assert settings(redis_client, queue) == {b"paused": b"1"}
    assert [run("queue", "resume"), run("queue", "resume")] == [0, 0]
    assert settings(redis_client, queue) == {}
    paused, _, opened, _ = capsys.readouterr().out.splitlines()
    assert paused.startswith(f"queue {queue}: paused; `worker queue resume --queue {queue} --redis-url redis://")
    assert opened == f"queue {queue}: open"


def test_a_limit_is_set_and_taken_away(run: Run, redis_client: redis.Redis, queue: str, capsys: Capture) -> None:
    assert run("queue", "limit", "100") == 0
    assert settings(redis_client, queue) == {b"max_queued": b"100"}
    assert run("queue", "limit", "none") == 0
    assert settings(redis_client, queue) == {}
    assert capsys.readouterr().out == f"queue {queue}: limit 100\nqueue {queue}: no limit\n"


def test_a_drain_ends_when_the_last_job_has(
    run: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    for job_id in "ab":
        broker.enqueue(job_id, "normal", b"")
    broker.heartbeat({})
    on_sleep(monkeypatch, lambda: broker.finish([end_of(job) for job in broker.fetch(1)]))
    assert run("queue", "drain") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"queue {queue}: empty and closed; `worker queue resume --queue {queue}")
    assert shown.err == ""
    assert settings(redis_client, queue) == {b"closed": b"1"}


def test_a_drain_waits_for_what_is_delayed(run: Run, redis_client: redis.Redis, queue: str, capsys: Capture) -> None:
    redis_client.zadd(Keys(queue).delayed("low"), {"a": 2**42})
    assert run("queue", "drain", "--timeout-s", "0") == 4
    assert "1 job left, 1 of them delayed after 0 s; it stays closed; `worker queue resume" in capsys.readouterr().err


def test_a_drain_that_takes_too_long_is_code_4_and_leaves_the_queue_closed(
    run: Run, broker: Broker, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    broker.enqueue("a", "normal", b"")
    assert run("queue", "drain", "--timeout-s", "0.1") == 4
    no_worker, timeout = capsys.readouterr().err.splitlines()
    assert no_worker == f"worker: no worker serves queue {queue}: nothing that waits ends before one does"
    assert "1 job left" in timeout
    assert settings(redis_client, queue) == {b"closed": b"1"}


def test_a_drain_of_a_paused_queue_says_what_holds_it(run: Run, broker: Broker, queue: str, capsys: Capture) -> None:
    broker.enqueue("a", "normal", b"")
    run("queue", "pause")
    assert run("queue", "drain", "--timeout-s", "0") == 4
    assert f"worker: queue {queue} is paused: nothing that waits ends before it is resumed\n" in capsys.readouterr().err


def test_a_drain_need_not_be_waited_for(run: Run, broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "normal", b"")
    assert run("queue", "drain", "--no-wait") == 0
    assert settings(redis_client, queue) == {b"closed": b"1"}


def test_ctrl_c_leaves_a_drain_with_what_reopens_the_queue(
    run: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch, queue: str, capsys: Capture
) -> None:
    broker.enqueue("a", "normal", b"")
    broker.heartbeat({})
    on_sleep(monkeypatch, interrupt)
    assert run("queue", "drain") == 3
    assert f"left; queue {queue} stays closed; `worker queue resume" in capsys.readouterr().err


def test_a_purge_says_how_many_end_and_what_they_wait_for(
    run: Run, broker: Broker, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    for job_id in "ab":
        broker.enqueue(job_id, "low", b"")
    assert run("queue", "purge", "--lane", "low", "--yes") == 0
    shown = capsys.readouterr()
    assert shown.out == f"queue {queue}, lane low: 2 jobs to end as cancelled\n"
    assert shown.err == f"worker: no worker serves queue {queue}: nothing that waits ends before one does\n"
    assert set(settings(redis_client, queue)) == {b"purged:low"}


def test_a_purge_where_nobody_can_be_asked_needs_yes(
    run: Run, broker: Broker, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    broker.enqueue("a", "low", b"")
    assert run("queue", "purge") == 2
    assert capsys.readouterr().err == "worker: queue purge: nobody can be asked here; give --yes\n"
    assert settings(redis_client, queue) == {}


def test_a_purge_on_a_terminal_asks_and_takes_no_for_an_answer(
    run: Run, broker: Broker, asked: list[str], redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "low", b"")
    assert run("queue", "purge") == 3
    assert asked == [f"queue {queue}: end 1 waiting job?"]
    assert settings(redis_client, queue) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["queue", "pause"], {"is_paused": True, "is_closed": False, "max_queued": None}),
        (["queue", "resume"], {"is_paused": False, "is_closed": False, "max_queued": None}),
        (["queue", "drain", "--no-wait"], {"is_paused": False, "is_closed": True, "max_queued": None}),
        (["queue", "limit", "7"], {"is_paused": False, "is_closed": False, "max_queued": 7}),
        (["queue", "purge", "--lane", "low", "--yes"], {"lanes": ["low"], "jobs": 1}),
        (["dead", "drop", "dead"], {"id": "dead", "status": "dropped"}),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_what_a_command_has_changed_is_one_line_of_json(
    run: Run, broker: Broker, words: list[str], said: dict[str, object], capsys: Capture
) -> None:
    die(broker, "dead")
    broker.enqueue("a", "low", b"")
    assert run(*words, "--json") == 0
    [line] = capsys.readouterr().out.splitlines()
    assert said.items() <= json.loads(line).items()


# worker dead


def test_the_dead_are_listed_newest_first_each_once_without_prompts(
    run: Run, broker: Broker, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    die(broker, "a", "b")
    redis_client.unlink(Keys(queue).job("a"))
    die(broker, "a", error="it crashed again")
    assert run("dead", "list") == 0
    shown = capsys.readouterr().out
    assert [line.split()[5] for line in shown.splitlines()[1:]] == ["a", "b"]
    assert "it crashed again" in shown
    assert PROMPT not in shown


def test_the_dead_are_lines_of_json(run: Run, broker: Broker, capsys: Capture) -> None:
    die(broker, "a", "b", "c")
    assert run("dead", "list", "--json", "--limit", "2") == 0
    shown = capsys.readouterr()
    rows = [json.loads(line) for line in shown.out.splitlines()]
    assert [(row["id"], row["why"], row["attempts"], row["owner"]) for row in rows] == [
        ("c", "dead_letter", 1, "me"),
        ("b", "dead_letter", 1, "me"),
    ]
    assert shown.err == "worker: the newest 2 of 3; --limit shows more\n"


def test_no_dead_are_no_lines(run: Run, capsys: Capture) -> None:
    assert run("dead", "list") == 0
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_no_dead_are_a_word_beside_the_output(
    run: Run, queue: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("dead", "list") == 0
    assert capsys.readouterr() == ("", f"worker: no dead job on queue {queue}\n")
    assert run("dead", "list", "--json") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("how", [["list"], ["show", "a"]], ids=lambda how: how[0])
def test_an_error_text_cannot_steer_the_terminal(run: Run, broker: Broker, how: list[str], capsys: Capture) -> None:
    die(broker, "a", error="\x1b[2Jgone\nnext")
    assert run("dead", *how) == 0
    assert "\ufffd[2Jgone\ufffdnext" in capsys.readouterr().out


def test_a_body_is_shown_only_when_asked_for(run: Run, broker: Broker, capsys: Capture) -> None:
    die(broker, "a")
    assert run("dead", "show", "a") == 0
    assert run("dead", "show", "a", "--json") == 0
    assert PROMPT not in capsys.readouterr().out
    assert run("dead", "show", "a", "--body", "--json") == 0
    assert json.loads(capsys.readouterr().out)["body"] == {"prompt": PROMPT}


@pytest.mark.parametrize("body", [{"m": b"\xc1"}, {"j": b"{"}, {"m": msgpack.packb({"prompt": b"bytes"})}, {}])
def test_a_body_that_cannot_be_shown_is_one_line(
    run: Run, redis_client: redis.Redis, queue: str, body: dict[str, bytes], capsys: Capture
) -> None:
    redis_client.xadd(Keys(queue).dead, {"id": "a", **body})
    assert run("dead", "show", "a", "--body") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    [line] = shown.err.splitlines()
    assert line.endswith("; leave out --body")


@pytest.mark.parametrize("how", [["show"], ["replay"], ["drop"]], ids=lambda how: how[0])
def test_an_id_that_is_not_dead_is_code_2(run: Run, broker: Broker, queue: str, how: list[str], capsys: Capture) -> None:
    broker.enqueue("a", "normal", b"")
    assert run("dead", *how, "a") == 2
    assert f"worker: job a: not among the dead of queue {queue}; `worker dead list --queue" in capsys.readouterr().err


def test_replayed_jobs_wait_again(run: Run, broker: Broker, capsys: Capture) -> None:
    die(broker, "a", "b", "c")
    assert run("dead", "replay", "a", "c", "a") == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["a  queued", "c  queued"]
    assert sorted(job.job_id for job in broker.fetch(9)) == ["a", "c"]


def test_all_are_replayed_in_the_order_in_which_they_died(run: Run, broker: Broker, capsys: Capture) -> None:
    die(broker, "a", "b", "c")
    assert run("dead", "replay", "--all", "--json") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"id": job_id, "status": "queued"} for job_id in "abc"
    ]
    assert [job.job_id for job in broker.fetch(9)] == ["a", "b", "c"]
    assert run("dead", "replay", "--all") == 0


def test_a_job_that_cannot_be_replayed_is_code_1_and_stays(
    run: Run, broker: Broker, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    die(broker, "a", "b")
    redis_client.unlink(Keys(queue).job("a"))
    broker.enqueue("a", "normal", b"another")
    assert run("dead", "replay", "--all") == 1
    assert capsys.readouterr().out == "a  exists\nb  queued\n"
    assert redis_client.xlen(Keys(queue).dead) == 1


def test_dropped_jobs_are_no_longer_dead(
    run: Run, broker: Broker, redis_client: redis.Redis, queue: str, capsys: Capture
) -> None:
    die(broker, "a", "b")
    assert run("dead", "drop", "a") == 0
    assert capsys.readouterr().out == f"queue {queue}: 1 dead job dropped\n"
    assert [fields[b"id"] for _, fields in redis_client.xrange(Keys(queue).dead)] == [b"b"]


def test_all_are_dropped_only_with_yes(
    run: Run, broker: Broker, asked: list[str], redis_client: redis.Redis, queue: str
) -> None:
    die(broker, "a", "b")
    assert run("dead", "drop", "--all") == 3
    assert asked == [f"queue {queue}: forget 2 dead jobs?"]
    assert redis_client.xlen(Keys(queue).dead) == 2
    assert run("dead", "drop", "--all", "--yes") == 0
    assert redis_client.xlen(Keys(queue).dead) == 0


# With a worker


@pytest.fixture
def client(redis_url: str, queue: str) -> Iterator[Client]:
    with Client(redis_url, queue) as made:
        yield made


def test_a_replayed_job_is_answered_under_its_id(run: Run, client: Client, broker: Broker, make_worker: WorkerMaker) -> None:
    client.enqueue("w5 w6", id="a", max_tokens=3, temperature=0)
    broker.finish([end_of(broker.fetch(1)[0], "dead", code="dead_letter")])
    assert run("dead", "replay", "a") == 0
    make_worker()
    result = client.result("a", 10)
    assert (result.state, list(result.choices[0].token_ids)) == ("succeeded", answer("w5 w6", 3))


# What the scripts of the workers and producers make of the settings


def test_nothing_is_claimed_while_the_queue_is_paused(run: Run, client: Client, make_worker: WorkerMaker) -> None:
    run("queue", "pause")
    job_id = client.enqueue("w5", max_tokens=3)
    make_worker()
    with pytest.raises(WaitTimeout):
        client.result(job_id, 0.5)
    assert client.state(job_id) == "queued"
    run("queue", "resume")
    assert client.result(job_id, 10).state == "succeeded"


def test_a_job_that_runs_when_the_queue_is_paused_goes_on(run: Run, client: Client, make_worker: WorkerMaker) -> None:
    make_worker()
    stream = iter(client.stream(client.enqueue("w5", max_tokens=200, ignore_eos=True), 20))
    next(stream)
    run("queue", "pause")
    assert sum(len(delta.token_ids) for delta in stream) > 100


def test_a_drain_lets_all_jobs_end_and_refuses_new_ones_until_it_is_lifted(
    run: Run, client: Client, make_worker: WorkerMaker
) -> None:
    jobs = [client.enqueue("w5", max_tokens=3) for _ in range(20)] + [client.enqueue("w5", max_tokens=3, delay_s=0.5)]
    make_worker()
    assert run("queue", "drain", "--timeout-s", "20") == 0
    assert {client.state(job_id) for job_id in jobs} == {"succeeded"}
    with pytest.raises(QueueClosed):
        client.enqueue("w5")
    run("queue", "resume")
    assert client.result(client.enqueue("w5", max_tokens=3), 10).state == "succeeded"


def test_what_was_purged_ends_as_cancelled_and_what_came_later_runs(
    run: Run, client: Client, make_worker: WorkerMaker, capsys: Capture
) -> None:
    run("queue", "pause")
    purged = [client.enqueue("w5", max_tokens=3, priority=lane) for lane in ("high", "normal", "low")]
    purged.append(client.enqueue("w5", max_tokens=3, delay_s=3600))
    capsys.readouterr()
    assert run("queue", "purge", "--yes") == 0
    assert "4 jobs to end as cancelled" in capsys.readouterr().out
    later = client.enqueue("w5", max_tokens=3)
    run("queue", "resume")
    make_worker()
    assert {client.result(job_id, 10).state for job_id in purged} == {"cancelled"}
    assert client.result(later, 10).state == "succeeded"


def test_a_purge_ends_what_a_worker_had_given_back(run: Run, client: Client, broker: Broker, make_worker: WorkerMaker) -> None:
    job_id = client.enqueue("w5", max_tokens=3)
    broker.release(broker.fetch(1))
    assert run("queue", "purge", "--yes") == 0
    make_worker()
    assert client.result(job_id, 10).state == "cancelled"


def test_a_limit_of_the_queue_bounds_every_producer(run: Run, client: Client, capsys: Capture) -> None:
    run("queue", "limit", "2")
    for _ in range(2):
        client.enqueue("w5", max_queued=100)
    for bound in (None, 100):
        with pytest.raises(QueueFull, match="the queue's own limit; come again in"):
            client.enqueue("w5", max_queued=bound)
    run("queue", "limit", "none")
    client.enqueue("w5")


def test_a_delayed_job_is_counted_as_such_and_runs_when_it_is_due(
    run: Run, client: Client, make_worker: WorkerMaker, capsys: Capture
) -> None:
    job_id = client.enqueue("w5", max_tokens=3, delay_s=1.5)
    make_worker()
    assert client.state(job_id) == "delayed"
    run("queue", "stats", "--json")
    stats = json.loads(capsys.readouterr().out)
    assert stats["delayed"] == 1
    assert 0 < stats["due_in_s"] <= 1.5
    assert client.result(job_id, 10).state == "succeeded"
