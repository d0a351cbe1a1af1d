"""Writing: the log, the channel, the one end of a job, and who is kept from writing."""

from dataclasses import replace
from typing import get_args

import pytest
import redis

from tests.support.server import end_of, frame_to_emit, make_old, take_over
from worker.broker import Broker
from worker.claims import Delivery, EmitReply
from worker.frames import FinalState
from worker.keys import RESULT_TTL_S, Keys


@pytest.fixture
def job(broker: Broker) -> Delivery:
    broker.enqueue("a", "normal", b"body", batch_id="b")
    return broker.fetch(1)[0]


@pytest.fixture
def taken_over(job: Delivery, other: Broker, redis_client: redis.Redis, queue: str) -> Delivery:
    """The same job in the hands of another worker."""
    make_old(redis_client, queue, job)
    return take_over(other, 1)[0]


def entry_ids(client: redis.Redis, queue: str, job_id: str) -> list[bytes]:
    return [entry for entry, _ in client.xrange(Keys(queue).log(job_id))]


def heard(listener: redis.client.PubSub) -> list[bytes]:
    """What has arrived on the subscribed channels so far."""
    found = []
    while message := listener.get_message(timeout=0.5):
        if message["type"] == "message":
            found.append(message["data"])
    return found


# The log


def test_frames_are_logged_in_order_under_attempt_and_count(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str
) -> None:
    frames = [frame_to_emit(job, 0, 0, b"start"), frame_to_emit(job, 0, 1, b"one"), frame_to_emit(job, 1, 17, b"more")]
    assert broker.emit(frames) == [EmitReply("ok", 0), EmitReply("ok", 1), EmitReply("ok", 17)]
    assert broker.read_log("a") == [b"start", b"one", b"more"]
    assert entry_ids(redis_client, queue, "a") == [b"1-0", b"1-1", b"1-17"]


def test_the_channel_carries_what_the_log_holds_unless_told_not_to(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str
) -> None:
    with redis_client.pubsub() as listener:
        listener.subscribe(Keys(queue).channel("a"))
        assert listener.get_message(timeout=5.0)["type"] == "subscribe"
        broker.emit([frame_to_emit(job, 0, 1, b"one"), frame_to_emit(job, 1, 2, b"quiet", publish=False)])
        broker.finish([end_of(job, end_frame=b"end")])
        assert heard(listener) == [b"one", b"end"]
    assert broker.read_log("a") == [b"one", b"quiet", b"end"]


@pytest.mark.parametrize(("previous_n", "n"), [(0, 0), (0, 4)], ids=["start", "tokens"])
def test_a_frame_sent_again_after_a_lost_reply_is_logged_once(broker: Broker, job: Delivery, previous_n: int, n: int) -> None:
    frame = frame_to_emit(job, previous_n, n)
    assert broker.emit([frame]) == broker.emit([frame]) == [EmitReply("ok", n)]
    assert len(broker.read_log("a")) == 1


def test_the_start_frame_of_a_later_attempt_is_logged_once_after_earlier_tokens(
    broker: Broker, job: Delivery, other: Broker, redis_client: redis.Redis, queue: str
) -> None:
    broker.emit([frame_to_emit(job, 0, 5, b"five")])
    make_old(redis_client, queue, job)
    [again] = take_over(other, 1)
    start = frame_to_emit(again, 5, 5, b"start")
    assert other.emit([start, start, frame_to_emit(again, 5, 6, b"six")]) == [EmitReply("ok", n) for n in (5, 5, 6)]
    assert other.read_log("a") == [b"five", b"start", b"six"]


@pytest.mark.parametrize(("previous_n", "n"), [(0, 7), (4, 7), (6, 7)], ids=["overlaps", "overlaps in part", "leaves a gap"])
def test_a_frame_that_does_not_begin_where_the_log_ends_is_refused_with_that_place(
    broker: Broker, job: Delivery, previous_n: int, n: int
) -> None:
    broker.emit([frame_to_emit(job, 0, 5)])
    assert broker.emit([frame_to_emit(job, previous_n, n)]) == [EmitReply("behind", 5)]
    assert len(broker.read_log("a")) == 1


def test_a_worker_that_lost_its_job_cannot_write_to_the_log(broker: Broker, job: Delivery, taken_over: Delivery) -> None:
    assert broker.emit([frame_to_emit(job, 0, 1)]) == [EmitReply("fenced", 0)]
    assert broker.read_log("a") == []


def test_an_attempt_number_alone_does_not_open_the_log(broker: Broker, job: Delivery) -> None:
    forged = replace(frame_to_emit(job, 0, 1), lease=f"0123456789abcdef:{job.attempt}")
    assert broker.emit([forged])[0].status == "fenced"


def test_the_answer_to_a_frame_carries_a_cancel_request(broker: Broker, job: Delivery) -> None:
    broker.cancel("a")
    assert broker.emit([frame_to_emit(job, 0, 1)]) == [EmitReply("cancel", 1)]
    assert len(broker.read_log("a")) == 1


def test_the_log_of_a_running_job_has_a_lifetime(broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str) -> None:
    broker.emit([frame_to_emit(job, 0, 1)])
    assert 0 < redis_client.ttl(Keys(queue).log("a")) <= RESULT_TTL_S


# The end


