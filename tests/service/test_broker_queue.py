"""What holds for a queue as a whole: lanes and their aging, pauses, bounds, purges, workers that come and go."""

import pytest
import redis

from tests.support.server import BrokerMaker, end_of, make_old, pending
from tests.support.wait import wait_until
from worker.broker import Broker
from worker.keys import JOB_TTL_S, LANES, Keys


def fill(broker: Broker, lane: str, count: int) -> None:
    for i in range(count):
        broker.enqueue(f"{lane}-{i}", lane, b"")


def lanes_served(broker: Broker, *batches: int, aging: int) -> list[str]:
    return [job.lane[0] for free in batches for job in broker.fetch(free, aging=aging)]


# Lanes


def test_higher_lanes_are_served_first(broker: Broker) -> None:
    for lane in reversed(LANES):
        fill(broker, lane, 2)
    assert lanes_served(broker, 6, aging=64) == list("hhnnll")


def test_a_waiting_job_of_a_lower_lane_is_passed_by_a_bounded_number(broker: Broker) -> None:
    fill(broker, "high", 20)
    fill(broker, "normal", 3)
    assert "".join(lanes_served(broker, *[1] * 12, aging=4)) == "hhhhnhhhhnhh"


def test_each_lower_lane_gets_its_turn_while_higher_ones_never_end(broker: Broker) -> None:
    for lane in LANES:
        fill(broker, lane, 30)
    served = "".join(lanes_served(broker, *[1] * 30, aging=4))
    assert min(served.count("n"), served.count("l")) >= 4
    assert served.count("h") >= 18


def test_aging_holds_for_claims_of_many_as_for_claims_of_one(broker: Broker) -> None:
    fill(broker, "high", 40)
    fill(broker, "low", 10)
    served = lanes_served(broker, 8, 8, 8, aging=4)
    assert [served[start : start + 8].count("l") for start in (0, 8, 16)] == [0, 2, 1]


def test_a_lane_in_which_nothing_waits_saves_up_no_turns(broker: Broker) -> None:
    fill(broker, "high", 20)
    lanes_served(broker, 10, aging=2)
    fill(broker, "low", 3)
    assert lanes_served(broker, 1, aging=2) == ["h"]


def test_what_waits_to_be_claimed_again_ages_too(broker: Broker) -> None:
    fill(broker, "low", 1)
    broker.release(broker.fetch(1))
    fill(broker, "high", 9)
    assert "".join(lanes_served(broker, *[1] * 4, aging=2)) == "hhlh"


# Pausing, closing, bounding


