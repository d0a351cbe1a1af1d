"""How long a worker keeps a job, who takes it over, and under which name."""

import pytest
import redis

from tests.support.server import end_of, frame_to_emit, make_old, pending, take_over
from worker.broker import Broker
from worker.claims import RenewReply
from worker.keys import Keys


@pytest.fixture
def normal(queue: str) -> str:
    return Keys(queue).lane("normal")


# Keeping


def test_renewing_makes_a_claim_young_without_counting_a_delivery(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    make_old(redis_client, queue, job)
    before = pending(redis_client, queue)[job.entry_id]
    reply = broker.renew([job])
    holder, idle_ms, deliveries = pending(redis_client, queue)[job.entry_id]
    assert (reply.lost, reply.cancelled, holder, deliveries) == (set(), set(), "me", before[2])
    assert idle_ms < 60_000 < before[1]


def test_renewing_tells_what_was_lost_and_what_is_to_be_cancelled(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for job_id in ("stolen", "unwanted", "mine"):
        broker.enqueue(job_id, "normal", b"")
    jobs = broker.fetch(3)
    make_old(redis_client, queue, jobs[0])
    take_over(other, 1)
    broker.cancel("unwanted")
    reply = broker.renew(jobs)
    assert (reply.lost, reply.cancelled) == ({"stolen"}, {"unwanted"})
    assert pending(redis_client, queue)[jobs[0].entry_id][0] == "other"


def test_an_earlier_claim_of_the_same_worker_is_lost_too(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    make_old(redis_client, queue, job)
    [again] = take_over(broker, 1)
    assert (broker.renew([job]).lost, broker.renew([again]).lost) == ({"a"}, set())


def test_a_job_that_has_just_ended_is_neither_lost_nor_to_be_cancelled(broker: Broker) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    broker.cancel("a")
    broker.finish([end_of(job)])
    assert broker.renew([job]) == RenewReply(set(), set())


def test_renewing_restores_a_claim_whose_group_was_made_anew(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    redis_client.xgroup_destroy(Keys(queue).lane("normal"), "workers")
    assert broker.renew([job]).lost == set()
    assert pending(redis_client, queue)[job.entry_id][0] == "me"


# Taking over


def test_only_jobs_whose_lease_ran_out_are_reclaimed(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for job_id in ("young", "old"):
        broker.enqueue(job_id, "normal", b"body")
    _, old = broker.fetch(2)
    make_old(redis_client, queue, old)
    [job] = take_over(other, 9)
    assert (job.job_id, job.source, job.attempt, job.counted_attempts, job.fields) == ("old", "reclaimed", 2, 2, old.fields)
    assert job.lease != old.lease


def test_the_time_of_the_first_claim_is_kept(broker: Broker, other: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    redis_client.hset(Keys(queue).job("a"), "started_ms", 5)
    make_old(redis_client, queue, job)
    assert [again.started_ms for again in take_over(other, 1)] == [5]


def test_reclaiming_goes_on_where_the_last_call_stopped(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for i in range(7):
        broker.enqueue(f"job-{i}", ("high", "normal", "low")[i % 3], b"")
    for job in broker.fetch(7):
        make_old(redis_client, queue, job)
    found = [job.job_id for _ in range(7) for job in take_over(other, 1)]
    assert sorted(found) == [f"job-{i}" for i in range(7)]


def test_reclaiming_begins_at_the_cursor_that_workers_share(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for job_id in "ab":
        broker.enqueue(job_id, "normal", b"")
    first, second = broker.fetch(2)
    for job in (first, second):
        make_old(redis_client, queue, job)
    redis_client.hset(Keys(queue).cursor, "normal", second.entry_id)
    assert (other.reclaim([]), broker.renew([first]).lost) == (1, set())
    assert (other.reclaim([]), broker.renew([second]).lost) == (0, {"b"})


def test_one_old_job_is_found_among_many_that_are_renewed(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str, normal: str
) -> None:
    with redis_client.pipeline() as pipe:
        for _ in range(1500):
            pipe.xadd(normal, {"m": b""})
        pipe.execute()
    jobs = broker.fetch(1500) + broker.fetch(1500) + broker.fetch(1500)
    make_old(redis_client, queue, jobs[-1])
    assert [job.job_id for job in take_over(other, 1)] == [jobs[-1].job_id]


def test_entries_in_the_callers_hands_are_left_and_stay_claimable_by_others(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    make_old(redis_client, queue, job)
    assert take_over(broker, 1, [job]) == []
    assert [taken.job_id for taken in take_over(other, 1)] == ["a"]


def test_an_entry_id_in_hand_does_not_hide_the_same_entry_id_of_another_lane(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for lane in ("high", "normal"):
        redis_client.xadd(Keys(queue).lane(lane), {"id": f"in-{lane}"}, id="5-5")
    [mine] = broker.fetch(1)
    [dead] = other.fetch(1)
    make_old(redis_client, queue, dead)
    assert [job.job_id for job in take_over(broker, 2, [mine])] == ["in-normal"]


def test_claims_on_entries_that_are_gone_are_dropped(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str, normal: str
) -> None:
    entry = redis_client.xadd(normal, {"m": b""})
    [job] = broker.fetch(1)
    make_old(redis_client, queue, job)
    redis_client.xdel(normal, entry)
    assert take_over(other, 1) == []
    assert pending(redis_client, queue) == {}


def test_claims_on_jobs_that_have_ended_are_dropped(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str, normal: str
) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    make_old(redis_client, queue, job)
    redis_client.hset(Keys(queue).job("a"), "state", "succeeded")
    assert take_over(other, 1) == []
    assert (pending(redis_client, queue), redis_client.xlen(normal)) == ({}, 0)
    redis_client.expire(Keys(queue).job("a"), 60)


def test_a_cancelled_job_of_a_dead_worker_is_reclaimed_for_its_end_only(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    broker.cancel("a")
    make_old(redis_client, queue, job)
    assert [taken.ending for taken in take_over(other, 1)] == ["cancelled"]


def test_a_reclaimed_job_knows_how_many_tokens_are_in_its_log(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    broker.emit([frame_to_emit(job, 0, 5, b"five")])
    make_old(redis_client, queue, job)
    [again] = take_over(other, 1)
    assert (again.num_logged, other.read_log("a")) == (5, [b"five"])


def test_a_job_whose_log_is_gone_starts_over(broker: Broker, other: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    broker.emit([frame_to_emit(job, 0, 5)])
    redis_client.unlink(Keys(queue).log("a"))
    make_old(redis_client, queue, job)
    [again] = take_over(other, 1)
    assert again.num_logged == 0
    assert other.emit([frame_to_emit(again, 0, 1)])[0].status == "ok"


# Giving back


def test_a_released_job_goes_to_any_worker_before_newer_ones_and_the_attempt_is_not_counted(
    broker: Broker, other: Broker
) -> None:
    broker.enqueue("first", "normal", b"body")
    [job] = broker.fetch(1)
    broker.enqueue("second", "normal", b"")
    broker.release([job])
    assert broker.job("first")["state"] == "queued"
    again, second = other.fetch(2)
    assert (again.job_id, again.source, again.fields, second.job_id) == ("first", "released", job.fields, "second")
    assert (again.attempt, again.counted_attempts) == (2, 1)


def test_a_job_can_be_given_back_with_the_attempt_counted(broker: Broker, other: Broker) -> None:
    broker.enqueue("a", "normal", b"")
    broker.release(broker.fetch(1), "batch")
    [again] = other.fetch(1)
    assert (again.source, again.attempt, again.counted_attempts) == ("released", 2, 2)


def test_what_was_released_cannot_be_renewed_written_or_released_again(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    broker.release([job])
    assert broker.renew([job]).lost == {"a"}
    assert broker.emit([frame_to_emit(job, 0, 1)])[0].status == "fenced"
    other.fetch(1)
    broker.release([job])
    assert (broker.job("a")["released"], pending(redis_client, queue)[job.entry_id][0]) == ("1", "other")


# Another id in the body


def test_a_job_moves_to_the_id_that_its_body_names(broker: Broker, redis_client: redis.Redis, normal: str) -> None:
    entry = redis_client.xadd(normal, {"j": b'{"id":"named"}'}).decode()
    [job] = broker.fetch(1)
    adopted = broker.adopt(job, "named")
    assert adopted is not None
    assert adopted.job_id == "named"
    assert broker.adopt(job, "named") == adopted  # a repeat after a lost reply
    assert broker.emit([frame_to_emit(adopted, 0, 1)])[0].status == "ok"
    assert broker.job(entry) == broker.job("named")


def test_a_second_entry_whose_body_names_a_known_job_is_dropped(broker: Broker, redis_client: redis.Redis, normal: str) -> None:
    broker.enqueue("named", "high", b"")
    redis_client.xadd(normal, {"j": b'{"id":"named"}'})
    _, job = broker.fetch(2)
    assert broker.adopt(job, "named") is None
    assert broker.adopt(job, "named") is None
    assert (redis_client.xlen(normal), broker.job(job.job_id)) == (0, {})


def test_whoever_takes_over_a_moved_job_finds_it_under_its_name(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str, normal: str
) -> None:
    redis_client.xadd(normal, {"j": b'{"id":"named"}'})
    [job] = broker.fetch(1)
    adopted = broker.adopt(job, "named")
    assert adopted is not None
    broker.emit([frame_to_emit(adopted, 0, 3)])
    make_old(redis_client, queue, job)
    [again] = take_over(other, 1)
    assert (again.job_id, again.attempt, again.num_logged) == ("named", 2, 3)
    assert other.finish([end_of(again)]) == ["ok"]  # the queue fixture checks that the alias got a lifetime


def test_a_job_that_was_lost_meanwhile_does_not_move(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str, normal: str
) -> None:
    redis_client.xadd(normal, {"j": b'{"id":"named"}'})
    [job] = broker.fetch(1)
    make_old(redis_client, queue, job)
    take_over(other, 1)
    assert broker.adopt(job, "named") is None
    assert (redis_client.xlen(normal), broker.job("named")) == (1, {})
