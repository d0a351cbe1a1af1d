"""`worker doctor` on a real server of its own, of which one thing after the other is broken."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.endpoints import ACL_FILE
from tests.support.jobs import Producer
from tests.support.server import BrokerMaker, brokers, embedded_server
from tests.support.wait import wait_until
from tests.support.worker import workers
from worker import cli, command
from worker.client import Client
from worker.connection import connect
from worker.embedded import EmbeddedServer, find_server, free_port
from worker.keys import Keys

QUEUE = "q"
ALLOWED = "~slotmill:* &slotmill:* -@all +@read +@write +@pubsub +@scripting +@connection -@dangerous +time"
OF_THE_DOCS = (Path(__file__).parents[2] / "ops/redis/users.acl").read_text().splitlines()[-1].split()[4:]

Doctor = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture(scope="module")
def own() -> Iterator[EmbeddedServer]:
    with embedded_server() as running:
        yield running


@pytest.fixture
def admin(own: EmbeddedServer) -> Iterator[redis.Redis]:
    """Everything that a test sets, makes and writes is undone."""
    with connect(own.url) as client:
        before = client.config_get("*")
        yield client
        if client.info("replication")["role"] == "slave":
            client.replicaof("NO", "ONE")
        after = client.config_get("*")
        for name in [name for name, value in before.items() if after[name] != value]:
            client.config_set(name, before[name])
        client.flushall()
        client.acl_deluser("w")


@pytest.fixture
def doctor(own: EmbeddedServer, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the command; its exit code, and its rows by the names of the checks."""

    def run(*options: str, only: str = "server", user: str = "") -> tuple[int, dict[str, dict[str, str]]]:
        url = own.url.replace("//", f"//{user}@") if user else own.url
        capsys.readouterr()
        code = command.run(cli.cli, ["doctor", "--redis-url", url, "--queue", QUEUE, "--only", only, "--json", *options])
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return code, {row["check"]: row for row in rows}

    return run


@pytest.fixture
def make_own_broker(own: EmbeddedServer, admin: redis.Redis) -> Iterator[BrokerMaker]:
    with brokers(own.url, QUEUE) as maker:
        yield maker


def _answers(client: redis.Redis) -> bool:
    with suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


def amiss(rows: dict[str, dict[str, str]]) -> dict[str, str]:
    return {name: row["verdict"] for name, row in rows.items() if row["verdict"] != "ok"}


def test_the_embedded_server_is_as_it_should_be_and_nothing_stays_behind(admin: redis.Redis, doctor: Doctor) -> None:
    code, rows = doctor("--strict")
    assert (code, amiss(rows)) == (0, {})
    assert admin.keys("*") == []


@pytest.mark.parametrize(
    ("setting", "value", "check", "verdict"),
    [
        ("maxmemory-policy", "allkeys-lru", "eviction", "fail"),
        ("appendonly", "no", "appendonly", "fail"),
        ("appendfsync", "no", "appendfsync", "warn"),
        ("client-output-buffer-limit", "pubsub 0 0 0", "buffers", "warn"),
        ("client-output-buffer-limit", "pubsub 1kb 0 0", "buffers", "warn"),
        ("timeout", "300", "timeout", "warn"),
        ("tcp-keepalive", "0", "keepalive", "warn"),
        ("maxmemory", "100mb", "memory", "ok"),
    ],
)
def test_a_setting_that_costs_jobs_is_a_failure_and_one_that_may_hurt_a_warning(
    admin: redis.Redis, doctor: Doctor, setting: str, value: str, check: str, verdict: str
) -> None:
    admin.config_set(setting, value)
    code, rows = doctor()
    assert amiss(rows) == ({} if verdict == "ok" else {check: verdict})
    assert code == (1 if verdict == "fail" else 0)
    assert doctor("--strict")[0] == (0 if verdict == "ok" else 1)


def test_few_connections_left_are_a_warning(admin: redis.Redis, own: EmbeddedServer, doctor: Doctor) -> None:
    others = [connect(own.url) for _ in range(9)]
    held = [client.pubsub() for client in others]
    for each in held:
        each.subscribe("x")
    admin.config_set("maxclients", "12")  # one is ours, one the doctor's, one is free
    code, rows = doctor()
    assert (code, amiss(rows)) == (0, {"clients": "warn"})
    for each in (*held, *others):
        each.close()


def test_a_remedy_is_a_command_that_mends(admin: redis.Redis, doctor: Doctor) -> None:
    admin.config_set("maxmemory-policy", "allkeys-lru")
    remedy = doctor()[1]["eviction"]["remedy"]
    admin.execute_command(*remedy.split(", and ")[0].split())
    assert doctor()[0] == 0


def test_a_full_server_is_found_out_by_writing(admin: redis.Redis, doctor: Doctor) -> None:
    admin.config_set("maxmemory", "1")
    code, rows = doctor()
    assert (code, amiss(rows)) == (1, {"writes": "fail", "memory": "warn"})
    assert "maxmemory" in rows["writes"]["found"]
    admin.execute_command(*rows["memory"]["remedy"].split(", and ")[0].split())
    assert doctor()[0] == 0


