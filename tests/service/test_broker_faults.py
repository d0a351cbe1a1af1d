"""Servers that forget, refuse or are raced for: nothing lost, nothing doubled, nothing left behind."""

import threading
from collections.abc import Iterator

import pytest
import redis

from tests.support.server import (
    BrokerMaker,
    brokers,
    embedded_server,
    end_of,
    frame_to_emit,
    leaked_keys,
    make_old,
    take_over,
    wait_written,
)
from tests.support.wait import wait_until
from worker.broker import Broker
from worker.claims import EmitReply
from worker.connection import connect
from worker.embedded import EmbeddedServer
from worker.errors import ServerUnavailable
from worker.keys import Keys


@pytest.fixture(scope="module")
def fragile() -> Iterator[EmbeddedServer]:
    """A server that tests may flush and limit."""
    with embedded_server() as running:
        yield running


@pytest.fixture
def fragile_client(fragile: EmbeddedServer) -> Iterator[redis.Redis]:
    with connect(fragile.url) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.flushall()


@pytest.fixture
def fragile_brokers(fragile: EmbeddedServer, fragile_client: redis.Redis) -> Iterator[BrokerMaker]:
    with brokers(fragile.url, "q") as maker:
        yield maker


def test_scripts_that_the_server_forgot_are_sent_again_within_a_pipeline(broker: Broker, redis_client: redis.Redis) -> None:
    for job_id in "abc":
        broker.enqueue(job_id, "normal", b"")
    jobs = broker.fetch(3)
    redis_client.script_flush()
    frames = [frame_to_emit(job, n, n + 1, b"%d" % n) for n in range(3) for job in jobs]
    assert broker.emit(frames) == [EmitReply("ok", n + 1) for n in range(3) for _ in jobs]
    redis_client.script_flush()
    assert broker.finish([end_of(job) for job in jobs]) == ["ok"] * 3
    assert [broker.read_log(job.job_id) for job in jobs] == [[b"0", b"1", b"2", b"end"]] * 3


