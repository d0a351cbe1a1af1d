"""Workers on the fake engine, producers for them, and what the tests of both clients share."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support import fake_engine
from tests.support.jobs import Producer
from tests.support.server import drop_queue, leaked_keys
from tests.support.streams import Listens
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker, WorkerUnderTest, workers
from worker.connection import connect
from worker.keys import Keys


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_engine.save_model(tmp_path_factory.mktemp("fake") / "model")


@pytest.fixture(scope="module")
def shared_queue(redis_url: str) -> Iterator[str]:
    """A queue for the tests that share one worker; checked for leaks at the end, when all its jobs have ended."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    with connect(redis_url) as client:
        leaked = leaked_keys(client, name)
        drop_queue(client, name)
    assert not leaked


@pytest.fixture(scope="module")
def shared_worker(redis_url: str, shared_queue: str, fake_model: Path) -> Iterator[WorkerUnderTest]:
    with workers(redis_url, shared_queue, fake_model) as make:
        worker = make()
        yield worker
        assert worker.process.poll() is None, "one of the jobs has ended the worker"


@pytest.fixture
def shared(shared_worker: WorkerUnderTest, redis_client: redis.Redis, shared_queue: str) -> Producer:
    """A producer on the queue of the shared worker."""
    return Producer(redis_client, shared_queue)


@pytest.fixture
def producer(redis_client: redis.Redis, queue: str) -> Producer:
    return Producer(redis_client, queue)


@pytest.fixture
def make_worker(redis_url: str, queue: str, fake_model: Path) -> Iterator[WorkerMaker]:
    with workers(redis_url, queue, fake_model) as make:
        yield make


@pytest.fixture
def listens(redis_client: redis.Redis, queue: str) -> Listens:
    """listens(job_id, count): returns once that many connections have subscribed to a job's channel."""
    channel = Keys(queue).channel

    def wait(job_id: str, count: int = 1) -> None:
        wait_until(lambda: redis_client.pubsub_numsub(channel(job_id))[0][1] == count, message=f"{count} subscribed")

    return wait


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is not looked into, so that nothing is mended by it."""
    monkeypatch.setattr("worker.client.CHECK_S", 60.0)
