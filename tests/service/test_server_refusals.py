"""A server that answers and refuses, since it is read-only, full, cannot save or loads its data: nothing is lost by it."""

import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis

from tests.support.jobs import Producer
from tests.support.server import embedded_server
from tests.support.streams import Streams
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker, workers
from worker.client import Client
from worker.connection import connect
from worker.embedded import EmbeddedServer

SLOW_S = 0.02

Refusal = Callable[[redis.Redis], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """A server that tests may mistreat."""
    with embedded_server() as running:
        yield running


@pytest.fixture(scope="module")
def redis_url(server: EmbeddedServer) -> str:
    return server.url


@pytest.fixture
def client(redis_url: str, queue: str) -> Iterator[Client]:
    with Client(redis_url, queue) as made:
        yield made


@contextmanager
def readonly(client: redis.Redis) -> Iterator[None]:
    client.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        client.replicaof("no", "one")


@contextmanager
def full(client: redis.Redis) -> Iterator[None]:
    client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


@contextmanager
def without_snapshots(client: redis.Redis) -> Iterator[None]:
    """Saving fails since a directory stands where the file should, and then writes are refused (MISCONF)."""
    blocker = Path(client.config_get("dir")["dir"]) / client.config_get("dbfilename")["dbfilename"]
    blocker.mkdir()
    client.config_set("save", "3600 1000000")
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", message="a failed snapshot")
    try:
        yield
    finally:
        shutil.rmtree(blocker)
        client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "ok", message="a snapshot")
        client.config_set("save", "")
        blocker.unlink()


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [(readonly, "readonly"), (full, "out_of_memory"), (without_snapshots, "response")],
)
def test_a_worker_waits_out_a_server_that_refuses_writes(
    make_worker: WorkerMaker, client: Client, producer: Producer, redis_client: redis.Redis, refusal: Refusal, kind: str
) -> None:
    worker = make_worker(delay_s=SLOW_S)
    streams = Streams(client, 4, max_tokens=60)
    streams.wait_for(5)
    with refusal(redis_client):
        wait_until(lambda: worker.metric("redis_errors_total", kind) > 2, message="refusals")
        assert worker.get("/readyz")[0] == 503
    streams.check(producer)
    wait_until(lambda: worker.get("/readyz")[0] == 200, message="a ready worker")
    assert len(worker.lines) < 40


@pytest.mark.parametrize("refusal", [readonly, full, without_snapshots])
def test_a_client_waits_out_a_server_that_refuses_writes(client: Client, redis_client: redis.Redis, refusal: Refusal) -> None:
    client.enqueue("Hi")
    put: list[str] = []
    putting = threading.Thread(target=lambda: put.append(client.enqueue("Hi", id="a")))
    with refusal(redis_client):
        refused = refusals(redis_client)
        putting.start()
        wait_until(lambda: refusals(redis_client) > refused + 1, message="refusals")
    putting.join(10)
    assert (put, client.state("a")) == (["a"], "queued")


def refusals(client: redis.Redis) -> int:
    return sum(row["count"] for row in client.info("errorstats").values())


def test_a_worker_waits_for_a_server_that_loads_its_data(tmp_path: Path, fake_model: Path) -> None:
    slow = {"key-load-delay": "10000", "loading-process-events-interval-bytes": "1024", "appendfsync": "always"}
    with (
        embedded_server(data_dir=tmp_path / "data", options=slow) as server,
        workers(server.url, "q", fake_model) as make,
        connect(server.url) as own,
        Client(server.url, "q") as client,
    ):
        worker = make(delay_s=SLOW_S)
        streams = Streams(client, 2, max_tokens=60)
        streams.wait_for(5)
        with own.pipeline(transaction=False) as pipe:
            for i in range(200):
                pipe.set(f"slotmill:padding:{i}", secrets.token_bytes(4096), ex=600)
            pipe.execute()
        own.bgrewriteaof()  # a snapshot is loaded slowly, and answers meanwhile
        wait_until(lambda: own.info("persistence")["aof_base_size"] > 200 * 4096, message="a snapshot")
        server.kill()
        server.start()
        wait_until(lambda: worker.metric("redis_errors_total", "loading") > 0, message="a server that loads")
        streams.check(Producer(own, "q"))
