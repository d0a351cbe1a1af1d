"""What a worker is handed, in which order and how often, and what wakes it. How long it keeps a job is in
test_broker_leases.py, how jobs end in test_broker_ends.py, what happens when servers fail in test_broker_faults.py."""

import subprocess
import threading
import time

import pytest
import redis

from tests.support.server import BrokerMaker, end_of, make_old, pending, take_over
from worker.broker import MAX_REPLY_BYTES, SCAN_LIMIT, Broker, EnqueueReply, LaneCounts
from worker.connection import connect
from worker.embedded import EmbeddedServer, packaged_binary
from worker.errors import InvalidOption
from worker.keys import Keys
from worker.wire import MAX_BODY_BYTES, encode_body

IN_AN_HOUR_MS = int(time.time() * 1000) + 3_600_000


@pytest.fixture
def normal(queue: str) -> str:
    return Keys(queue).lane("normal")


# Adding


def test_an_enqueued_job_is_delivered_as_it_was_given(broker: Broker) -> None:
    reply = broker.enqueue("a", "high", b"body")
    [job] = broker.fetch(1)
    assert reply == EnqueueReply("queued", "a")
    assert (job.job_id, job.lane, job.fields) == ("a", "high", {b"v": b"1", b"id": b"a", b"m": b"body"})
    assert (job.attempt, job.counted_attempts, job.num_logged, job.source, job.ending) == (1, 1, 0, "new", "")
    assert job.lease.endswith(":1")
    assert abs(job.enqueued_ms - time.time() * 1000) < 60_000


def test_the_same_id_enqueued_twice_is_one_job(broker: Broker, redis_client: redis.Redis, normal: str) -> None:
    replies = [broker.enqueue("a", "normal", b"1"), broker.enqueue("a", "normal", b"2")]
    assert [reply.status for reply in replies] == ["queued", "duplicate"]
    assert redis_client.xlen(normal) == 1


def test_an_idempotency_key_answers_with_the_job_it_stands_for(broker: Broker) -> None:
    broker.enqueue("a", "normal", b"", idempotency_key="k")
    assert broker.enqueue("b", "normal", b"", idempotency_key="k") == EnqueueReply("duplicate", "a")
    assert broker.job("b") == {}


def test_a_full_queue_says_when_to_come_again_and_takes_nothing(broker: Broker) -> None:
    for job_id in "ab":
        broker.enqueue(job_id, "low", b"")
    reply = broker.enqueue("c", "high", b"", max_queued=2)
    assert (reply.status, reply.retry_after_s, broker.job("c")) == ("full", 1.0, {})


def test_the_advice_of_a_full_queue_follows_the_pace_of_the_last_ends(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for second in range(11):
        redis_client.xadd(Keys(queue).done, {"id": "x"}, id=f"{1_000_000 + 2_000 * second}-0")
    for job_id in "abc":
        broker.enqueue(job_id, "normal", b"")
    assert broker.enqueue("d", "normal", b"", max_queued=1).retry_after_s == pytest.approx(3 * 2.0)


def test_deadline_tenant_and_batch_are_kept_with_the_job(broker: Broker) -> None:
    broker.enqueue("a", "normal", b"", deadline_ms=IN_AN_HOUR_MS, tenant="t", batch_id="b")
    kept = broker.job("a")
    assert (kept["deadline_ms"], kept["tenant"], kept["batch"], kept["state"]) == (str(IN_AN_HOUR_MS), "t", "b", "queued")


def test_a_json_body_from_the_command_line_client_is_a_job_named_after_its_entry(
    broker: Broker, server: EmbeddedServer, normal: str
) -> None:
    command = [
        str(packaged_binary("valkey-cli")),
        "-s",
        str(server.socket_path),
        "XADD",
        normal,
        "*",
        "j",
        '{"prompt":"Hello"}',
    ]
    entry = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    [job] = broker.fetch(1)
    assert (job.job_id, job.entry_id, job.fields) == (entry, entry, {b"j": b'{"prompt":"Hello"}'})
    assert broker.job(entry)["state"] == "running"


def test_an_id_among_the_fields_names_the_job(broker: Broker, redis_client: redis.Redis, normal: str) -> None:
    redis_client.xadd(normal, {"v": "1", "id": "my-1", "m": b"x"})
    assert [job.job_id for job in broker.fetch(5)] == ["my-1"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x" * 513,
        b"\xff",
        b"a\xc3",
        b"\xc3a\xa9",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xe0\x80\x80",
        b"\xf0\x80\x80\x80",
        b"\xf4\x90\x80\x80",
    ],
)
def test_an_id_that_is_no_text_of_a_sane_length_is_replaced_by_the_entry_id(
    broker: Broker, redis_client: redis.Redis, normal: str, raw: bytes
) -> None:
    entry = redis_client.xadd(normal, {"id": raw, "m": b"x"})
    [job] = broker.fetch(1)
    assert job.job_id.encode() == entry
    assert job.fields == {b"id": raw, b"m": b"x"}