def test_a_server_whose_snapshots_fail_refuses_writes(
    doctor: Doctor, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with embedded_server(data_dir=tmp_path / "data") as server, connect(server.url) as client:
        client.config_set("save", "3600 1")
        client.config_set("appendonly", "no")
        shutil.rmtree(tmp_path / "data")
        client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", message="a failed snapshot")
        code = command.run(cli.cli, ["doctor", "--redis-url", server.url, "--only", "server"])
        server.kill()  # asked to leave, it would try to save first
    shown = capsys.readouterr().out
    assert code == 1
    assert "MISCONF" in shown
    assert "stop-writes-on-bgsave-error yes" in shown


def test_a_replica_is_refused(admin: redis.Redis, redis_client: redis.Redis, doctor: Doctor) -> None:
    pool = redis_client.connection_pool.connection_kwargs
    admin.replicaof(pool["host"], pool["port"])
    code, rows = doctor()
    assert code == 1
    assert (rows["role"]["verdict"], rows["writes"]["verdict"]) == ("fail", "fail")
    assert f"127.0.0.1:{pool['port']}" in rows["role"]["found"]


def test_a_cluster_must_serve_the_slot_of_the_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def examine() -> str:
        command.run(cli.cli, ["doctor", "--redis-url", f"unix://{tmp_path}/s", "--only", "server"])
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("server   cluster "))

    words = ["--port", free_port(), "--cluster-port", free_port(), "--cluster-enabled", "yes", "--unixsocket", tmp_path / "s"]
    binary = os.environ.get("SLOTMILL_TEST_SERVER") or find_server()
    with subprocess.Popen([binary, *map(str, words), "--dir", tmp_path, "--logfile", tmp_path / "log"]) as server:
        try:
            with connect(f"unix://{tmp_path}/s") as client:
                wait_until(lambda: _answers(client), message="the server answers")
                assert "nobody serves slot" in examine()
                client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
                wait_until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", message="a cluster")
            assert "which is served" in examine()
        finally:
            server.terminate()


def test_a_user_without_a_command_a_key_or_a_channel_is_told_what_to_grant(admin: redis.Redis, doctor: Doctor) -> None:
    admin.acl_setuser("w", enabled=True, nopass=True, categories=["+@all"], commands=["-xclaim"], keys=["x*"])
    code, rows = doctor(user="w:s3cret")
    assert code == 1
    granted = rows["permissions"]["remedy"]
    assert granted == "ACL SETUSER w +xclaim ~slotmill:* &slotmill:*"
    admin.execute_command(*granted.split())
    code, rows = doctor(user="w:s3cret")
    assert (code, amiss(rows)) == (0, {})


def test_a_user_who_may_not_ask_makes_checks_unknown_and_no_failure(admin: redis.Redis, doctor: Doctor) -> None:
    admin.execute_command("ACL SETUSER", "w", "on", ">s3cret", *ALLOWED.split())
    code, rows = doctor(only="server,queue", user="w:s3cret")
    assert code == 0
    unknown = {"role", "eviction", "memory", "appendonly", "appendfsync", "aof", "snapshots", "buffers", "timeout"}
    assert {name for name, verdict in amiss(rows).items() if verdict == "unknown"} == unknown | {
        "keepalive",
        "clients",
        "cluster",
    }
    assert "s3cret" not in json.dumps(rows)


def test_the_limited_user_can_run_a_worker_and_lacks_nothing_but_what_it_may_not_ask(
    admin: redis.Redis, own: EmbeddedServer, doctor: Doctor, fake_model: Path
) -> None:
    line = next(line for line in ACL_FILE.read_text().splitlines() if line.startswith("user slotmill "))
    admin.execute_command(
        "ACL", "SETUSER", *line.removeprefix("user ").replace("slotmill on >CHANGE-ME", "w on >s3cret").split()
    )
    code, rows = doctor(user="w:s3cret")
    assert (code, set(amiss(rows).values())) == (0, {"unknown"})
    assert rows["permissions"]["verdict"] == "ok"
    url = own.url.replace("//", "//w:s3cret@")
    with workers(url, QUEUE, fake_model) as make, Client(url, QUEUE) as client:
        make()
        assert client.result(client.enqueue("hello", temperature=0, max_tokens=3), 20.0).state == "succeeded"


def test_a_queue_without_workers_is_told_what_waits(admin: redis.Redis, doctor: Doctor, make_own_broker: BrokerMaker) -> None:
    code, rows = doctor(only="queue")
    assert (code, amiss(rows)) == (0, {"group": "warn", "workers": "warn"})

    broker, keys = make_own_broker("gone"), Keys(QUEUE)
    Producer(admin, QUEUE).add("a", prompt="a")
    assert broker.fetch(1)
    admin.xadd(keys.lane("low"), {"j": "{}"}, id="1000-0")
    admin.xadd(keys.dead, {"id": "b"})
    admin.zadd(keys.delayed("high"), {"c": 1000, "d": (time.time() + 3600) * 1000})
    admin.hset(keys.config, "paused", "1")
    _, rows = doctor(only="queue")
    assert set(rows) - set(amiss(rows)) == {"group"}
    assert "1 jobs held by gone" in rows["abandoned"]["found"]
    assert "in lane low" in rows["oldest"]["found"]
    assert "1 delayed jobs" in rows["overdue"]["found"]

    broker.heartbeat({"state": "serving"})
    _, rows = doctor(only="queue")
    assert (rows["workers"]["verdict"], rows["abandoned"]["verdict"]) == ("ok", "ok")


