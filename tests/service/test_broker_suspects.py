"""Suspects: what a crash makes of the jobs that ran, and how they get rid of the suspicion."""

import pytest
import redis

from tests.support.server import BrokerMaker, end_of, make_old, pending, take_over
from worker.broker import Broker
from worker.claims import Blame, Delivery
from worker.errors import InvalidOption
from worker.keys import Keys


@pytest.fixture
def other(make_broker: BrokerMaker) -> Broker:
    return make_broker("other")


def claimed(broker: Broker, *job_ids: str) -> list[Delivery]:
    for job_id in job_ids:
        broker.enqueue(job_id, "normal", b"")
    return broker.fetch(len(job_ids))


@pytest.mark.parametrize(
    ("blame", "is_suspect", "counted", "crashes"),
    [("none", False, 1, 0), ("bystander", True, 1, 0), ("batch", True, 2, 0), ("solo", True, 2, 1)],
)
def test_the_blame_decides_what_the_next_attempt_knows(
    broker: Broker, other: Broker, blame: Blame, is_suspect: bool, counted: int, crashes: int
) -> None:
    broker.release(claimed(broker, "a"), blame)
    [again] = other.fetch(1)
    assert (again.is_suspect, again.counted_attempts, again.num_crashes) == (is_suspect, counted, crashes)


def test_suspects_are_handed_out_one_at_a_time_before_all_else_in_their_lane(broker: Broker, other: Broker) -> None:
    broker.release(claimed(broker, "a", "b"), "batch")
    broker.enqueue("new", "normal", b"")
    assert [job.job_id for job in other.fetch(9)] == ["a", "new"]
    assert [job.job_id for job in other.fetch(9)] == ["b"]


def test_a_suspect_does_not_go_before_a_higher_lane(broker: Broker, other: Broker) -> None:
    broker.release(claimed(broker, "a"), "batch")
    broker.enqueue("urgent", "high", b"")
    assert [job.job_id for job in other.fetch(1)] == ["urgent"]
    assert [job.job_id for job in other.fetch(1)] == ["a"]


def test_a_suspect_ages_while_higher_lanes_pass_it_by_and_while_it_may_not_be_taken(broker: Broker, other: Broker) -> None:
    broker.release(claimed(broker, "a"), "batch")
    for number in range(5):
        broker.enqueue(f"urgent-{number}", "high", b"")
    passing = [other.fetch(1, aging=4, may_take_suspect=False)[0].job_id for _ in range(4)]
    assert passing == [f"urgent-{number}" for number in range(4)]
    assert [job.job_id for job in other.fetch(1, aging=4)] == ["a"]


def test_a_suspect_that_may_not_be_taken_saves_up_no_turns_for_its_lane(broker: Broker, other: Broker) -> None:
    broker.release(claimed(broker, "a"), "batch")
    for number in range(44):
        broker.enqueue(f"urgent-{number}", "high", b"")
    for _ in range(40):
        other.fetch(1, aging=4, may_take_suspect=False)
    for number in range(4):
        broker.enqueue(f"new-{number}", "normal", b"")
    taken = [other.fetch(1, aging=4, may_take_suspect=False)[0].job_id for _ in range(4)]
    assert taken == ["new-0", "urgent-40", "urgent-41", "urgent-42"]


def test_whoever_has_a_suspect_is_given_the_others_only(broker: Broker, other: Broker) -> None:
    broker.release(claimed(broker, "suspect"), "batch")
    broker.release(claimed(broker, "given back"), "none")
    assert [job.job_id for job in other.fetch(9, may_take_suspect=False)] == ["given back"]
    assert [job.job_id for job in other.fetch(9)] == ["suspect"]


def test_the_jobs_of_a_dead_worker_are_suspects(broker: Broker, other: Broker, redis_client: redis.Redis, queue: str) -> None:
    for job in claimed(broker, "a", "b"):
        make_old(redis_client, queue, job)
    jobs = take_over(other, 2)
    assert [(job.job_id, job.is_suspect, job.num_crashes, job.source) for job in jobs] == [
        ("a", True, 0, "reclaimed"),
        ("b", True, 0, "reclaimed"),
    ]


