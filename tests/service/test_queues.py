"""Which queues a server holds, and what people are told of them; each test has a server of its own."""

import json
from collections.abc import Callable, Iterator

import pytest
import redis

from tests.support.server import embedded_server
from worker import cli, command, queue_commands, queues
from worker.broker import Broker
from worker.client import Client
from worker.connection import connect
from worker.queues import find_queues, served_elsewhere

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with embedded_server() as server:
        yield server.url


@pytest.fixture
def server(url: str) -> Iterator[redis.Redis]:
    with connect(url) as client:
        client.flushall()
        yield client


@pytest.fixture
def run(url: str) -> Callable[..., int]:
    return lambda *words: command.run(cli.cli, [*words, "--redis-url", url])


Run = Callable[..., int]


def serve(server: redis.Redis, *names: str) -> None:
    for name in names:
        Broker(server, name, "w").heartbeat({})


def test_queues_are_found_by_whatever_they_hold_and_nothing_else_is(server: redis.Redis) -> None:
    serve(server, "served")
    Client(server, "waiting").enqueue("a")
    Client(server, "later").enqueue("a", delay_s=60)
    server.mset({"slotmill:{a b}:done": 1, "slotmill:x:done": 1, "slotmill:{c}:dead:x": 1, b"slotmill:{\xff}:dead": 1})
    found = find_queues(server)
    assert (found.queues, found.served, found.is_whole) == (("later", "served", "waiting"), ("served",), True)


def test_no_key_of_a_job_is_sent(server: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(server, "q") as client:
        jobs = [client.enqueue("a") for _ in range(5)]
    broker = Broker(server, "q", "w")
    broker.ensure_group()
    broker.fetch(5)
    sent = list(server.scan_iter(queues._PATTERN))
    assert sent
    assert not [key for key in sent if any(job.encode() in key for job in jobs)]


def test_a_look_ends_when_its_time_is_over(server: redis.Redis) -> None:
    server.mset({f"other:{number}": 1 for number in range(5 * queues.PAGE)})
    assert not find_queues(server, look_s=0).is_whole
    assert find_queues(server).is_whole


def test_queues_are_listed_with_what_is_in_them(run: Run, server: redis.Redis, capsys: Capture) -> None:
    serve(server, "b")
    for name in ("b", "b", "a"):
        Client(server, name).enqueue("p")
    broker = Broker(server, "b", "w")
    broker.ensure_group()
    broker.fetch(1)
    run("queue", "pause", "--queue", "a")
    capsys.readouterr()
    assert run("queue", "list") == 0
    shown = capsys.readouterr()
    assert [line.split() for line in shown.out.splitlines()] == [
        ["queue", "waiting", "running", "dead", "workers", "state"],
        ["a", "1", "0", "0", "0", "paused,", "no", "limit"],
        ["b", "1", "1", "0", "1", "open,", "no", "limit"],
    ]
    assert shown.err == ""
    assert run("queue", "list", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["queue"], row["waiting"], row["running"], row["workers"]) for row in rows] == [("a", 1, 0, 0), ("b", 1, 1, 1)]


def test_a_list_that_is_cut_says_so(run: Run, server: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(queue_commands, "MAX_LISTED", 1)
    serve(server, "a", "b")
    assert run("queue", "list") == 0
    assert capsys.readouterr().err == "worker: the first 1 of 2\n"


@pytest.mark.usefixtures("server")
def test_a_server_without_queues_prints_none(run: Run, capsys: Capture) -> None:
    assert run("queue", "list") == 0
    assert capsys.readouterr() == ("", "worker: no queue on this server yet\n")


@pytest.mark.parametrize("how", [["queue", "stats"], ["top", "--once"]], ids=lambda how: how[0])
def test_a_queue_that_nobody_serves_names_those_that_are_served(
    run: Run, server: redis.Redis, how: list[str], capsys: Capture
) -> None:
    serve(server, "zoo", "chats", "a", "b", "cats")
    assert run(*how, "--queue", "chat") == 0
    assert capsys.readouterr().err == "worker: here workers serve chats, cats, a and 2 more\n"
    assert run(*how, "--queue", "chats") == 0
    assert capsys.readouterr().err == ""


def test_who_waits_on_a_queue_that_nobody_serves_learns_which_are_served(
    run: Run, server: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("worker.client.CHECK_S", 0.02)
    monkeypatch.setattr("worker.job_commands.UNSERVED_S", 0.05)
    serve(server, "chat")
    assert run("enqueue", "--wait", "a", "--timeout-s", "0.5", "--queue", "chta") == 4
    assert capsys.readouterr().err.splitlines()[0].endswith("`; here workers serve chat")


def test_a_user_who_may_not_look_is_told_nothing(url: str, server: redis.Redis) -> None:
    serve(server, "chat")
    server.acl_setuser("blind", enabled=True, passwords=["+x"], keys=["*"], commands=["+@all", "-scan"], channels=["*"])
    with connect(url.replace("redis://", "redis://blind:x@")) as client:
        assert served_elsewhere(client, "q") == ""
        with pytest.raises(redis.ResponseError):
            find_queues(client)
