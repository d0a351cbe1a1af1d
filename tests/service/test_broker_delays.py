"""Jobs that are not due yet: asked for later, or tried again after a pause."""

import msgpack
import pytest
import redis

from tests.support.server import BrokerMaker, end_of, frame_to_emit, make_old, take_over
from worker.broker import Broker
from worker.claims import Delivery
from worker.keys import JOB_TTL_S, Keys
from worker.queue_admin import QueueAdmin


@pytest.fixture
def other(make_broker: BrokerMaker) -> Broker:
    return make_broker("other")


@pytest.fixture
def job(broker: Broker) -> Delivery:
    broker.enqueue("a", "low", b"body")
    return broker.fetch(1)[0]


def make_due(client: redis.Redis, queue: str, job_id: str) -> None:
    assert sum(client.zadd(delayed, {job_id: 1}, xx=True, ch=True) for delayed in Keys(queue).delayed_lanes) == 1


def test_a_delayed_job_is_not_handed_out_before_it_is_due(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    assert broker.enqueue("a", "low", b"body", delay_s=60).status == "delayed"
    assert (broker.fetch(1), broker.job("a")["state"]) == ([], "delayed")
    assert broker.next_due_s == pytest.approx(60, abs=5)
    make_due(redis_client, queue, "a")
    [job] = broker.fetch(1)
    assert (job.job_id, job.lane, job.fields, job.attempt) == ("a", "low", {b"v": b"1", b"id": b"a", b"m": b"body"}, 1)
    assert broker.next_due_s is None


def test_a_job_that_waits_until_it_is_due_has_a_lifetime_beyond_that(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "normal", b"", delay_s=1000)
    for key in (Keys(queue).job("a"), Keys(queue).parked("a")):
        assert redis_client.ttl(key) == pytest.approx(JOB_TTL_S + 1000, abs=5)


def test_the_wait_for_its_time_is_no_time_in_the_queue(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "normal", b"", delay_s=60)
    redis_client.hset(Keys(queue).job("a"), "enqueued_ms", 5)
    make_due(redis_client, queue, "a")
    [job] = broker.fetch(1)
    assert job.enqueued_ms == int(job.entry_id.split("-")[0])


def test_the_same_id_again_is_a_duplicate_while_the_job_is_delayed(broker: Broker) -> None:
    broker.enqueue("a", "normal", b"", delay_s=60)
    assert broker.enqueue("a", "normal", b"").status == "duplicate"


def test_a_cancelled_delayed_job_is_due_at_once(broker: Broker) -> None:
    broker.enqueue("a", "normal", b"", delay_s=60)
    assert broker.cancel("a") == "delayed"
    [job] = broker.fetch(1)
    assert job.ending == "cancelled"


def test_a_delayed_job_is_due_at_its_deadline_at_the_latest(broker: Broker) -> None:
    broker.enqueue("a", "normal", b"", delay_s=60, deadline_ms=5)
    [job] = broker.fetch(1)
    assert job.ending == "expired"


def test_delayed_jobs_count_against_the_bound_of_the_queue(broker: Broker) -> None:
    broker.enqueue("a", "normal", b"", delay_s=60)
    assert broker.enqueue("b", "normal", b"", max_queued=1).status == "full"


def test_a_retry_sets_the_job_aside_and_counts_the_attempt(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str
) -> None:
    assert broker.retry([(job, 30.0)]) == ["ok"]
    assert (broker.fetch(1), broker.job("a")["state"], redis_client.xlen(Keys(queue).lane("low"))) == ([], "delayed", 0)
    make_due(redis_client, queue, "a")
    [again] = broker.fetch(1)
    assert (again.attempt, again.counted_attempts, again.lane, again.seed) == (2, 2, "low", job.seed)
    assert again.fields == job.fields
    assert again.enqueued_ms == job.enqueued_ms


def test_a_retry_whose_reply_was_lost_may_be_said_again(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str
) -> None:
    assert broker.retry([(job, 30.0)]) == broker.retry([(job, 30.0)]) == ["ok"]
    assert redis_client.zcard(Keys(queue).delayed("low")) == 1


def test_a_retry_of_a_job_that_somebody_else_has_is_refused(
    broker: Broker, other: Broker, job: Delivery, redis_client: redis.Redis, queue: str
) -> None:
    make_old(redis_client, queue, job)
    take_over(other)
    assert broker.retry([(job, 0.1)]) == ["fenced"]
    assert broker.job("a")["state"] == "running"


def test_who_has_set_a_job_aside_writes_nothing_any_more(broker: Broker, job: Delivery) -> None:
    broker.retry([(job, 30.0)])
    assert broker.emit([frame_to_emit(job, 0, 1)])[0].status == "fenced"


def test_the_next_attempt_goes_on_from_the_log(broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str) -> None:
    broker.emit([frame_to_emit(job, 0, 5, b"five")])
    broker.retry([(job, 30.0)])
    make_due(redis_client, queue, "a")
    [again] = broker.fetch(1)
    assert (again.num_logged, broker.read_log("a")) == (5, [b"five"])


def test_a_job_that_its_body_names_comes_back_under_that_name(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    redis_client.xadd(Keys(queue).lane("normal"), {"m": msgpack.packb({"id": "named"})})
    [job] = broker.fetch(1)
    named = broker.adopt(job, "named")
    assert named is not None
    broker.retry([(named, 30.0)])
    make_due(redis_client, queue, "named")
    [again] = broker.fetch(1)
    assert (again.job_id, again.attempt) == ("named", 2)
    assert broker.finish([end_of(again)]) == ["ok"]


def test_many_jobs_that_become_due_at_once_join_their_lanes_bit_by_bit(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for i in range(250):
        broker.enqueue(str(i), "normal", b"", delay_s=60)
        make_due(redis_client, queue, str(i))
    taken = [len(broker.fetch(250)) for _ in range(3)]
    assert taken == [100, 100, 50]


def test_a_delayed_job_whose_body_is_gone_does_not_stop_the_others(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for job_id in ("a", "b"):
        broker.enqueue(job_id, "normal", b"", delay_s=60)
        make_due(redis_client, queue, job_id)
    redis_client.unlink(Keys(queue).parked("a"))
    assert [job.job_id for job in broker.fetch(2)] == ["b"]
    assert redis_client.zcard(Keys(queue).delayed("normal")) == 0


def test_a_delayed_job_whose_hash_is_gone_is_not_lost(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "low", b"body", delay_s=60)
    redis_client.unlink(Keys(queue).job("a"))
    make_due(redis_client, queue, "a")
    [job] = broker.fetch(1)
    assert (job.job_id, job.lane, job.attempt, job.fields) == ("a", "low", 1, {b"v": b"1", b"id": b"a", b"m": b"body"})


def test_a_delayed_job_does_not_come_for_an_earlier_one_of_its_id_in_another_lane(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    keys = Keys(queue)
    broker.enqueue("a", "low", b"one", delay_s=60)
    redis_client.delete(keys.job("a"))
    broker.enqueue("a", "high", b"two", delay_s=90)
    redis_client.zadd(keys.delayed("low"), {"a": 1})
    assert (broker.fetch(1), broker.job("a")["state"]) == ([], "delayed")
    redis_client.zadd(keys.delayed("high"), {"a": 1})
    [job] = broker.fetch(1)
    assert (job.lane, job.fields) == ("high", {b"v": b"1", b"id": b"a", b"m": b"two"})


def test_a_delayed_job_that_nobody_would_ever_call_due_can_be_cancelled(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "low", b"body", delay_s=60)
    redis_client.unlink(Keys(queue).delayed("low"))
    broker.cancel("a")
    assert [job.ending for job in broker.fetch(1)] == ["cancelled"]


def test_delayed_jobs_are_counted_in_their_lanes_on_every_road_in_and_out(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str
) -> None:
    def counted() -> list[int]:
        return [lane.delayed for lane in broker.queue_counts().values()]

    for job_id, lane in (("b", "high"), ("c", "high"), ("d", "normal")):
        broker.enqueue(job_id, lane, b"", delay_s=60)
    broker.retry([(job, 30.0)])
    assert counted() == [2, 1, 1]
    broker.cancel("c")
    make_due(redis_client, queue, "a")
    assert {taken.job_id for taken in broker.fetch(9)} == {"a", "c"}
    assert counted() == [1, 1, 0]
    QueueAdmin(redis_client, queue).purge(["high"])
    broker.fetch(9)
    assert counted() == [0, 1, 0]


def test_a_flood_that_becomes_due_in_one_lane_does_not_keep_the_others_waiting(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for i in range(150):
        broker.enqueue(str(i), "high", b"", delay_s=60)
    broker.enqueue("low", "low", b"", delay_s=60)
    for job_id in (*map(str, range(150)), "low"):
        make_due(redis_client, queue, job_id)
    assert "low" in {taken.job_id for taken in broker.fetch(250)}