def test_a_worker_that_dies_with_a_suspect_alone_charges_that_one(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    crashes = []
    for job in claimed(broker, "a"):
        make_old(redis_client, queue, job)
    for holder in (other, broker, other):
        [job] = take_over(holder)
        crashes.append(job.num_crashes)
        make_old(redis_client, queue, job)
    assert crashes == [0, 1, 2]


def test_an_acquitted_job_is_charged_for_a_later_crash_like_all_others(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.release(claimed(broker, "a"), "batch")
    [job] = other.fetch(1)
    other.acquit([job])
    make_old(redis_client, queue, job)
    [again] = take_over(broker)
    assert (again.is_suspect, again.num_crashes, again.counted_attempts) == (True, 0, 3)


def test_a_suspect_that_is_given_back_in_order_stays_one(broker: Broker, other: Broker) -> None:
    broker.release(claimed(broker, "a"), "batch")
    other.release(other.fetch(1), "none")
    [again] = broker.fetch(1)
    assert (again.is_suspect, again.num_crashes, again.counted_attempts) == (True, 0, 2)


def test_who_has_lost_a_job_cannot_acquit_it(broker: Broker, other: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.release(claimed(broker, "a"), "batch")
    [job] = broker.fetch(1)
    make_old(redis_client, queue, job)
    [again] = take_over(other)
    broker.acquit([job])
    assert broker.job("a")["suspect"] == "1"
    other.acquit([again])
    other.acquit([again])
    assert "suspect" not in broker.job("a")


def test_waiting_suspects_are_not_taken_for_abandoned_ones(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    [job] = claimed(broker, "a")
    broker.release([job], "batch")
    make_old(redis_client, queue, job)
    assert other.reclaim([]) == 0
    assert pending(redis_client, queue)[job.entry_id][0] == "suspects"


def test_a_cancelled_suspect_is_handed_out_for_its_end(broker: Broker, other: Broker) -> None:
    broker.release(claimed(broker, "a"), "solo")
    broker.cancel("a")
    [job] = other.fetch(1)
    assert job.ending == "cancelled"
    assert other.finish([end_of(job, "cancelled")]) == ["ok"]


def test_no_worker_may_have_the_name_under_which_jobs_wait(make_broker: BrokerMaker) -> None:
    for name in ("released", "suspects"):
        with pytest.raises(InvalidOption, match=name):
            make_broker(name)


def test_heartbeats_and_renewals_do_not_count_as_deliveries(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    jobs = claimed(broker, "a")
    for _ in range(20):
        broker.renew(jobs)
        broker.heartbeat({"state": "serving"})
    assert pending(redis_client, queue)[jobs[0].entry_id][2] == 1
    make_old(redis_client, queue, jobs[0])
    [again] = take_over(broker)
    assert (again.counted_attempts, again.num_crashes) == (2, 0)
    redis_client.unlink(Keys(queue).workers)


def test_suspects_that_come_back_after_a_fault_are_handed_out_one_at_a_time_too(broker: Broker, other: Broker) -> None:
    broker.release(claimed(broker, "a", "b"), "batch")
    for _ in range(2):
        broker.retry([(job, 0.0) for job in broker.fetch(1)])
    assert other.fetch(9, may_take_suspect=False) == []
    assert [[job.job_id for job in other.fetch(9)] for _ in range(2)] == [["a"], ["b"]]


def test_who_is_held_by_a_dead_worker_beside_a_suspect_is_not_charged(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.release(claimed(broker, "suspect"), "batch")
    for lane in ("high", "low"):
        broker.enqueue(lane, lane, b"")
    for job in broker.fetch(9):
        make_old(redis_client, queue, job)
    jobs = {job.job_id: job for job in take_over(other, 3)}
    assert {name: (job.counted_attempts, job.num_crashes) for name, job in jobs.items()} == {
        "suspect": (3, 1),
        "high": (1, 0),
        "low": (1, 0),
    }


def test_a_suspect_whose_claim_is_younger_than_its_neighbours_still_bears_the_blame(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.release(claimed(broker, "suspect"), "batch")
    broker.enqueue("a", "normal", b"")
    [neighbour] = broker.fetch(9, may_take_suspect=False)
    broker.fetch(1)
    make_old(redis_client, queue, neighbour)
    [job] = take_over(other)
    assert (job.job_id, job.counted_attempts, job.is_suspect) == ("a", 1, True)
