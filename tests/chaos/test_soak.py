"""What is left after much has happened: nothing that grows with the number of jobs, streams or workers."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from tests.support.jobs import Producer
from tests.support.server import embedded_server, leaked_keys
from tests.support.wait import wait_until
from tests.support.worker import ForkedWorker, WorkerMaker, WorkerUnderTest, workers
from worker.client import Client
from worker.connection import connect
from worker.embedded import EmbeddedServer
from worker.keys import GROUP, PSEUDO_CONSUMERS

NUM_JOBS = 1000
NUM_RESTARTS = 50
PSEUDO = {name.encode() for name in PSEUDO_CONSUMERS}
MAX_GROWTH_BYTES = 8e6
"""Of a worker's memory over 800 jobs: an allocator's slack; 10 kB kept of each job would be as much."""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with embedded_server() as running:
        yield running


@pytest.fixture
def client(own_server: EmbeddedServer) -> Iterator[redis.Redis]:
    with connect(own_server.url) as client:
        yield client


@pytest.fixture
def make(own_server: EmbeddedServer, fake_model: Path) -> Iterator[WorkerMaker]:
    with workers(own_server.url, "q", fake_model) as maker:
        yield maker


def run_jobs(url: str, first: int, last: int) -> None:
    """Jobs of all sorts, some of them followed, some refused, some cancelled, with their waits."""
    body = {"max_tokens": 8, "temperature": 0}
    with Client(url, "q") as client, ThreadPoolExecutor(8) as threads:

        def one(i: int) -> None:
            job_id = client.enqueue(f"w{80 + i % 20} w9", n=1 + i % 2, stream=i % 3 > 0, tenant=f"tenant-{i}", **body)
            if i % 5 == 0:
                client.cancel(job_id)
            if i % 2:
                list(client.stream(job_id, 60))
            else:
                client.result(job_id, 60)

        list(threads.map(one, range(first, last)))


def series_of(worker: WorkerUnderTest) -> set[tuple[str, str]]:
    return set(worker.samples())


def test_after_1000_jobs_streams_are_empty_and_keys_connections_series_and_memory_are_what_they_were(
    own_server: EmbeddedServer, make: WorkerMaker, client: redis.Redis
) -> None:
    worker = make("--max-slots", "16", delay_s=0.001, kind=ForkedWorker)
    producer = Producer(client, "q")
    run_jobs(own_server.url, 0, NUM_JOBS // 5)
    connections, series = len(client.client_list()), series_of(worker)
    memory = worker.process.memory_info().rss
    run_jobs(own_server.url, NUM_JOBS // 5, NUM_JOBS)

    assert producer.entries() == 0
    assert [client.xpending(lane, GROUP)["pending"] for lane in producer.keys.lanes] == [0, 0, 0]
    assert leaked_keys(client, "q") == []
    assert client.xlen(producer.keys.done) == NUM_JOBS
    wait_until(lambda: len(client.client_list()) <= connections, message=f"{connections} connections")
    assert series_of(worker) == series
    assert worker.process.memory_info().rss - memory < MAX_GROWTH_BYTES
    assert [worker.metric(name) for name in ("slots_active", "publish_buffer_tokens")] == [0, 0]


def test_100_cut_connections_are_100_new_ones_and_no_more(
    own_server: EmbeddedServer, make: WorkerMaker, client: redis.Redis
) -> None:
    worker = make(delay_s=0.001, kind=ForkedWorker)
    producer = Producer(client, "q")
    producer.result(producer.add(prompt="w85", max_tokens=2))
    before = len(client.client_list())
    for _ in range(20):
        others = [row["id"] for row in client.client_list() if row["id"] != str(client.client_id())]
        for number in others[:5]:
            client.client_kill_filter(_id=number)
        producer.result(producer.add(prompt="w85", max_tokens=2))
    wait_until(lambda: len(client.client_list()) <= before, 20, f"{before} connections")
    assert worker.process.num_fds() < 64


def test_50_restarts_leave_no_more_consumers_than_live_workers_and_one(make: WorkerMaker, client: redis.Redis) -> None:
    make(kind=ForkedWorker)
    producer = Producer(client, "q")
    for _ in range(NUM_RESTARTS // 5):
        leaving = [make(is_awaited=False, kind=ForkedWorker) for _ in range(5)]
        for worker in leaving:
            worker.wait_until_ready()
        producer.result(producer.add(prompt="w85", max_tokens=2))
        for worker in leaving:
            worker.process.send_signal(signal.SIGTERM)
        for worker in leaving:
            worker.wait()

    def names() -> list[set[bytes]]:
        return [{row["name"] for row in client.xinfo_consumers(lane, GROUP)} - PSEUDO for lane in producer.keys.lanes]

    wait_until(lambda: max(map(len, names())) <= 1 + 1, 10, f"consumers of the dead to go: {names()}")
    assert client.zcard(producer.keys.workers) <= 1
