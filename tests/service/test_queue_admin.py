"""What operators do to a queue, on a real server, with the workers' part played by hand."""

import time
from collections.abc import Iterator

import msgpack
import pytest
import redis

from tests.support.server import end_of
from worker.broker import Broker, LaneCounts
from worker.claims import Delivery
from worker.keys import JOB_TTL_S, Keys
from worker.lua import Scripts
from worker.queue_admin import PAGE, DeadRow, QueueAdmin

DAY_MS = 86_400_000


@pytest.fixture
def admin(redis_client: redis.Redis, queue: str) -> QueueAdmin:
    return QueueAdmin(redis_client, queue)


@pytest.fixture
def told(redis_client: redis.Redis, queue: str) -> Iterator[redis.client.PubSub]:
    """A worker's ear on the control channel."""
    with redis_client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe(Keys(queue).control)
        listener.get_message(timeout=5.0)
        yield listener


def heard(listener: redis.client.PubSub, count: int) -> list[bytes]:
    return [message["data"] for _ in range(count) if (message := listener.get_message(timeout=5.0))]


def settings(client: redis.Redis, queue: str) -> dict[bytes, bytes]:
    return client.hgetall(Keys(queue).config)  # type: ignore[return-value]


def delay(client: redis.Redis, queue: str, job_id: str, due_ms: int, lane: str = "normal") -> None:
    """A delayed job that is due at this very millisecond."""
    Broker(client, queue, "producer").enqueue(job_id, lane, b"", delay_s=60)
    client.zadd(Keys(queue).delayed(lane), {job_id: due_ms})


def suspect(client: redis.Redis, queue: str, broker: Broker, job: Delivery) -> None:
    """As a worker that died leaves a job that it ran: under the pseudo consumer, queued again."""
    broker.release([job])
    client.xclaim(Keys(queue).lane(job.lane), "workers", "suspects", 0, [job.entry_id], justid=True)


def die(broker: Broker, job_id: str, lane: str = "normal", body: bytes = b"body", error: str = "why") -> None:
    if job_id:
        broker.enqueue(job_id, lane, body, tenant="acme", batch_id="b", deadline_ms=2**42)
    broker.release(broker.fetch(1), "batch")
    [job] = broker.fetch(1)
    broker.finish([end_of(job, "dead", code="dead_letter", error=error)])


def rows_of(admin: QueueAdmin, job_id: str) -> list[DeadRow]:
    return admin.dead_jobs([job_id])[job_id]


# Settings


def test_pause_is_set_once_and_told_to_the_workers(
    admin: QueueAdmin, redis_client: redis.Redis, queue: str, told: redis.client.PubSub
) -> None:
    assert [admin.pause(), admin.pause()] == [True, False]
    assert settings(redis_client, queue) == {b"paused": b"1"}
    assert heard(told, 2) == [b"pause"] * 2


def test_resume_lifts_pause_and_close_and_leaves_the_limit(
    admin: QueueAdmin, redis_client: redis.Redis, queue: str, told: redis.client.PubSub
) -> None:
    admin.pause()
    admin.close()
    admin.set_limit(7)
    assert [admin.resume(), admin.resume()] == [True, False]
    assert settings(redis_client, queue) == {b"max_queued": b"7"}
    assert heard(told, 3) == [b"pause", b"resume", b"resume"]


def test_closing_is_told_by_the_settings(admin: QueueAdmin, redis_client: redis.Redis, queue: str) -> None:
    assert [admin.close(), admin.close()] == [True, False]
    assert settings(redis_client, queue) == {b"closed": b"1"}


def test_a_limit_is_replaced_and_taken_away(admin: QueueAdmin, redis_client: redis.Redis, queue: str) -> None:
    assert [admin.set_limit(3), admin.set_limit(3), admin.set_limit(0)] == [True, False, True]
    assert admin.stats().max_queued == 0
    assert [admin.set_limit(None), admin.set_limit(None)] == [True, False]
    assert settings(redis_client, queue) == {}


# Stats