def test_frames_behind_a_forgotten_script_are_sent_again_in_order(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    broker.emit([frame_to_emit(job, 0, 1, b"one")])
    pipeline, first = broker._scripts._pipeline, [True]

    def forgets_the_first_call(name: str, calls: list) -> list:  # as when another client loads the script in between
        if first.pop() if first else False:
            return [redis.exceptions.NoScriptError(), *pipeline(name, calls[1:])]
        return pipeline(name, calls)

    monkeypatch.setattr(broker._scripts, "_pipeline", forgets_the_first_call)
    frames = [frame_to_emit(job, 1, 2, b"two"), frame_to_emit(job, 2, 3, b"three")]
    assert broker.emit(frames) == [EmitReply("ok", 2), EmitReply("ok", 3)]
    assert broker.read_log("a") == [b"one", b"two", b"three"]


def test_after_a_flush_of_everything_the_group_is_made_anew_and_work_goes_on(
    fragile_brokers: BrokerMaker, fragile_client: redis.Redis
) -> None:
    broker = fragile_brokers("me")
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    fragile_client.flushall()
    fragile_client.script_flush()
    assert broker.fetch(1) == []
    assert (broker.renew([job]).lost, broker.finish([end_of(job)])) == ({"a"}, ["fenced"])
    assert broker.emit([frame_to_emit(job, 0, 1)])[0].status == "fenced"
    assert take_over(broker, 1) == []
    broker.enqueue("b", "normal", b"")
    assert [delivery.job_id for delivery in broker.fetch(1)] == ["b"]


def test_a_lane_that_loses_its_group_does_not_lose_the_claims_of_another(
    fragile_brokers: BrokerMaker, fragile_client: redis.Redis
) -> None:
    broker = fragile_brokers("me")
    broker.enqueue("a", "high", b"")
    fragile_client.unlink(Keys("q").lane("low"))
    [job] = broker.fetch(1)
    make_old(fragile_client, "q", job)
    fragile_client.unlink(Keys("q").lane("low"))
    [again] = take_over(broker, 2)
    assert (job.attempt, again.attempt) == (1, 2)


def test_a_server_that_is_full_refuses_an_end_whole_and_takes_it_later(
    fragile_brokers: BrokerMaker, fragile_client: redis.Redis
) -> None:
    broker = fragile_brokers("me")
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    fragile_client.config_set("maxmemory", 1)
    for write in (lambda: broker.emit([frame_to_emit(job, 0, 1)]), lambda: broker.finish([end_of(job)])):
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            write()
    assert (broker.result("a"), broker.read_log("a"), broker.job("a")["state"]) == (None, [], "running")
    fragile_client.config_set("maxmemory", 0)
    assert broker.finish([end_of(job)]) == ["ok"]


def test_a_killed_server_comes_back_with_the_queue_and_the_scripts_are_sent_again() -> None:
    with embedded_server() as server, brokers(server.url, "q") as make_broker:
        broker = make_broker("me")
        broker.enqueue("a", "normal", b"")
        [job] = broker.fetch(1)
        with connect(server.url) as client:
            wait_written(client)
        server.kill()
        with pytest.raises(redis.exceptions.ConnectionError):
            broker.fetch(1)
        server.start()
        assert broker.finish([end_of(job)]) == ["ok"]
        assert broker.result("a") == b"result"


def test_jobs_of_a_fetch_whose_reply_was_lost_come_with_the_next_one_and_are_not_charged(
    broker: Broker, other: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, run = broker.fetch(9), broker._scripts.run
    for lane in ("high", "normal", "low"):
        broker.enqueue(lane, lane, b"")
    other.fetch(1)

    def loses_the_reply(*args: object) -> None:
        run(*args)  # type: ignore[arg-type]
        raise redis.exceptions.TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(broker._scripts, "run", loses_the_reply)
        with pytest.raises(redis.exceptions.TimeoutError):
            broker.fetch(9)
    jobs = broker.fetch(9)
    assert [(job.job_id, job.attempt, job.counted_attempts, job.is_suspect) for job in jobs] == [
        ("normal", 2, 1, False),
        ("low", 2, 1, False),
    ]
    assert (kept, broker.fetch(9), broker.renew(jobs).lost) == ([], [], set())


def test_a_server_that_is_too_old_is_refused_by_name(make_broker: BrokerMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = make_broker()
    monkeypatch.setattr(broker._client, "execute_command", lambda *args: [None])
    with pytest.raises(ServerUnavailable, match=r"Redis >= 7\.0 or Valkey >= 7\.2"):
        broker.ensure_group()


def test_two_workers_that_race_for_two_hundred_jobs_claim_each_once(make_broker: BrokerMaker) -> None:
    producer = make_broker("producer")
    for i in range(200):
        producer.enqueue(f"job-{i}", ("high", "normal", "low")[i % 3], b"")
    claimed: list[str] = []

    def drain(broker: Broker) -> None:
        while jobs := broker.fetch(7):
            claimed.extend(job.job_id for job in jobs)
            assert all(job.attempt == 1 for job in jobs)

    threads = [threading.Thread(target=drain, args=(make_broker(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(claimed) == sorted(f"job-{i}" for i in range(200))


def test_one_broker_serves_many_threads(make_broker: BrokerMaker) -> None:
    broker = make_broker()
    results: list[bytes | None] = []

    def one_life(name: str) -> None:
        for i in range(20):
            broker.enqueue(f"{name}-{i}", "normal", b"")
            for job in broker.fetch(1):
                broker.emit([frame_to_emit(job, 0, 1)])
                broker.finish([end_of(job, result=job.job_id.encode())])
                results.append(broker.result(job.job_id))

    threads = [threading.Thread(target=one_life, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(map(bytes, filter(None, results))) == sorted(f"{name}-{i}".encode() for name in "abcd" for i in range(20))


def test_a_thousand_jobs_leave_empty_lanes_and_nothing_that_lives_for_ever(
    make_broker: BrokerMaker, redis_client: redis.Redis, queue: str
) -> None:
    broker = make_broker()
    for i in range(1000):
        broker.enqueue(f"job-{i}", "normal", b"body", idempotency_key=f"key-{i}")
    finished = 0
    while jobs := broker.fetch(100):
        broker.emit([frame_to_emit(job, 0, 3) for job in jobs])
        finished += broker.finish([end_of(job) for job in jobs]).count("ok")
    keys = Keys(queue)
    found = [key for key in redis_client.scan_iter(f"{keys.prefix}*", count=1000) if redis_client.ttl(key) == -1]
    assert finished == 1000
    assert {key.decode() for key in found} == {*keys.lanes, keys.done}
    assert redis_client.xlen(keys.lane("normal")) == 0
    assert redis_client.xpending(keys.lane("normal"), "workers")["pending"] == 0


def test_the_leak_check_finds_an_ended_job_without_lifetime(
    make_broker: BrokerMaker, redis_client: redis.Redis, queue: str
) -> None:
    broker = make_broker()
    broker.enqueue("a", "normal", b"")
    broker.finish([end_of(broker.fetch(1)[0])])
    redis_client.persist(Keys(queue).job("a"))
    assert leaked_keys(redis_client, queue) == [Keys(queue).job("a")]
    redis_client.expire(Keys(queue).job("a"), 60)


def test_a_broker_that_waited_leaves_no_connection_open(redis_url: str, redis_client: redis.Redis, queue: str) -> None:
    def num_connections() -> int:
        return sum(1 for row in redis_client.client_list() if row["name"] == queue)

    with connect(f"{redis_url}?client_name={queue}") as client:
        broker = Broker(client, queue, "me")
        for block_s in (0.01, 0.02, 0.03):
            broker.wait_for_entry(block_s)
        assert num_connections() == 1
        broker.close()
    wait_until(lambda: num_connections() == 0, message="connections closed")