def test_an_end_stores_the_result_ends_the_log_and_frees_the_entry(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str
) -> None:
    keys = Keys(queue)
    broker.emit([frame_to_emit(job, 0, 2, b"two")])
    assert broker.finish([end_of(job, code="c", result_ttl_s=600, expected_n=2)]) == ["ok"]
    assert (broker.result("a"), broker.read_log("a")) == (b"result", [b"two", b"end"])
    assert entry_ids(redis_client, queue, "a") == [b"1-2", b"1-3"]
    assert (broker.job("a")["state"], broker.job("a")["code"]) == ("succeeded", "c")
    assert {redis_client.ttl(key) > 590 for key in (keys.job("a"), keys.log("a"), keys.result("a"))} == {True}
    assert (redis_client.xlen(keys.lane("normal")), redis_client.xpending(keys.lane("normal"), "workers")["pending"]) == (0, 0)


def test_an_end_is_announced_on_the_done_stream_with_its_batch(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str
) -> None:
    redis_client.xadd(Keys(queue).lane("normal"), {"j": b"{}"})
    [raw] = broker.fetch(1)
    broker.finish([end_of(job, code="c"), end_of(raw, "failed", code="invalid", batch_id="from the body")])
    rows = [fields for _, fields in redis_client.xrange(Keys(queue).done)]
    assert [(row[b"id"], row[b"state"], row[b"batch"], row[b"code"]) for row in rows] == [
        (b"a", b"succeeded", b"b", b"c"),
        (raw.job_id.encode(), b"failed", b"from the body", b"invalid"),
    ]


@pytest.mark.parametrize("state", get_args(FinalState))
def test_an_end_sent_again_after_a_lost_reply_is_one_end(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str, state: str
) -> None:
    assert broker.finish([end_of(job, state)]) == broker.finish([end_of(job, state, result=b"second")]) == ["ok"]
    assert (broker.result("a"), broker.read_log("a"), redis_client.xlen(Keys(queue).done)) == (b"result", [b"end"], 1)


def test_a_worker_that_lost_its_job_cannot_end_it_before_or_after_the_new_holder(
    broker: Broker, other: Broker, job: Delivery, taken_over: Delivery
) -> None:
    assert broker.finish([end_of(job, result=b"late")]) == ["fenced"]
    assert broker.result("a") is None
    assert other.finish([end_of(taken_over)]) == ["ok"]
    assert broker.finish([end_of(job, result=b"late")]) == ["fenced"]
    assert broker.result("a") == b"result"


def test_an_end_is_refused_while_the_log_lacks_tokens(broker: Broker, job: Delivery) -> None:
    broker.emit([frame_to_emit(job, 0, 3)])
    assert broker.finish([end_of(job, expected_n=5)]) == ["behind"]
    assert (broker.result("a"), broker.job("a")["state"]) == (None, "running")
    broker.emit([frame_to_emit(job, 3, 5)])
    assert broker.finish([end_of(job, expected_n=5)]) == ["ok"]


def test_nothing_is_logged_after_the_end(broker: Broker, job: Delivery) -> None:
    broker.finish([end_of(job)])
    assert broker.emit([frame_to_emit(job, 0, 1)])[0].status == "fenced"
    assert broker.read_log("a") == [b"end"]


@pytest.mark.parametrize("field", ["m", "j"])
def test_a_dead_job_keeps_its_body_and_the_reason_for_people(
    broker: Broker, redis_client: redis.Redis, queue: str, field: str
) -> None:
    redis_client.xadd(Keys(queue).lane("low"), {"id": "poison", "v": "2", field: b"body"})
    broker.release(broker.fetch(1))
    broker.release(broker.fetch(1), "batch")
    [job] = broker.fetch(1)
    broker.finish([end_of(job, "dead", code="dead_letter", error="why: so")])
    [(_, row)] = redis_client.xrange(Keys(queue).dead)
    reason = {"why": "dead_letter", "attempts": "1", "owner": "me", "error": "why: so"}
    kept = {name.decode(): value.decode() for name, value in row.items()}
    assert kept == {"id": "poison", "lane": "low", "v": "2", field: "body"} | reason


@pytest.mark.parametrize("is_raw", [False, True], ids=["enqueued", "added raw"])
def test_a_job_id_can_be_used_again_once_its_result_has_expired(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str, is_raw: bool
) -> None:
    broker.emit([frame_to_emit(job, 0, 1)])
    broker.finish([end_of(job)])
    redis_client.unlink(Keys(queue).job("a"))  # the log and the result would follow within the millisecond
    if is_raw:
        redis_client.xadd(Keys(queue).lane("normal"), {"id": "a"})
    else:
        broker.enqueue("a", "normal", b"")
    assert [again.num_logged for again in broker.fetch(1)] == [0]
    assert (broker.result("a"), broker.read_log("a")) == (None, [])


# Cancelling


def test_a_cancel_request_for_a_running_job_is_sent_to_the_workers(
    broker: Broker, job: Delivery, redis_client: redis.Redis, queue: str
) -> None:
    with redis_client.pubsub() as listener:
        listener.subscribe(Keys(queue).control)
        assert listener.get_message(timeout=5.0)["type"] == "subscribe"
        assert broker.cancel("a") == "running"
        assert heard(listener) == [b"cancel a"]


def test_cancelling_an_unknown_job_leaves_nothing_behind(broker: Broker) -> None:
    assert broker.cancel("nobody") is None
    assert broker.job("nobody") == {}


def test_cancelling_an_ended_job_answers_with_its_end(broker: Broker, job: Delivery) -> None:
    broker.finish([end_of(job, "failed")])
    assert broker.cancel("a") == "failed"
    assert "cancel" not in broker.job("a")


def test_a_moved_job_is_cancelled_by_either_name(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    entry = redis_client.xadd(Keys(queue).lane("normal"), {"j": b"{}"}).decode()
    [job] = broker.fetch(1)
    adopted = broker.adopt(job, "named")
    assert adopted is not None
    assert broker.cancel(entry) == "running"
    assert broker.renew([adopted]).cancelled == {"named"}