def test_stats_of_a_queue_that_nobody_has_used_are_zero(admin: QueueAdmin) -> None:
    stats = admin.stats()
    assert set(stats.lanes.values()) == {LaneCounts(0, 0, 0.0)}
    assert (stats.is_paused, stats.is_closed, stats.max_queued, stats.purging, stats.due_in_s) == (False, False, None, (), None)
    assert (stats.delayed, stats.dead, stats.done, stats.workers, stats.num_waiting) == (0, 0, 0, (), 0)


def test_a_queue_is_paused_and_closed_by_a_1_alone(admin: QueueAdmin, redis_client: redis.Redis, queue: str) -> None:
    redis_client.hset(Keys(queue).config, mapping={"paused": "0", "closed": "0"})
    assert (admin.stats().is_paused, admin.stats().is_closed) == (False, False)


def test_stats_tell_apart_who_waits_in_a_lane(admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    for job_id in "abcd":
        broker.enqueue(job_id, "normal", b"")
    _running, given_back, blamed = broker.fetch(3)
    broker.release([given_back])
    suspect(redis_client, queue, broker, blamed)
    lane = admin.stats().lanes["normal"]
    assert (lane.entries, lane.waiting, lane.pending, lane.released, lane.suspects) == (4, 3, 1, 1, 1)


def test_the_oldest_that_waits_may_be_a_suspect(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    now_ms = int(time.time() * 1000)
    redis_client.xadd(Keys(queue).lane("normal"), {"m": b""}, id=f"{now_ms - 90_000}-0")
    suspect(redis_client, queue, broker, broker.fetch(1)[0])
    broker.enqueue("young", "normal", b"")
    assert admin.stats().lanes["normal"].oldest_age_s == pytest.approx(90, abs=2)


def test_stats_tell_what_is_delayed_dead_and_done(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    die(broker, "a")
    due_ms = int(time.time() * 1000) + 60_000
    delay(redis_client, queue, "soon", due_ms)
    delay(redis_client, queue, "later", due_ms + DAY_MS)
    stats = admin.stats()
    assert (stats.delayed, stats.dead, stats.done, stats.num_waiting) == (2, 1, 1, 2)
    assert stats.due_in_s == pytest.approx(60, abs=2)


def test_stats_list_the_workers_that_live(admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.heartbeat({"model": "m", "slots": 8, "active": 3, "state": "serving"})
    redis_client.zadd(Keys(queue).workers, {"long-gone": int(time.time() * 1000) - 16_000})
    [worker] = admin.stats().workers
    assert {name: worker[name] for name in ("id", "model", "slots", "active", "state")} == {
        "id": "me",
        "model": "m",
        "slots": "8",
        "active": "3",
        "state": "serving",
    }
    assert float(worker["seen_s"]) < 5


# Drain


def test_what_is_open_is_what_waits_runs_or_is_delayed(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for job_id, lane in zip("abc", ("high", "normal", "low"), strict=True):
        broker.enqueue(job_id, lane, b"")
    [job] = broker.fetch(1)
    delay(redis_client, queue, "d", 1)
    assert admin.num_open() == (3, 1)
    broker.finish([end_of(job)])
    assert admin.num_open() == (2, 1)


# Purge


def test_a_purge_marks_what_was_never_started_and_says_how_many(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for job_id in "abc":
        broker.enqueue(job_id, "normal", b"")
    broker.fetch(1)
    [last] = redis_client.xrevrange(Keys(queue).lane("normal"), count=1)
    assert [admin.purge(), admin.purge()] == [2, 2]
    assert settings(redis_client, queue) == {b"purged:normal": last[0]}
    assert redis_client.xlen(Keys(queue).lane("normal")) == 3
    assert admin.stats().purging == ("normal",)


def test_a_mark_that_workers_have_passed_is_not_shown(admin: QueueAdmin, broker: Broker) -> None:
    broker.enqueue("a", "normal", b"")
    admin.purge()
    broker.fetch(1)
    assert admin.stats().purging == ()


def test_a_purge_leaves_other_lanes(admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "low", b"")
    broker.enqueue("b", "high", b"")
    assert admin.purge(["low"]) == 1
    assert set(settings(redis_client, queue)) == {b"purged:low"}


def test_a_purge_of_lanes_without_a_group_marks_them(redis_client: redis.Redis, queue: str) -> None:
    redis_client.xadd(Keys(queue).lane("low"), {"j": "{}"})
    assert QueueAdmin(redis_client, queue).purge() == 1


def test_a_purge_asks_for_the_end_of_what_ran_before_and_leaves_what_runs(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for job_id in "abc":
        broker.enqueue(job_id, "normal", b"")
    _running, given_back, blamed = broker.fetch(3)
    broker.release([given_back])
    suspect(redis_client, queue, broker, blamed)
    assert [admin.purge(), admin.purge()] == [2, 2]
    assert [broker.job(job_id).get("cancel") for job_id in "abc"] == [None, "1", "1"]


def test_a_purge_reaches_jobs_that_have_moved_or_share_an_entry_id(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for lane in ("high", "normal"):
        redis_client.xadd(Keys(queue).lane(lane), {"m": b""}, id="5-5")
    redis_client.xadd(Keys(queue).lane("low"), {"id": "entry's", "m": b""})
    jobs = {job.lane: job for job in broker.fetch(3)}
    moved = broker.adopt(jobs["low"], "body's")
    assert moved is not None
    broker.release([jobs["high"], jobs["normal"], moved])
    assert admin.purge() == 3
    assert [broker.job(job_id)["cancel"] for job_id in ("5-5", "5-5-normal", "body's")] == ["1"] * 3


@pytest.mark.parametrize(("page", "page_bytes"), [(2, 10_000), (100, 150)])
def test_a_purge_goes_through_more_than_a_page(
    admin: QueueAdmin,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    redis_client: redis.Redis,
    queue: str,
    page: int,
    page_bytes: int,
) -> None:
    monkeypatch.setattr("worker.queue_admin.PAGE", page)
    monkeypatch.setattr("worker.queue_admin.PAGE_BYTES", page_bytes)
    for number in range(5):
        broker.enqueue(f"job-{number}", "normal", b"x" * 100)
    broker.release(broker.fetch(5))
    for number in range(300):
        delay(redis_client, queue, f"later-{number}", 2**42)
    assert admin.purge() == 305
    assert all(broker.job(f"job-{number}")["cancel"] == "1" for number in range(5))


def test_delayed_jobs_of_the_purged_lane_fall_due_with_a_cancel_request(
    admin: QueueAdmin, redis_client: redis.Redis, queue: str, broker: Broker
) -> None:
    later_ms = int(time.time() * 1000) + DAY_MS
    delay(redis_client, queue, "due", 5, "low")
    delay(redis_client, queue, "later", later_ms, "low")
    delay(redis_client, queue, "other", later_ms, "high")
    assert [admin.purge(["low"]), admin.purge(["low"])] == [2, 2]
    assert [broker.job(job_id).get("cancel") for job_id in ("due", "later", "other")] == ["1", "1", None]
    due = {job: at for key in Keys(queue).delayed_lanes for job, at in redis_client.zrange(key, 0, -1, withscores=True)}
    assert due[b"due"] == 5
    assert due[b"later"] <= time.time() * 1000 + 1000
    assert due[b"other"] == later_ms


def test_a_purge_does_not_mean_a_later_job_of_the_same_id_in_another_lane(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis
) -> None:
    broker.enqueue("a", "low", b"one", delay_s=60)
    redis_client.delete(admin.keys.job("a"))
    broker.enqueue("a", "high", b"two", delay_s=90)
    assert (admin.purge(["low"]), "cancel" in broker.job("a")) == (0, False)
    assert (admin.purge(["high"]), "cancel" in broker.job("a")) == (1, True)


def test_a_purged_job_stays_one_when_the_worker_that_came_to_it_leaves(admin: QueueAdmin, broker: Broker) -> None:
    broker.enqueue("a", "normal", b"")
    assert admin.purge() == 1
    broker.release(broker.fetch(1), "none")
    [again] = broker.fetch(1)
    assert (again.attempt, again.ending) == (2, "cancelled")


def test_a_suspect_that_may_not_be_taken_when_a_worker_comes_to_it_is_purged_all_the_same(
    admin: QueueAdmin, broker: Broker
) -> None:
    for job_id in ("a", "b"):
        broker.enqueue(job_id, "normal", b"")
    broker.release(broker.fetch(2), "batch")
    for _ in range(2):
        broker.retry([(job, 0.0) for job in broker.fetch(1)])
    broker.enqueue("urgent", "high", b"")
    broker.fetch(1)  # the others are due and join their lane
    assert admin.purge() == 2
    assert [(job.job_id, job.ending) for _ in range(2) for job in broker.fetch(2)] == [("a", "cancelled"), ("b", "cancelled")]


def test_a_job_that_waits_to_be_tried_again_is_purged_as_those_that_are_new(admin: QueueAdmin, broker: Broker) -> None:
    broker.enqueue("tried", "normal", b"body")
    broker.retry([(broker.fetch(1)[0], 0.0)])
    broker.enqueue("running", "high", b"body")
    [running] = broker.fetch(1)  # the other is due and joins its lane
    assert admin.purge() == 1
    [tried] = broker.fetch(1)
    assert (running.ending, tried.job_id, tried.ending) == ("", "tried", "cancelled")


def test_a_job_that_started_meanwhile_is_not_taken_for_a_delayed_one(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "normal", b"")
    broker.fetch(1)
    redis_client.zadd(Keys(queue).delayed("normal"), {"a": 2**42})
    assert admin.purge() == 0
    assert "cancel" not in broker.job("a")


# Dead


def test_rows_come_newest_first_without_bodies(admin: QueueAdmin, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue_admin.PAGE", 2)
    for number in range(7):
        die(broker, f"job-{number}", "low", b"x" * number)
    rows = list(admin.dead_rows())
    assert [row.job_id for row in rows] == [f"job-{number}" for number in reversed(range(7))]
    assert [row.body_bytes for row in rows] == [6, 5, 4, 3, 2, 1, 0]
    first = rows[0]
    assert (first.lane, first.why, first.attempts, first.owner, first.error) == ("low", "dead_letter", 1, "me", "why")
    assert first.dead_ms == pytest.approx(time.time() * 1000, abs=5000)


def test_a_page_ends_early_where_bodies_are_big(admin: QueueAdmin, broker: Broker, redis_client: redis.Redis) -> None:
    for number in range(3):
        die(broker, f"job-{number}", body=b"x" * 100)
    rows, start = Scripts(redis_client).run("dead", [admin.keys.dead], admin.keys.prefix, "+", PAGE, 150)
    assert len(rows) == 2
    rows, start = Scripts(redis_client).run("dead", [admin.keys.dead], admin.keys.prefix, start, PAGE, 150)
    assert (len(rows), start) == (1, b"")


def test_a_body_is_read_as_it_was_written(admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    die(broker, "a", body=b"\x81")
    redis_client.xadd(Keys(queue).lane("normal"), {"id": "b", "j": "{}"})
    die(broker, "")
    assert [admin.dead_body(rows_of(admin, job_id)[0]) for job_id in "ab"] == [("m", b"\x81"), ("j", b"{}")]


def test_a_row_that_was_written_without_a_lane_is_normal(admin: QueueAdmin, redis_client: redis.Redis, queue: str) -> None:
    redis_client.xadd(Keys(queue).dead, {"id": "a", "why": "dead_letter"})
    [row] = admin.dead_rows()
    assert (row.lane, row.attempts, row.body_bytes, admin.dead_body(row)) == ("normal", 0, 0, None)


def test_a_replayed_job_begins_a_new_life_in_its_lane(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.enqueue("a", "low", b"body", tenant="acme", batch_id="b", deadline_ms=2**42)
    broker.release(broker.fetch(1))
    redis_client.hset(Keys(queue).job("a"), mapping={"suspect": "1", "crashes": "2"})
    die(broker, "")
    assert admin.replay([rows_of(admin, "a")]) == ["queued"]
    known = broker.job("a")
    assert 0 < redis_client.ttl(Keys(queue).job("a")) <= JOB_TTL_S
    assert {known.pop(name) is not None for name in ("entry", "enqueued_ms")} == {True}
    assert known == {
        "state": "queued", "stream": "low", "attempt": "0", "released": "0", "n": "0",
        "tenant": "acme", "batch": "b", "deadline_ms": str(2**42),
    }  # fmt: skip
    assert (broker.result("a"), broker.read_log("a"), list(admin.dead_rows())) == (None, [], [])
    [job] = broker.fetch(1)
    assert (job.job_id, job.lane, job.attempt, job.counted_attempts) == ("a", "low", 1, 1)
    assert job.fields == {b"v": b"1", b"id": b"a", b"m": b"body"}


def test_a_replay_keeps_version_and_json_of_the_entry(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    entry = redis_client.xadd(Keys(queue).lane("normal"), {"v": "2", "j": "{}"})
    die(broker, "")
    admin.replay([rows_of(admin, entry.decode())])
    assert broker.fetch(1)[0].fields == {b"id": entry, b"v": b"2", b"j": b"{}"}


def test_a_job_whose_hash_has_expired_can_be_replayed(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    die(broker, "a")
    redis_client.unlink(Keys(queue).job("a"), Keys(queue).log("a"), Keys(queue).result("a"))
    assert admin.replay([rows_of(admin, "a")]) == ["queued"]
    assert [job.job_id for job in broker.fetch(1)] == ["a"]


def test_a_replay_again_is_no_second_job(admin: QueueAdmin, broker: Broker) -> None:
    die(broker, "a")
    rows = rows_of(admin, "a")
    assert [admin.replay([rows]), admin.replay([rows])] == [["queued"], ["gone"]]
    assert admin.num_open() == (1, 0)


def test_an_id_that_another_job_has_by_now_is_left_alone(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    die(broker, "a")
    redis_client.unlink(Keys(queue).job("a"), Keys(queue).log("a"), Keys(queue).result("a"))
    broker.enqueue("a", "high", b"another")
    assert admin.replay([rows_of(admin, "a")]) == ["exists"]
    assert admin.stats().dead == 1
    assert [job.fields[b"m"] for job in broker.fetch(9) if job.fields] == [b"another"]


def test_an_id_that_leads_to_another_job_by_now_is_left_alone(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    redis_client.xadd(Keys(queue).dead, {"id": "a", "m": b""})
    redis_client.xadd(Keys(queue).lane("normal"), {"id": "a", "m": b""})
    assert broker.adopt(broker.fetch(1)[0], "b") is not None
    assert admin.replay([rows_of(admin, "a")]) == ["exists"]


def test_a_row_without_a_body_is_not_replayed(admin: QueueAdmin, redis_client: redis.Redis, queue: str) -> None:
    redis_client.xadd(Keys(queue).dead, {"id": "a", "why": "dead_letter"})
    assert admin.replay([rows_of(admin, "a")]) == ["bodiless"]
    assert admin.stats().dead == 1


def test_of_several_rows_the_newest_is_replayed_and_all_of_them_leave(
    admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for body in (b"old", b"new"):
        die(broker, "a", body=body)
        redis_client.unlink(Keys(queue).job("a"), Keys(queue).log("a"), Keys(queue).result("a"))
    die(broker, "b")
    assert admin.replay([rows_of(admin, "a")]) == ["queued"]
    assert [job.fields[b"m"] for job in broker.fetch(9) if job.fields] == [b"new"]
    assert [row.job_id for row in admin.dead_rows()] == ["b"]


def test_all_the_dead_are_replayed_in_pages(admin: QueueAdmin, broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    for number in range(PAGE + 5):
        row = {"id": f"job-{number}", "m": msgpack.packb({"prompt": "p"})}
        redis_client.xadd(Keys(queue).dead, row)
    assert set(admin.replay(list(admin.dead_jobs().values()))) == {"queued"}
    assert (admin.num_open(), admin.stats().dead) == ((PAGE + 5, 0), 0)


def test_dropped_rows_are_gone_and_counted_once(admin: QueueAdmin, broker: Broker) -> None:
    for job_id in "ab":
        die(broker, job_id)
    rows = rows_of(admin, "a")
    assert [admin.drop(rows), admin.drop(rows)] == [1, 0]
    assert [row.job_id for row in admin.dead_rows()] == ["b"]
