"""A real server for tests, a broker to talk through, and the check that a queue leaves nothing behind for ever.

SLOTMILL_TEST_SERVER names another server binary to run the same tests on.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from tests.support.wait import wait_until
from worker.broker import Broker
from worker.claims import Delivery, Emission, Finish
from worker.connection import connect
from worker.embedded import EmbeddedServer, find_server
from worker.keys import LANES, Keys

WITHOUT_LIFETIME = ("done", "dead", "cursor", "cfg", *(f"{kind}:{lane}" for kind in ("jobs", "delayed") for lane in LANES))


def server_binary() -> Path:
    """What tests run as a server: SLOTMILL_TEST_SERVER where set."""
    binary = os.environ.get("SLOTMILL_TEST_SERVER")
    return Path(binary) if binary else find_server()


def embedded_server(**options: object) -> EmbeddedServer:
    """A server that is not started yet."""
    return EmbeddedServer(binary=server_binary(), **options)  # type: ignore[arg-type]


def leaked_keys(client: redis.Redis, queue: str) -> list[str]:
    """Keys of a queue that would live for ever and may not, by docs/protocol.md."""
    prefix = Keys(queue).prefix
    found = [key.decode() for key in client.scan_iter(f"{prefix}*", count=1000)]
    return sorted(key for key in found if client.ttl(key) == -1 and key.removeprefix(prefix) not in WITHOUT_LIFETIME)


def drop_queue(client: redis.Redis, queue: str) -> None:
    """Deletes every key of a queue."""
    keys = list(client.scan_iter(f"{Keys(queue).prefix}*", count=1000))
    for start in range(0, len(keys), 1000):
        client.unlink(*keys[start : start + 1000])


@contextmanager
def brokers(url: str, queue: str) -> Iterator["BrokerMaker"]:
    """A factory of brokers, each with a client of its own; all are closed at the end."""
    maker = BrokerMaker(url, queue)
    try:
        yield maker
    finally:
        maker.close()


class BrokerMaker:
    """Calling it makes a broker of a new worker on the test's queue, with the group in place."""

    def __init__(self, url: str, queue: str) -> None:
        self._url, self._queue = url, queue
        self._made: list[tuple[Broker, redis.Redis]] = []

    def __call__(self, worker_id: str | None = None, lease_s: float = 30.0) -> Broker:
        client = connect(self._url, self._queue)
        broker = Broker(client, self._queue, worker_id or f"worker-{len(self._made)}", lease_s)
        self._made.append((broker, client))
        broker.ensure_group()
        return broker

    def close(self) -> None:
        for broker, client in self._made:
            broker.close()
            client.close()


def wait_written(client: redis.Redis) -> None:
    """Returns once a kill of the server can lose nothing of what it has answered so far."""
    wait_until(lambda: client.info("persistence")["aof_buffer_length"] == 0, message="append-only file written")


def make_old(client: redis.Redis, queue: str, job: Delivery) -> None:
    """As if the holder had not renewed for an hour: the next reclaim may take the job."""
    holder, *_ = pending(client, queue, job.lane)[job.entry_id]
    client.xclaim(Keys(queue).lane(job.lane), "workers", holder, 0, [job.entry_id], idle=3_600_000, justid=True)


def take_over(broker: Broker, count: int = 1, in_hand: Sequence[Delivery] = ()) -> list[Delivery]:
    """What `broker` gets of the jobs whose lease ran out, up to `count`: suspects come one by one."""
    broker.reclaim(in_hand)
    return [job for _ in range(count) for job in broker.fetch(1)]


def pending(client: redis.Redis, queue: str, lane: str = "normal") -> dict[str, tuple[str, int, int]]:
    """Claimed entries of a lane: entry id -> (holder, idle in ms, delivery count)."""
    rows = client.xpending_range(Keys(queue).lane(lane), "workers", "-", "+", 10_000)
    fields = ("time_since_delivered", "times_delivered")
    return {row["message_id"].decode(): (row["consumer"].decode(), *(row[field] for field in fields)) for row in rows}


def frame_to_emit(job: Delivery, previous_n: int, n: int, frame: bytes = b"frame", publish: bool = True) -> Emission:
    return Emission(job.job_id, job.lease, job.attempt, previous_n, n, frame, publish, job.queue)


def end_of(job: Delivery, state: str = "succeeded", **changes: object) -> Finish:
    """How a test ends a job when the payloads do not matter."""
    fields: Mapping[str, object] = {"code": "", "result": b"result", "end_frame": b"end"} | changes
    return Finish(job, state, **fields)  # type: ignore[arg-type]
