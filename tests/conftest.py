"""Fixtures for tests that need a server: one real server a session, a queue of its own for each test, and a leak check."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

import uuid
from collections.abc import Iterator

import pytest
import redis

from tests.support.server import BrokerMaker, brokers, drop_queue, embedded_server, leaked_keys
from worker.broker import Broker
from worker.connection import connect
from worker.embedded import EmbeddedServer

# A waiting thread that spins takes the core from the worker or server under test. Read when torch loads, here and in workers.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """A server shared by the session; use a queue of your own and no FLUSHALL, or start your own with embedded_server()."""
    with embedded_server() as running:
        yield running


@pytest.fixture(scope="session")
def redis_url(server: EmbeddedServer) -> str:
    return server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """Bytes replies, no retries."""
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def queue(redis_client: redis.Redis) -> Iterator[str]:
    """A fresh queue name; afterwards a key without lifetime that docs/protocol.md does not allow is a failure."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    leaked = leaked_keys(redis_client, name)
    drop_queue(redis_client, name)
    assert not leaked, f"keys that would live for ever: {leaked[:10]}"


@pytest.fixture
def make_broker(redis_url: str, queue: str) -> Iterator[BrokerMaker]:
    """make_broker(worker_id=None, lease_s=30.0) -> Broker on the test's queue; closed afterwards."""
    with brokers(redis_url, queue) as maker:
        yield maker


@pytest.fixture
def broker(make_broker: BrokerMaker) -> Broker:
    """A worker called `me`."""
    return make_broker("me")


@pytest.fixture
def other(make_broker: BrokerMaker) -> Broker:
    """Another worker on the same queue."""
    return make_broker("other")