@pytest.mark.parametrize(
    ("user", "named"),
    [
        ("", "worker start --queue q --redis-url {url}"),
        ("w:s3cret", "worker start --queue q and the server's URL in SLOTMILL_REDIS_URL"),
    ],
)
def test_a_remedy_names_the_server_that_was_asked_and_no_password(
    own: EmbeddedServer, admin: redis.Redis, doctor: Doctor, user: str, named: str
) -> None:
    admin.acl_setuser("w", enabled=True, passwords=["+s3cret"], categories=["+@all"], keys=["*"], channels=["*"])
    _, rows = doctor(only="queue", user=user)
    assert rows["workers"]["remedy"] == named.format(url=own.url)


def test_what_a_remedy_does_stands_behind_the_command(
    own: EmbeddedServer, admin: redis.Redis, doctor: Doctor, make_own_broker: BrokerMaker
) -> None:
    gone = make_own_broker("gone")
    gone.ensure_group()
    Producer(admin, QUEUE).add("a", prompt="a")
    gone.fetch(1)
    _, rows = doctor(only="queue")
    command, _, effect = rows["abandoned"]["remedy"].partition("; ")
    assert command == f"worker start --queue {QUEUE} --redis-url {own.url}"
    assert effect.startswith("it takes them over")


def test_what_an_unknown_asks_for_lets_a_limited_user_know(admin: redis.Redis, doctor: Doctor) -> None:
    admin.execute_command("ACL SETUSER", "w", "on", ">s3cret", *OF_THE_DOCS)
    _, rows = doctor(only="server,queue", user="w:s3cret")
    granted = rows["overdue"]["remedy"].removeprefix("give the user ").partition(",")[0]
    admin.execute_command("ACL SETUSER", "w", *granted.split())
    _, rows = doctor(only="server,queue", user="w:s3cret")
    assert [check for check, row in rows.items() if row["verdict"] == "unknown"] == []


def test_what_mends_several_checks_is_printed_once(
    own: EmbeddedServer, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.execute_command("ACL SETUSER", "w", "on", ">s3cret", *OF_THE_DOCS)
    command.run(cli.cli, ["doctor", "--only", "server", "--redis-url", own.url.replace("redis://", "redis://w:s3cret@")])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split()[2] == "unknown" for line in lines) > 1
    assert sum("give the user" in line for line in lines) == 1


def test_examining_a_queue_changes_nothing(admin: redis.Redis, doctor: Doctor) -> None:
    Producer(admin, QUEUE).add("a", prompt="a")
    before = {key: admin.dump(key) for key in admin.keys("*")}
    doctor(only="server,queue")
    assert {key: admin.dump(key) for key in admin.keys("*")} == before


def test_the_table_has_a_line_for_each_check_and_the_remedy_below(
    own: EmbeddedServer, admin: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.config_set("timeout", "300")
    command.run(cli.cli, ["doctor", "--redis-url", own.url, "--only", "server"])
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("server   timeout "))
    assert lines[at].split(maxsplit=3)[2] == "warn"
    assert lines[at + 1].strip() == "mend: CONFIG SET timeout 0, and `timeout 0` in its configuration"
    assert lines[at + 1].index("mend") == lines[at].index("warn")


def test_a_server_that_wants_a_password_is_code_5_in_one_line(
    admin: redis.Redis, own: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.execute_command("ACL SETUSER", "w", "on", ">s3cret", *ALLOWED.split())
    url = own.url.replace("//", "//w:wr0ng@")
    assert command.run(cli.cli, ["doctor", "--redis-url", url]) == 5
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)
    assert "mend user name and password" in shown.err
    assert "wr0ng" not in shown.err


def test_a_machine_is_examined_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        options = ["--only", "machine", "--no-engine", "--metrics-port", str(taken.getsockname()[1])]
        code = command.run(cli.cli, ["doctor", "--redis-url", "redis://127.0.0.1:1", *options, "--json", "--model", "/nowhere"])
    rows: dict[str, Any] = {row["check"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert code == 1
    assert (rows["model"]["verdict"], rows["port"]["verdict"], rows["python"]["verdict"]) == ("fail", "warn", "ok")
    assert not {"torch", "gpu", "kernels"} & set(rows)


def test_the_whole_is_examined_by_one_command(own: EmbeddedServer, admin: redis.Redis) -> None:
    words = [sys.executable, "-m", "worker.cli", "doctor", "--redis-url", own.url, "--metrics-port", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if " kernels " in line] == ["machine"]
    assert done.stderr == ""
