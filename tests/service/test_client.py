"""The client library on a real server, with the worker's part played by hand."""

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import redis
from redis.client import PubSub

from tests.support.server import BrokerMaker, brokers, drop_queue, embedded_server, wait_written
from tests.support.streams import Listens, Reader, Work, ids
from tests.support.wait import wait_until
from worker import broker as broker_module
from worker.broker import Broker, EnqueueReply
from worker.client import Client, Delta
from worker.connection import connect
from worker.embedded import EmbeddedServer
from worker.errors import (
    InvalidJob,
    InvalidOption,
    QueueClosed,
    QueueFull,
    ServerUnavailable,
    UnknownJob,
    WaitTimeout,
)
from worker.frames import ControlFrame, Result
from worker.keys import Keys
from worker.wire import decode_job

SECRET = "s3cret-pa55"


@pytest.fixture
def client(redis_url: str, queue: str) -> Iterator[Client]:
    with Client(redis_url, queue) as made:
        yield made


# Enqueue


def test_an_enqueued_job_reaches_a_worker_as_it_was_meant(client: Client, broker: Broker) -> None:
    job_id = client.enqueue("Hi", priority="high", max_tokens=3, stop="\n", metadata={"a": 1}, x_mine="ignored")
    [delivery] = broker.fetch(1)
    assert delivery.fields is not None
    job = decode_job(delivery.fields, lane=delivery.lane)
    assert (job.id, job.prompt, job.priority, job.max_tokens) == (job_id, "Hi", "high", 3)
    assert (job.stop, job.metadata, delivery.job_id) == (("\n",), {"a": 1}, job_id)


def test_messages_and_tuples_are_taken(client: Client, broker: Broker) -> None:
    client.enqueue(messages=({"role": "user", "content": "Hi"},), stop=("a", "b"), stop_token_ids=(1,))
    [delivery] = broker.fetch(1)
    assert decode_job(delivery.fields or {}, lane="normal").messages == ({"role": "user", "content": "Hi"},)


@pytest.mark.parametrize("wrong", [{"max_tokens": -3}, {"temprature": 1}, {"id": "a b"}, {"priority": "urgent"}, {"v": 2}])
def test_a_wrong_job_is_refused_before_it_is_queued(client: Client, broker: Broker, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidJob):
        client.enqueue("Hi", **wrong)  # type: ignore[arg-type]
    assert broker.fetch(1) == []


def test_the_same_id_or_idempotency_key_again_is_the_same_job(client: Client, broker: Broker) -> None:
    assert [client.enqueue("Hi", id="k") for _ in range(2)] == ["k", "k"]
    first = client.enqueue("Hi", idempotency_key="once")
    assert client.enqueue("Hi", idempotency_key="once") == first
    assert len(broker.fetch(9)) == 2


def test_a_full_queue_is_told_with_when_to_come_again(client: Client) -> None:
    client.enqueue("Hi", max_queued=1)
    with pytest.raises(
        QueueFull, match="full: the jobs that have not ended reach max_queued, 1, or the queue's own limit; come again in"
    ) as full:
        client.enqueue("Hi", max_queued=1)
    assert full.value.retry_after_s > 0


def test_a_closed_queue_is_told_from_a_full_one(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broker, "enqueue", lambda *_args, **_how: EnqueueReply("closed", "k"))
    with pytest.raises(
        QueueClosed, match=r"closed: it takes no jobs while it is drained; `worker queue resume --queue \S+` reopens it"
    ) as full:
        client.enqueue("Hi")
    assert full.value.retry_after_s > 0


def test_the_limit_that_a_queue_has_by_itself_is_told_as_such(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Broker, "enqueue", lambda *_args, **_how: EnqueueReply("full", "k", 2.5))
    with pytest.raises(QueueFull, match=r"reach the queue's own limit; come again in 2\.5 s"):
        client.enqueue("Hi")