@pytest.mark.parametrize("name", ["задача", "日本-1", "🎉" * 128, "a b:{c}\x00", "\ud7ff\ue000\U0010ffff"])
def test_an_id_in_any_script_is_kept(broker: Broker, name: str) -> None:
    broker.enqueue(name, "normal", b"")
    assert [job.job_id for job in broker.fetch(1)] == [name]


# Handing out


def test_lanes_are_served_high_before_normal_before_low(broker: Broker) -> None:
    for lane in ("low", "normal", "high"):
        broker.enqueue(f"{lane}-1", lane, b"")
        broker.enqueue(f"{lane}-2", lane, b"")
    assert [job.job_id for job in broker.fetch(6)] == ["high-1", "high-2", "normal-1", "normal-2", "low-1", "low-2"]


@pytest.mark.parametrize("free", [0, 1, 3, 40])
def test_never_more_than_free_jobs_are_claimed(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str, free: int
) -> None:
    for i in range(40):
        broker.enqueue(f"job-{i}", ("high", "normal", "low")[i % 3], b"")
    other.release(other.fetch(5))
    assert len(broker.fetch(free)) == free
    held = [holder for lane in ("high", "normal", "low") for holder, *_ in pending(redis_client, queue, lane).values()]
    assert held.count("me") == free


def test_a_second_entry_of_a_queued_running_or_ended_job_is_dropped(
    broker: Broker, redis_client: redis.Redis, normal: str
) -> None:
    def add_again() -> None:
        redis_client.xadd(normal, {"id": "a", "m": b"again"})

    broker.enqueue("a", "normal", b"first")
    add_again()
    [job] = broker.fetch(5)
    add_again()
    while_running = broker.fetch(5)
    broker.finish([end_of(job)])
    add_again()
    after_the_end = broker.fetch(5)
    assert (job.fields or {})[b"m"] == b"first"
    assert (while_running, after_the_end, redis_client.xlen(normal)) == ([], [], 0)