def test_nothing_is_handed_out_while_the_queue_is_paused(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    fill(broker, "normal", 1)
    redis_client.hset(Keys(queue).config, "paused", "1")
    assert (broker.fetch(1), broker.is_paused) == ([], True)
    redis_client.hdel(Keys(queue).config, "paused")
    assert (len(broker.fetch(1)), broker.is_paused) == (1, False)


def test_what_runs_goes_on_while_the_queue_is_paused(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    fill(broker, "normal", 1)
    [job] = broker.fetch(1)
    redis_client.hset(Keys(queue).config, "paused", "1")
    assert (broker.renew([job]).lost, broker.finish([end_of(job)])) == (set(), ["ok"])


def test_a_closed_queue_takes_no_new_job_and_still_knows_the_old_ones(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    fill(broker, "normal", 1)
    redis_client.hset(Keys(queue).config, "closed", "1")
    assert [broker.enqueue(job_id, "normal", b"").status for job_id in ("normal-0", "new")] == ["duplicate", "closed"]
    assert len(broker.fetch(2)) == 1


def test_the_tighter_of_both_bounds_holds(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    redis_client.hset(Keys(queue).config, "max_queued", "2")
    statuses = [broker.enqueue(str(i), "normal", b"", max_queued=bound).status for i, bound in enumerate((9, None, 9, None))]
    assert statuses == ["queued", "queued", "full", "full"]
    assert broker.enqueue("x", "normal", b"", max_queued=1).status == "full"


# Purging


def test_a_purge_ends_what_has_never_started_and_nothing_else(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    fill(broker, "normal", 3)
    started = broker.fetch(1)
    broker.release(started)
    last = redis_client.xrevrange(Keys(queue).lane("normal"), count=1)[0][0]
    redis_client.hset(Keys(queue).config, "purged:normal", last)
    broker.enqueue("later", "normal", b"")
    endings = {job.job_id: job.ending for job in broker.fetch(9)}
    assert endings == {"normal-0": "", "normal-1": "cancelled", "normal-2": "cancelled", "later": ""}


# The group


def test_the_first_worker_of_a_queue_gets_what_was_added_before_it_came(
    make_broker: BrokerMaker, redis_client: redis.Redis, queue: str
) -> None:
    redis_client.xadd(Keys(queue).lane("normal"), {"id": "early", "m": b""})
    assert [job.job_id for job in make_broker("first").fetch(2)] == ["early"]


def test_a_group_that_is_made_anew_brings_nothing_back_that_has_ended(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    fill(broker, "normal", 2)
    ended, running = broker.fetch(2)
    broker.finish([end_of(ended)])
    redis_client.xgroup_destroy(Keys(queue).lane("normal"), "workers")
    redis_client.xadd(Keys(queue).lane("normal"), {"id": ended.job_id, "m": b""})  # its producer is not sure, and repeats
    again = broker.fetch(9)
    assert [(job.job_id, job.attempt) for job in again] == [(running.job_id, 2)]


# Workers that come and go


def work(broker: Broker) -> None:
    """Take a job and end it: some servers know of a consumer only then."""
    broker.enqueue(f"of-{broker.worker_id}", "normal", b"")
    broker.finish([end_of(job) for job in broker.fetch(1)])


def test_a_consumer_that_holds_nothing_and_says_nothing_is_forgotten(
    make_broker: BrokerMaker, redis_client: redis.Redis, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.broker.names.WORKER_TTL_S", 0.05)
    gone, holder, sweeper = (make_broker(name) for name in ("gone", "holder", "sweeper"))
    holder.enqueue("a", "normal", b"")
    holder.fetch(1)
    work(gone)

    def names_after_a_sweep() -> set[bytes]:
        sweeper.clean_up()
        return {consumer["name"] for consumer in redis_client.xinfo_consumers(Keys(queue).lane("normal"), "workers")}

    wait_until(lambda: b"gone" not in names_after_a_sweep(), message="a consumer that is forgotten")
    assert b"holder" in names_after_a_sweep()


def test_a_consumer_whose_worker_lives_is_kept(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    work(broker)
    broker.heartbeat({"state": "serving"})
    assert broker.clean_up() == 0
    assert len(redis_client.xinfo_consumers(Keys(queue).lane("normal"), "workers")) == 1


def test_the_names_under_which_jobs_wait_are_never_forgotten(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "normal", b"")
    [job] = broker.fetch(1)
    broker.release([job])
    [job] = broker.fetch(1)
    make_old(redis_client, queue, job)
    broker.leave()
    assert "me" in {holder for holder, *_ in pending(redis_client, queue).values()}
    names = {consumer["name"] for consumer in redis_client.xinfo_consumers(Keys(queue).lane("normal"), "workers")}
    assert names == {b"me", b"released"}


def test_a_worker_that_leaves_takes_its_name_along(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    work(broker)
    broker.heartbeat({"state": "draining"})
    broker.leave()
    assert redis_client.xinfo_consumers(Keys(queue).lane("normal"), "workers") == []
    assert redis_client.exists(Keys(queue).workers, Keys(queue).worker("me")) == 0
    broker.leave()


def test_a_job_that_nobody_ever_takes_does_not_live_for_ever(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "normal", b"")
    assert redis_client.ttl(Keys(queue).job("a")) == pytest.approx(JOB_TTL_S, abs=5)
    redis_client.expire(Keys(queue).job("a"), 60)
    [job] = broker.fetch(1)
    assert redis_client.ttl(Keys(queue).job("a")) == pytest.approx(JOB_TTL_S, abs=5)
    redis_client.expire(Keys(queue).job("a"), 60)
    broker.release([job])
    assert redis_client.ttl(Keys(queue).job("a")) == pytest.approx(JOB_TTL_S, abs=5)