def test_a_delay_reaches_the_server(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(Broker, "enqueue", lambda *_, **how: given.append(how["delay_s"]) or EnqueueReply("delayed", "k"))
    assert [client.enqueue("Hi"), client.enqueue("Hi", delay_s=30 * 86_400)] == ["k", "k"]
    assert given == [0.0, 30 * 86_400]


@pytest.mark.parametrize("delay_s", [-1, 30 * 86_400 + 1, float("nan"), float("inf"), "1", True, None], ids=repr)
def test_a_delay_that_cannot_be_kept_is_refused(client: Client, delay_s: object) -> None:
    with pytest.raises(InvalidJob, match=r"^delay_s: "):
        client.enqueue("Hi", delay_s=delay_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["", "x" * 513, "\ud800"], ids=["empty", "long", "surrogate"])
def test_an_idempotency_key_that_cannot_name_a_key_is_refused(client: Client, key: str) -> None:
    with pytest.raises(InvalidJob, match="idempotency_key"):
        client.enqueue("Hi", idempotency_key=key)


# Stream


def test_a_stream_gives_every_token_once_in_order_and_then_the_result(client: Client, broker: Broker, listens: Listens) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi"))
    listens(job_id)
    work = Work.claim(broker)
    for _ in range(5):
        work.tokens(3)
    result = work.finish()
    assert reader.join().holds(result)
    assert len(reader.deltas) == 6  # the last one brings the finish reason
    assert reader.deltas[-1].finish_reason == "stop"


@pytest.mark.usefixtures("unchecked")
def test_a_late_stream_begins_with_what_the_log_holds(client: Client, broker: Broker, listens: Listens) -> None:
    job_id = client.enqueue("Hi")
    work = Work.claim(broker)
    for _ in range(600):  # more than a page
        work.tokens()
    reader = Reader(client, job_id)
    reader.wait_for(600)
    listens(job_id)
    work.tokens(2, "length")
    result = work.finish(reason="length")
    assert reader.join().holds(result)


def test_the_stream_of_an_ended_job_is_whole(client: Client, broker: Broker) -> None:
    job_id = client.enqueue("Hi")
    work = Work.claim(broker)
    work.tokens(4)
    result = work.finish()
    assert Reader(client, job_id).join().holds(result)


def test_streams_that_begin_at_any_moment_hold_the_same(client: Client, broker: Broker) -> None:
    job_id = client.enqueue("Hi")
    work = Work.claim(broker)
    readers = []
    for k in range(300):
        work.tokens()
        if k % 30 == 0:
            readers.append(Reader(client, job_id))
    result = work.finish()
    assert all(reader.join().holds(result) for reader in readers)


@pytest.mark.usefixtures("unchecked")
def test_a_frame_that_was_not_heard_is_read_from_the_log_when_the_next_one_comes(
    client: Client, broker: Broker, listens: Listens
) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi"))
    listens(job_id)
    work = Work.claim(broker)
    work.tokens(2)
    reader.wait_for(2)
    work.tokens(2, publish=False)
    work.tokens(2)
    reader.wait_for(6)
    assert reader.ids == list(ids(0, 6))
    work.finish()
    reader.join()


def test_a_frame_that_was_not_heard_is_read_after_a_silence(client: Client, broker: Broker, listens: Listens) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi"))
    listens(job_id)
    work = Work.claim(broker)
    work.tokens(2, publish=False)
    reader.wait_for(2)
    work.finish()
    reader.join()


@pytest.mark.parametrize("retries", [False, True], ids=["ours", "redis-py"])
def test_a_killed_connection_costs_no_token_and_repeats_none(
    redis_url: str, queue: str, redis_client: redis.Redis, broker: Broker, listens: Listens, retries: bool
) -> None:
    with redis.Redis.from_url(redis_url) if retries else connect(redis_url) as own, Client(own, queue) as client:
        reader = Reader(client, job_id := client.enqueue("Hi"))
        listens(job_id)
        work = Work.claim(broker)
        for k in range(200):
            work.tokens()
            if k % 20 == 10:
                redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        result = work.finish()
        assert reader.join().holds(result)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("retries", [False, True], ids=["ours", "redis-py"])
def test_what_was_said_while_disconnected_is_read_at_once(
    redis_url: str, queue: str, redis_client: redis.Redis, broker: Broker, listens: Listens, retries: bool
) -> None:
    with redis.Redis.from_url(redis_url) if retries else connect(redis_url) as own, Client(own, queue) as client:
        reader = Reader(client, job_id := client.enqueue("Hi"))
        listens(job_id)
        work = Work.claim(broker)
        work.tokens(2, publish=False)
        redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        reader.wait_for(2)
        work.finish()
        reader.join()


@pytest.mark.usefixtures("unchecked")
def test_what_was_said_while_subscribing_is_read_at_once(
    client: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = client.enqueue("Hi")
    work, subscribe = Work.claim(broker), PubSub.subscribe

    def late(self: PubSub, *channels: str) -> object:
        work.tokens(2)
        return subscribe(self, *channels)

    monkeypatch.setattr(PubSub, "subscribe", late)
    reader = Reader(client, job_id)
    reader.wait_for(2)
    work.finish()
    reader.join()


def test_a_lost_end_is_found_after_a_silence(
    client: Client, broker: Broker, listens: Listens, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi"))
    listens(job_id)
    work = Work.claim(broker)
    work.tokens(3)
    reader.wait_for(3)
    get_message = PubSub.get_message

    def hears_nothing(self: PubSub, *args: object, **options: object) -> object:
        message = get_message(self, *args, **options)  # type: ignore[arg-type]
        return message if message and message["type"] == "subscribe" else None

    monkeypatch.setattr(PubSub, "get_message", hears_nothing)
    work.tokens(2)
    result = work.finish()
    assert reader.join().holds(result)


def test_two_clients_follow_one_job(client: Client, redis_url: str, queue: str, broker: Broker, listens: Listens) -> None:
    job_id = client.enqueue("Hi")
    with Client(redis_url, queue) as second:
        readers = [Reader(client, job_id), Reader(second, job_id)]
        listens(job_id, 2)
        work = Work.claim(broker)
        work.tokens(4)
        result = work.finish()
        assert all(reader.join().holds(result) for reader in readers)


def test_a_stream_goes_on_with_the_next_attempt(client: Client, broker: Broker, other: Broker, listens: Listens) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi"))
    listens(job_id)
    first = Work.claim(broker)
    first.tokens(3)
    broker.release([first.delivery])
    second = Work.claim(other)
    second.tokens(2)
    result = second.finish()
    assert second.delivery.attempt == 2
    assert reader.join().holds(result)


def test_a_restart_takes_back_what_it_voids(client: Client, broker: Broker, listens: Listens) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi"))
    listens(job_id)
    work = Work.claim(broker)
    work.tokens(5)
    reader.wait_for(5)
    work.emit(ControlFrame(work.delivery.attempt, "restart", index=2, offset=2), 1)  # a log entry of its own
    wait_until(lambda: len(reader.ids) == 2, message="taken back")
    assert reader.deltas[-1] == Delta(0, 2, offset=2, is_restart=True)
    work.finish(choices=False)
    reader.join()


def test_a_job_without_a_stream_gives_its_tokens_at_the_end(client: Client, broker: Broker, listens: Listens) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi", stream=False))
    listens(job_id)
    work = Work.claim(broker)
    work.streams = False
    work.tokens(7)
    result = work.finish()
    assert reader.join().holds(result)


def test_a_failed_job_ends_its_stream(client: Client, broker: Broker, listens: Listens) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi"))
    listens(job_id)
    Work.claim(broker).finish("failed", choices=False)
    reader.join()
    assert reader.stream.result is not None
    assert (reader.deltas, reader.stream.result.state) == ([], "failed")


def test_a_bare_entry_is_followed_by_its_entry_id(
    client: Client, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    entry = redis_client.xadd(Keys(queue).lane("low"), {"j": '{"prompt":"Hello"}'}).decode()
    assert client.state(entry) == "queued"
    reader = Reader(client, entry)
    work = Work.claim(broker)
    work.tokens(3)
    assert client.state(entry) == "running"
    result = work.finish()
    assert reader.join().holds(result)


def test_an_entry_that_no_worker_has_seen_is_known_by_its_id(
    client: Client, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    for lane, job_id in (("high", "other"), ("low", "my-1")):
        redis_client.xadd(Keys(queue).lane(lane), {"id": job_id, "j": '{"prompt":"Hello"}'})
    assert client.state("my-1") == "queued"
    with pytest.raises(WaitTimeout):
        list(client.stream("my-1", timeout_s=0))
    assert [(job.job_id, job.attempt, job.source) for job in broker.fetch(5)] == [("other", 1, "new"), ("my-1", 1, "new")]


@pytest.mark.parametrize("named", [True, False])
def test_an_entry_that_no_worker_has_seen_can_be_cancelled(
    client: Client, broker: Broker, redis_client: redis.Redis, queue: str, named: bool
) -> None:
    fields = {"j": '{"prompt":"Hello"}'} | ({"id": "my-1"} if named else {})
    entry = redis_client.xadd(Keys(queue).lane("low"), fields).decode()
    assert client.cancel("my-1" if named else entry) == "queued"
    assert [job.ending for job in broker.fetch(1)] == ["cancelled"]


def test_the_look_for_an_entry_that_no_worker_has_seen_is_bounded(
    client: Client, redis_client: redis.Redis, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "LOOK_ENTRIES", 30)
    for number in range(50):
        redis_client.xadd(Keys(queue).lane("normal"), {"id": f"j{number}", "m": b""})
    assert client.state("j5") == "queued"
    with pytest.raises(UnknownJob):
        client.state("j45")


@pytest.mark.parametrize(
    "field",
    [
        {"x_a": object()},
        {"x_a": {1, 2}},
        {"x_a": 2**70},
        {"x_a": "\ud800"},
        {"x_a": float("nan")},
        {"x_\ud800": 1},
        {"x_a": {1: 2}},
    ],
    ids=itertools.count(),
)
def test_a_field_of_the_producers_own_that_cannot_be_written_is_refused(client: Client, field: dict[str, object]) -> None:
    with pytest.raises(InvalidJob, match=r"^x_"):
        client.enqueue("Hi", **field)


def test_a_field_that_holds_itself_is_refused(client: Client) -> None:
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(InvalidJob, match="x_a: list of 1: nested deeper"):
        client.enqueue("Hi", x_a=circle)


@pytest.mark.parametrize("messages", ["abc", [5], 5, {"role": "user"}, [[1]], b"ab"], ids=repr)
def test_messages_that_are_none_are_refused(client: Client, messages: object) -> None:
    with pytest.raises(InvalidJob, match=r"^messages: "):
        client.enqueue(messages=messages)


@pytest.mark.parametrize(
    "bound",
    [{"max_queued": "x"}, {"max_queued": -1}, {"max_queued": 1.5}, {"idempotency_key": 5}, {"idempotency_key": b"k"}],
    ids=repr,
)
def test_a_bound_of_another_type_is_refused(client: Client, bound: dict[str, object]) -> None:
    with pytest.raises(InvalidJob, match=f"^{next(iter(bound))}: "):
        client.enqueue("Hi", **bound)


def test_a_bare_entry_is_followed_to_the_id_that_its_body_names(
    client: Client, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    entry = redis_client.xadd(Keys(queue).lane("low"), {"j": '{"prompt":"Hello","id":"mine"}'}).decode()
    reader = Reader(client, entry)
    [delivery] = wait_until(lambda: broker.fetch(1))
    adopted = broker.adopt(delivery, "mine")
    assert adopted is not None
    work = Work(broker, adopted)
    work.tokens(3)
    result = work.finish()
    assert reader.join().holds(result)


def test_leaving_a_stream_early_leaves_no_subscription(client: Client, broker: Broker, listens: Listens) -> None:
    job_id = client.enqueue("Hi")
    work = Work.claim(broker)
    work.tokens(2)
    deltas = iter(client.stream(job_id))
    next(deltas)
    deltas.close()  # type: ignore[attr-defined]
    listens(job_id, 0)
    work.finish()


def test_streams_leave_no_connection_behind(client: Client, broker: Broker, redis_client: redis.Redis) -> None:
    def run_one() -> None:
        reader = Reader(client, client.enqueue("Hi"))
        work = Work.claim(broker)
        work.tokens(2)
        work.finish()
        reader.join()

    run_one()
    before = len(redis_client.client_list())
    for _ in range(20):
        run_one()
    assert len(redis_client.client_list()) <= before + 1


# Result, cancel, state


def test_a_result_is_waited_for(client: Client, broker: Broker, listens: Listens) -> None:
    job_id = client.enqueue("Hi")
    results: list[Result] = []
    waiting = threading.Thread(target=lambda: results.append(client.result(job_id, 30)))
    waiting.start()
    listens(job_id)
    work = Work.claim(broker)
    work.tokens(2)
    result = work.finish()
    waiting.join(30)
    assert (results, client.result(job_id), client.state(job_id)) == ([result], result, "succeeded")


@pytest.mark.parametrize("wait", [lambda c, i: c.result(i, 0.2), lambda c, i: list(c.stream(i, 0.2))], ids=["result", "stream"])
def test_a_wait_ends_in_time(client: Client, wait: Callable[[Client, str], object]) -> None:
    job_id = client.enqueue("Hi")
    with pytest.raises(WaitTimeout, match=f"job {job_id}: has not ended in the time given"):
        wait(client, job_id)


@pytest.mark.parametrize("state", ["queued", "delayed", "running"])
def test_a_wait_that_ends_too_early_tells_in_what_state_the_job_is(client: Client, broker: Broker, state: str) -> None:
    stream = client.stream(client.enqueue("Hi", delay_s=60 if state == "delayed" else 0), 0.2)
    reader = iter(stream)
    if state == "running":
        Work.claim(broker).tokens(1)
        next(reader)
    with pytest.raises(
        WaitTimeout, match="it goes on" if state == "running" else f"it is {state}, and `worker queue stats`"
    ) as told:
        next(reader)
    assert told.value.state == state


def test_a_delayed_job_is_followed_to_its_end(
    client: Client, broker: Broker, redis_client: redis.Redis, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.client.CHECK_S", 0.02)
    job_id, states = client.enqueue("Hi"), []
    redis_client.hset(Keys(queue).job(job_id), "state", "delayed")

    def on_silence(state: str | None) -> None:
        states.append(state)
        redis_client.hset(Keys(queue).job(job_id), "state", "queued")
        if len(states) == 1:
            Work.claim(broker).finish()

    assert client.state(job_id) == "delayed"
    assert client.result(job_id, 10, on_silence=on_silence).state == "succeeded"
    assert states == ["delayed"]


def test_a_silence_is_told_with_the_jobs_state(client: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.client.CHECK_S", 0.02)
    job_id, states = client.enqueue("Hi"), []

    def on_silence(state: str | None) -> None:
        states.append(state)
        if len(states) == 1:
            Work.claim(broker)

    with pytest.raises(WaitTimeout):
        client.result(job_id, 0.3, on_silence=on_silence)
    assert states[0] == "queued"
    assert set(states[1:]) == {"running"}


def test_a_job_is_open_until_it_has_ended(client: Client, broker: Broker) -> None:
    first, second = client.enqueue("Hi", id="a"), client.enqueue("Hi", id="b")
    Work.claim(broker).finish()
    assert broker.still_open([first, second, "nobody"]) == [second, "nobody"]


def test_a_queue_has_a_worker_once_one_says_so(broker: Broker) -> None:
    assert not broker.has_worker()
    broker.heartbeat({"state": "serving"})
    assert broker.has_worker()


def test_a_running_job_is_cancelled(client: Client, broker: Broker, listens: Listens) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi"))
    listens(job_id)
    work = Work.claim(broker)
    work.tokens(2)
    assert client.cancel(job_id) == "running"
    work.tokens(1)
    assert work.statuses[-1] == "cancel"
    result = work.finish("cancelled", "cancelled")
    assert reader.join().holds(result)
    assert (reader.deltas[-1].finish_reason, client.state(job_id), client.cancel(job_id)) == ("cancelled",) * 3


def test_a_queued_job_is_cancelled(client: Client, broker: Broker) -> None:
    job_id = client.enqueue("Hi")
    assert client.cancel(job_id) == "queued"
    assert broker.fetch(1)[0].ending == "cancelled"


@pytest.mark.parametrize("job_id", ["nobody", "1700000000000-0", "\ud800"], ids=["name", "entry", "surrogate"])
@pytest.mark.parametrize(
    "ask",
    [Client.state, Client.cancel, Client.result, lambda client, job_id: list(client.stream(job_id))],
    ids=["state", "cancel", "result", "stream"],
)
def test_a_job_that_never_was_is_unknown(client: Client, ask: Callable[[Client, str], object], job_id: str) -> None:
    with pytest.raises(UnknownJob):
        ask(client, job_id)


def test_a_stream_learns_that_its_job_is_gone(
    client: Client, broker: Broker, redis_client: redis.Redis, queue: str, listens: Listens
) -> None:
    reader = Reader(client, job_id := client.enqueue("Hi"))
    listens(job_id)
    Work.claim(broker).tokens(2)
    reader.wait_for(2)
    drop_queue(redis_client, queue)
    with pytest.raises(UnknownJob, match="it never was, or its result has expired"):
        reader.join()


def test_an_ended_job_whose_result_has_expired_is_unknown(
    client: Client, broker: Broker, redis_client: redis.Redis, queue: str
) -> None:
    job_id = client.enqueue("Hi")
    Work.claim(broker).finish()
    redis_client.delete(Keys(queue).result(job_id))
    with pytest.raises(UnknownJob):
        client.result(job_id)


# Servers


def test_a_server_that_was_never_there_is_reported_at_once_without_secrets() -> None:
    with Client(f"redis://user:{SECRET}@127.0.0.1:1/0", patience_s=60) as client:
        for ask in (lambda: client.enqueue("Hi"), lambda: list(client.stream("k")), lambda: client.result("k")):
            with pytest.raises(ServerUnavailable, match=r"redis server 127\.0\.0\.1:1: .*refused") as refused:
                ask()
            assert SECRET not in str(refused.value)
            assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        "http://u:{}@h",
        "redis://u:{}@h:port/0",
        "redis://u:{}@h?x=1",
        "nonsense",
        "redis://[::1/0",
        "redis://u:{}@h:99999/0",
        "redis://:{}/x@h:6379/0",
        "redis://u:{}@h/abc",
        "redis://u:{}@h/-1",
        "redis://u:{}@h?db=-1",
        "redis://u:{}@h?socket_timeout=abc",
        "redis://u:{}@h?socket_timeout=nan",
        "redis://u:{}@h?socket_timeout=0",
        "redis://u:{}@h?decode_responses=1",
        "redis://u:{}@h?protocol=3",
        "redis://u:{}@h?retry=1",
        "redis://u:{}@h?port=7",
        "unix://",
    ],
)
def test_an_url_that_cannot_be_read_is_refused_without_secrets(url: str) -> None:
    with pytest.raises(InvalidOption, match="redis URL: cannot be read; write redis://") as refused:
        Client(url.format(SECRET))
    assert SECRET not in str(refused.value)


def test_a_wrong_password_is_not_tried_for_long(redis_client: redis.Redis, redis_url: str) -> None:
    redis_client.acl_setuser("locked", enabled=True, passwords=[f"+{SECRET}"], keys=["*"], commands=["+@all"])
    try:
        url = redis_url.replace("redis://", "redis://locked:wrong@")
        with Client(url, patience_s=60) as client, pytest.raises(ServerUnavailable, match="invalid username-password"):
            client.state("k")
    finally:
        redis_client.acl_deluser("locked")


def test_a_unix_socket_works_as_well(server: EmbeddedServer, queue: str, broker: Broker) -> None:
    with Client(f"unix://{server.socket_path}", queue) as client:
        assert client.state(client.enqueue("Hi")) == "queued"


def test_a_client_that_decodes_replies_is_refused(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as own, pytest.raises(ValueError, match="decode_responses"):
        Client(own)


@pytest.fixture
def fragile() -> Iterator[tuple[EmbeddedServer, BrokerMaker]]:
    with embedded_server() as server, brokers(server.url, "q") as maker:
        yield server, maker


def test_a_stream_survives_a_killed_server(fragile: tuple[EmbeddedServer, BrokerMaker]) -> None:
    server, make_broker = fragile
    broker = make_broker()
    with Client(server.url, "q") as client, connect(server.url) as plain:
        reader = Reader(client, client.enqueue("Hi"))
        work = Work.claim(broker)
        work.tokens(3)
        reader.wait_for(3)
        wait_written(plain)
        server.kill()
        server.start()
        work.tokens(2)
        result = work.finish()
        assert reader.join().holds(result)


def test_a_server_that_stays_away_ends_the_stream(fragile: tuple[EmbeddedServer, BrokerMaker]) -> None:
    server, make_broker = fragile
    with Client(server.url, "q", patience_s=0.3) as client:
        reader = Reader(client, client.enqueue("Hi"))
        Work.claim(make_broker()).tokens(1)
        reader.wait_for(1)
        server.kill()
        with pytest.raises(ServerUnavailable):
            reader.join()


def test_an_enqueue_waits_for_a_server_that_is_full_for_now(fragile: tuple[EmbeddedServer, BrokerMaker]) -> None:
    server, _ = fragile
    with Client(server.url, "q") as client, connect(server.url) as plain:
        plain.config_set("maxmemory", 1)
        done: list[str] = []
        putting = threading.Thread(target=lambda: done.append(client.enqueue("Hi", id="k")))
        putting.start()
        wait_until(lambda: plain.info("errorstats").get("errorstat_OOM", {}).get("count", 0) >= 2, message="refused twice")
        plain.config_set("maxmemory", 0)
        putting.join(10)
        assert (done, client.state("k")) == (["k"], "queued")


def test_a_wait_of_no_number_of_seconds_is_over_at_once(client: Client) -> None:
    with pytest.raises(WaitTimeout):
        client.result(client.enqueue("Hi"), float("nan"))


@pytest.mark.parametrize("job_id", [None, 5, b"x", ["x"], "x" * 100_000], ids=["None", "int", "bytes", "list", "long"])
def test_what_is_no_id_is_an_unknown_job_in_few_words(client: Client, job_id: object) -> None:
    with pytest.raises(UnknownJob) as unknown:
        client.state(job_id)  # type: ignore[arg-type]
    assert len(str(unknown.value)) < 300