def test_the_same_job_under_the_same_entry_id_in_another_lane_is_dropped(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for lane in ("high", "normal"):
        redis_client.xadd(Keys(queue).lane(lane), {"id": "a"}, id="5-5")
    assert [job.lane for job in broker.fetch(2)] == ["high"]


LANES_OF_ONE_ID = {"5-5": "high", "5-5-normal": "normal", "5-5-low": "low"}


def add_twins(client: redis.Redis, queue: str) -> None:
    """An entry without an id in each lane, all with one entry id, as XADDs of one millisecond get it."""
    for lane in ("high", "normal", "low"):
        client.xadd(Keys(queue).lane(lane), {"m": lane}, id="5-5")


def test_entries_without_an_id_that_share_an_entry_id_are_a_job_each(
    broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    add_twins(redis_client, queue)
    jobs = broker.fetch(3)
    assert {job.job_id: job.lane for job in jobs} == LANES_OF_ONE_ID
    assert [(job.fields or {})[b"m"].decode() for job in jobs] == ["high", "normal", "low"]
    assert broker.finish([end_of(job) for job in jobs]) == ["ok"] * 3
    assert all(broker.result(job_id) for job_id in LANES_OF_ONE_ID)


def test_pipelined_entries_without_an_id_all_run(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    with redis_client.pipeline(transaction=True) as pipe:
        for _ in range(50):
            for lane in Keys(queue).lanes:
                pipe.xadd(lane, {"j": "{}"})
        pipe.execute()
    assert len({job.job_id for job in broker.fetch(200)}) == 150


def test_a_shared_entry_id_names_the_same_jobs_again_when_others_take_over(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    add_twins(redis_client, queue)
    first, *rest = broker.fetch(3)
    broker.finish([end_of(first)])
    redis_client.unlink(Keys(queue).job("5-5"))  # its result has expired
    for job in rest:
        make_old(redis_client, queue, job)
    again = take_over(other, 3)
    assert {job.job_id: (job.lane, job.attempt) for job in again} == {"5-5-normal": ("normal", 2), "5-5-low": ("low", 2)}
    other.finish([end_of(job) for job in again])


def test_bodies_that_name_jobs_of_a_shared_entry_id_are_a_job_each(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    redis_client.xadd(Keys(queue).lane("high"), {"m": b"a"}, id="5-5")
    [first] = broker.fetch(1)
    moved = broker.adopt(first, "A")
    redis_client.xadd(Keys(queue).lane("low"), {"m": b"b"}, id="5-5")
    [second] = broker.fetch(1)
    also_moved = broker.adopt(second, "B")
    assert moved is not None
    assert also_moved is not None
    for job in (moved, also_moved):
        make_old(redis_client, queue, job)
    assert {job.job_id: job.lane for job in take_over(other, 5)} == {"A": "high", "B": "low"}


def test_an_entry_is_not_taken_for_a_job_that_was_given_its_id(broker: Broker, redis_client: redis.Redis, normal: str) -> None:
    broker.enqueue("5-5", "normal", b"named")
    redis_client.xadd(normal, {"m": b"bare"}, id="9999999999999-5")
    broker.enqueue("9999999999999-5", "low", b"named too")
    assert [job.job_id for job in broker.fetch(3)] == ["5-5", "9999999999999-5-normal", "9999999999999-5"]


def test_a_cancelled_job_is_delivered_for_its_end_only(broker: Broker) -> None:
    broker.enqueue("a", "normal", b"")
    broker.cancel("a")
    [job] = broker.fetch(1)
    assert job.ending == "cancelled"


def test_a_job_past_its_deadline_is_delivered_for_its_end_only(broker: Broker) -> None:
    broker.enqueue("late", "normal", b"", deadline_ms=1)
    broker.enqueue("early", "normal", b"", deadline_ms=IN_AN_HOUR_MS)
    assert [job.ending for job in broker.fetch(2)] == ["expired", ""]


@pytest.mark.parametrize("field", ["m", "j", "x_note"])
def test_a_body_over_the_limit_is_announced_but_not_shipped(
    broker: Broker, redis_client: redis.Redis, normal: str, field: str
) -> None:
    redis_client.xadd(normal, {field: b"x" * (MAX_BODY_BYTES + 1)})
    [job] = broker.fetch(1)
    assert (job.fields, job.size > MAX_BODY_BYTES) == (None, True)


def test_a_body_that_a_client_may_send_is_shipped_whatever_its_id(broker: Broker) -> None:
    body = encode_body({"prompt": "x" * (MAX_BODY_BYTES - 13)})
    broker.enqueue("a" * 128, "normal", body)
    [job] = broker.fetch(1)
    assert (len(body), job.size, (job.fields or {})[b"m"] == body) == (MAX_BODY_BYTES, MAX_BODY_BYTES, True)


def test_a_fetch_of_big_bodies_ends_early_and_the_rest_rings_at_once(broker: Broker) -> None:
    body = b"x" * (MAX_BODY_BYTES - 100)
    for i in range(6):
        broker.enqueue(f"job-{i}", "normal", body)
    first = broker.fetch(6)
    broker.wait_for_entry(30.0)
    assert MAX_REPLY_BYTES // MAX_BODY_BYTES <= len(first) < 6
    assert len(first) + len(broker.fetch(6)) == 6


def test_a_flood_of_duplicates_is_dropped_in_bounded_pieces(broker: Broker, redis_client: redis.Redis, normal: str) -> None:
    broker.enqueue("a", "normal", b"")
    broker.fetch(1)
    with redis_client.pipeline() as pipe:
        for _ in range(SCAN_LIMIT):
            pipe.xadd(normal, {"id": "a"})
        pipe.execute()
    broker.enqueue("b", "normal", b"")
    assert broker.fetch(4) == []
    broker.wait_for_entry(30.0)
    assert [job.job_id for job in broker.fetch(4)] == ["b"]


def test_all_attempts_of_a_job_draw_the_same_seed_and_jobs_draw_different_ones(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for job_id in "ab":
        broker.enqueue(job_id, "normal", b"")
    first, second = broker.fetch(2)
    make_old(redis_client, queue, first)
    [again] = take_over(other, 1)
    assert first.seed == again.seed != second.seed
    assert 0 <= first.seed < 2**60


# Waiting and telling


def test_an_entry_added_between_fetch_and_wait_rings_at_once(broker: Broker) -> None:
    assert broker.fetch(1) == []
    broker.enqueue("a", "low", b"")
    started = time.monotonic()
    broker.wait_for_entry(30.0)
    assert time.monotonic() - started < 5.0


def test_an_entry_added_during_the_wait_ends_it(broker: Broker, make_broker: BrokerMaker, redis_client: redis.Redis) -> None:
    broker.fetch(1)
    waiter = threading.Thread(target=broker.wait_for_entry, args=(30.0,))
    waiter.start()
    make_broker().enqueue("a", "normal", b"")
    waiter.join(5.0)
    assert not waiter.is_alive()


def test_entries_that_other_workers_took_do_not_ring_after_the_next_fetch(broker: Broker, other: Broker) -> None:
    broker.enqueue("a", "normal", b"")
    other.fetch(1)
    assert broker.fetch(1) == []
    started = time.monotonic()
    broker.wait_for_entry(0.2)
    assert time.monotonic() - started >= 0.19


def test_a_wait_longer_than_the_socket_timeout_ends_without_an_error(redis_url: str, queue: str) -> None:
    with connect(redis_url, timeout_s=0.2) as client:
        broker = Broker(client, queue, "impatient")
        broker.wait_for_entry(0.6)  # the lanes do not exist yet
        broker.close()


def test_counts_tell_entries_claims_and_the_age_of_the_oldest_that_waits(
    broker: Broker, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    now_ms = int(time.time() * 1000)
    for i, age_s in enumerate((9, 7, 5)):
        redis_client.xadd(Keys(queue).lane("normal"), {"m": b""}, id=f"{now_ms - age_s * 1000}-{i}")
    broker.enqueue("a", "high", b"")
    broker.fetch(2)  # the high one, and the oldest
    other.release(other.fetch(1))
    counts = broker.queue_counts()
    assert (counts["high"], counts["low"]) == (LaneCounts(1, 1, 0.0), LaneCounts(0, 0, 0.0))
    assert (counts["normal"].entries, counts["normal"].pending) == (3, 1)
    assert counts["normal"].oldest_age_s == pytest.approx(7.0, abs=1.5)


def test_counts_of_a_queue_that_nobody_has_used_are_zero(redis_url: str, queue: str) -> None:
    with connect(redis_url) as client:
        assert set(Broker(client, queue, "x").queue_counts().values()) == {LaneCounts(0, 0, 0.0)}


def test_a_heartbeat_lives_for_three_beats(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    redis_client.zadd(Keys(queue).workers, {"long-gone": 1})
    broker.heartbeat({"host": "h", "slots": 8})
    said = redis_client.hgetall(Keys(queue).worker("me"))
    assert (said[b"host"], said[b"slots"]) == (b"h", b"8")
    assert redis_client.zrange(Keys(queue).workers, 0, -1) == [b"me"]
    assert all(0 < redis_client.ttl(key) <= 15 for key in (Keys(queue).workers, Keys(queue).worker("me")))


@pytest.mark.parametrize("name", ["", "released", "suspects"])
def test_a_worker_cannot_take_the_name_that_holds_released_jobs(redis_client: redis.Redis, queue: str, name: str) -> None:
    with pytest.raises(InvalidOption, match="worker_id"):
        Broker(redis_client, queue, name)
