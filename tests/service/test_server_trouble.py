"""A server that is slow, silent, gone or forgetful, seen by broker, client and a whole worker: nothing lost, nothing doubled,
no storm.

What a killed server, FLUSHALL and a pause do is in test_worker.py, what single calls do then in test_broker_faults.py, and a
server that answers and refuses in test_server_refusals.py.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from tests.support.jobs import Producer, answer, events
from tests.support.proxy import Proxy
from tests.support.server import brokers, embedded_server
from tests.support.streams import Reader, Streams, Work
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker, WorkerUnderTest, workers
from worker import control, log, lua
from worker.broker import Broker
from worker.client import Client
from worker.connection import _FoundConnection, connect
from worker.embedded import EmbeddedServer
from worker.errors import UnknownJob
from worker.link import Link, LinkDownError
from worker.metrics import Metrics

SLOW_S = 0.02


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """A server that tests may mistreat."""
    with embedded_server() as running:
        yield running


@pytest.fixture(scope="module")
def redis_url(server: EmbeddedServer) -> str:
    return server.url


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(server.port) as running:
        yield running


@pytest.fixture
def behind(proxy: Proxy, queue: str, fake_model: Path) -> Iterator[WorkerMaker]:
    """Makes workers that reach the server through the proxy."""
    with workers(proxy.url, queue, fake_model) as make:
        yield make


@pytest.fixture
def broker_behind(proxy: Proxy, queue: str, redis_client: redis.Redis) -> Iterator[Broker]:
    with brokers(proxy.url, queue) as maker:
        yield maker("behind")


@pytest.fixture
def client(redis_url: str, queue: str) -> Iterator[Client]:
    with Client(redis_url, queue) as made:
        yield made


def sha(name: str, client: redis.Redis) -> bytes:
    """What a call of this script has in its words; the server knows the script from now on."""
    text, known_as = lua.script(name)
    client.script_load(text)
    return known_as.encode()


# ---- replies that never arrive


def test_an_enqueue_whose_reply_is_lost_is_one_entry(
    proxy: Proxy, queue: str, redis_client: redis.Redis, producer: Producer
) -> None:
    proxy.drop_reply(sha("enqueue", redis_client))
    with Client(proxy.url, queue) as client:
        job_id = client.enqueue("w5")
    assert proxy.dropped.is_set()
    assert (producer.entries(), producer.state(job_id)["state"]) == (1, "queued")


def test_a_job_whose_fetch_was_not_heard_of_is_taken_again_after_its_lease(
    proxy: Proxy, behind: WorkerMaker, producer: Producer, redis_client: redis.Redis
) -> None:
    behind("--lease-s", "1")
    proxy.drop_reply(sha("fetch", redis_client), holding=b"job-1")
    result = producer.result(producer.add("job-1", prompt="w5 w6", max_tokens=8))
    assert proxy.dropped.is_set()
    assert (result.state, list(result.choices[0].token_ids)) == ("succeeded", answer("w5 w6", 8))
    assert events(producer.log("job-1")).count("end") == 1


def test_frames_whose_reply_is_lost_are_in_the_log_once(
    proxy: Proxy, behind: WorkerMaker, client: Client, producer: Producer, redis_client: redis.Redis
) -> None:
    behind(delay_s=SLOW_S)
    streams = Streams(client, 4, max_tokens=80)
    streams.wait_for(2)
    for _ in range(5):
        proxy.drop_reply(sha("emit", redis_client), holding=b"ok")
        assert proxy.dropped.wait(10)
    streams.check(producer)


def test_an_end_whose_reply_is_lost_is_one_end(
    proxy: Proxy, behind: WorkerMaker, client: Client, producer: Producer, redis_client: redis.Redis
) -> None:
    worker = behind()
    proxy.drop_reply(sha("finish", redis_client), holding=b"ok")
    streams = Streams(client, 1, max_tokens=8)
    wait_until(lambda: worker.metric("jobs_finished_total", "length,succeeded") == 1, message="an end that the worker knows of")
    assert proxy.dropped.is_set()
    streams.check(producer)
    assert (producer.entries(), worker.metric("jobs_fenced_total", "finish")) == (0, 0)


def test_a_release_whose_reply_is_lost_gives_one_job_back(
    proxy: Proxy, broker_behind: Broker, other: Broker, redis_client: redis.Redis
) -> None:
    broker_behind.enqueue("a", "normal", b"")
    jobs = broker_behind.fetch(1)
    proxy.drop_reply(sha("release", redis_client))
    with pytest.raises(redis.ConnectionError):
        broker_behind.release(jobs)
    broker_behind.release(jobs)
    [again] = other.fetch(5)
    assert (again.job_id, again.attempt, again.counted_attempts) == ("a", 2, 1)


def test_a_cancel_whose_reply_is_lost_is_answered(proxy: Proxy, queue: str, broker: Broker, redis_client: redis.Redis) -> None:
    broker.enqueue("a", "normal", b"")
    work = Work.claim(broker)
    proxy.drop_reply(sha("cancel", redis_client))
    with Client(proxy.url, queue) as client:
        assert client.cancel("a") == "running"
    work.tokens(1)
    assert (proxy.dropped.is_set(), work.statuses[-1]) == (True, "cancel")


# ---- a server that says nothing


def test_a_worker_is_not_ready_while_the_server_is_silent_and_goes_on_when_it_speaks(
    proxy: Proxy, behind: WorkerMaker, client: Client, producer: Producer
) -> None:
    worker = behind(delay_s=SLOW_S)
    streams = Streams(client, 3, max_tokens=200)
    streams.wait_for(5)
    proxy.silence()
    wait_until(lambda: worker.get("/readyz")[0] == 503, 10.0, "a worker that is not ready")
    assert worker.get("/livez")[0] == 200
    proxy.speak()
    wait_until(lambda: worker.get("/readyz")[0] == 200, 10.0, "a ready worker")
    streams.check(producer)
    assert len(worker.logged("server_unusable")) < 20


def test_a_stream_goes_on_when_a_silent_server_speaks(proxy: Proxy, queue: str, broker: Broker) -> None:
    with Client(f"{proxy.url}?socket_timeout=0.5", queue) as client:
        reader = Reader(client, client.enqueue("Hi"))
        work = Work.claim(broker)
        work.tokens(2)
        reader.wait_for(2)
        proxy.silence()
        work.tokens(2)
        before = len(proxy.accepted_at)
        wait_until(lambda: len(proxy.accepted_at) > before + 1, message="connections made anew")
        proxy.speak()
        result = work.finish()
        assert reader.join().holds(result)


def test_a_listener_that_gets_no_answer_listens_anew(
    proxy: Proxy, broker_behind: Broker, broker: Broker, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "SILENCE_S", 0.3)
    heard: list[str] = []
    inflight = SimpleNamespace(cancel=heard.append)
    listening = control.Control(broker_behind, Link("control", Metrics(), log.Throttle()), inflight, bytes)  # type: ignore[arg-type]
    listening.start()
    try:
        channel = broker.keys.control
        wait_until(lambda: redis_client.pubsub_numsub(channel)[0][1] == 1, message="a listener")
        before = len(proxy.accepted_at)
        proxy.silence()
        wait_until(lambda: len(proxy.accepted_at) > before, message="another connection")
        proxy.speak()
        broker.enqueue("a", "normal", b"")
        wait_until(lambda: broker.cancel("a") and "a" in heard, message="a cancel that is heard of")
    finally:
        listening.stop()


def test_an_idle_worker_waits_longer_than_the_socket_timeout_without_an_error(
    redis_url: str, queue: str, fake_model: Path
) -> None:
    with workers(f"{redis_url}?socket_timeout=0.5", queue, fake_model) as make:
        worker = make()
        time.sleep(3)  # what is measured is the passing of time
        assert not worker.logged("server_unusable")
        assert worker.metric("redis_errors_total", "timeout") == 0


# ---- a slow server


def test_the_engine_is_as_fast_with_a_server_that_is_50_ms_away(
    proxy: Proxy, behind: WorkerMaker, client: Client, producer: Producer
) -> None:
    worker = behind(delay_s=0.01)
    near_s = seconds_of_150_tokens(worker, client)
    proxy.delay_s = 0.05
    far_s = seconds_of_150_tokens(worker, client)
    assert far_s < 2 * near_s + 1  # waiting for the server at each token would take 15 s
    wait_until(lambda: producer.entries() == 0, message="ends")
    assert not worker.logged("server_unusable")


def seconds_of_150_tokens(worker: WorkerUnderTest, client: Client) -> float:
    before = worker.metric("generated_tokens_total")
    client.enqueue("w5 w6", max_tokens=160, temperature=0)
    wait_until(lambda: worker.metric("generated_tokens_total") >= before + 10, message="tokens")
    started = time.monotonic()
    wait_until(lambda: worker.metric("generated_tokens_total") == before + 160, message="all tokens")
    return time.monotonic() - started


# ---- a server that forgets


def test_scripts_may_be_forgotten_at_any_moment(
    make_worker: WorkerMaker, client: Client, producer: Producer, redis_client: redis.Redis
) -> None:
    make_worker(delay_s=0.01)
    streams = Streams(client, 8, max_tokens=100)
    for num_tokens in range(1, 96, 5):
        streams.wait_for(num_tokens)
        redis_client.script_flush()
    streams.check(producer)


def test_a_group_that_was_destroyed_costs_neither_the_running_job_nor_the_next(
    make_worker: WorkerMaker, client: Client, producer: Producer, redis_client: redis.Redis
) -> None:
    worker = make_worker(delay_s=SLOW_S)
    streams = Streams(client, 2, max_tokens=60)
    streams.wait_for(5)
    redis_client.xgroup_destroy(producer.keys.lane("normal"), "workers")
    streams.check(producer)
    assert client.result(client.enqueue("w5", max_tokens=2)).state == "succeeded"
    assert worker.get("/readyz")[0] == 200


def test_after_flushall_the_reader_is_told_and_the_next_job_is_served(
    make_worker: WorkerMaker, client: Client, redis_client: redis.Redis
) -> None:
    worker = make_worker(delay_s=SLOW_S)
    reader = Streams(client, 1, max_tokens=400).readers["w2 w9"]
    reader.wait_for(3)
    redis_client.flushall()
    with pytest.raises(UnknownJob):
        reader.join()
    assert client.result(client.enqueue("w5", max_tokens=2)).state == "succeeded"
    assert len(worker.lines) < 40


# ---- connections that end


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
def test_connections_may_be_killed_at_any_moment(
    make_worker: WorkerMaker, client: Client, producer: Producer, redis_client: redis.Redis, kind: str
) -> None:
    worker = make_worker(delay_s=SLOW_S)
    streams = Streams(client, 8, max_tokens=100)
    for num_tokens in range(1, 96, 10):
        streams.wait_for(num_tokens)
        redis_client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
    streams.check(producer)
    wait_until(lambda: worker.get("/readyz")[0] == 200, message="a ready worker")


def test_ten_restarts_under_load_cost_no_token(tmp_path: Path, fake_model: Path) -> None:
    with (
        embedded_server(data_dir=tmp_path / "data", options={"appendfsync": "always"}) as server,
        workers(server.url, "q", fake_model) as make,
        connect(server.url) as own,
        Client(server.url, "q") as client,
    ):
        worker = make(delay_s=SLOW_S)
        streams = Streams(client, 4, max_tokens=400)
        for k in range(10):
            streams.wait_for(2 + 10 * k)
            server.kill()
            server.start()
        streams.check(Producer(own, "q"))
        wait_until(lambda: worker.get("/readyz")[0] == 200, message="a ready worker")
        assert len(worker.logged("server_unusable")) < 60


def test_a_slow_subscriber_that_the_server_drops_reads_the_log(
    client: Client, broker: Broker, redis_client: redis.Redis
) -> None:
    limit = redis_client.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
    redis_client.config_set("client-output-buffer-limit", "pubsub 1mb 0 0")
    try:
        stream = client.stream(client.enqueue("Hi"))
        work = Work.claim(broker)
        work.tokens(30_000)
        deltas = iter(stream)
        ids = list(next(deltas).token_ids)
        work.tokens(1)
        ids += next(deltas).token_ids  # live now
        [first] = [frame for frame in broker.read_log(stream.job_id) if len(frame) > 100_000]
        channel = broker.keys.channel(stream.job_id)
        wait_until(lambda: redis_client.publish(channel, first) == 0, message="a reader that is dropped")
        work.tokens(5)
        result = work.finish()
        for delta in deltas:
            ids += delta.token_ids
        assert (tuple(ids), stream.result) == (result.choices[0].token_ids, result)
    finally:
        redis_client.config_set("client-output-buffer-limit", limit)


def test_a_hundred_reconnects_leave_no_connection_behind(redis_url: str, queue: str, redis_client: redis.Redis) -> None:
    def kill_and_call(function: Callable[[], object]) -> None:
        redis_client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        wait_until(lambda: answers(function), message="an answer")

    with connect(f"{redis_url}?client_name={queue}") as own, brokers(f"{redis_url}?client_name={queue}", queue) as maker:
        broker = maker()
        for _ in range(50):
            kill_and_call(lambda: broker.fetch(1))
            kill_and_call(lambda: broker.wait_for_entry(0.001))
            kill_and_call(own.ping)
        assert sum(row["name"] == queue for row in redis_client.client_list()) <= 3


def answers(function: Callable[[], object]) -> bool:
    try:
        function()
    except redis.ConnectionError:
        return False
    return True


def test_callers_come_back_one_after_the_other(proxy: Proxy) -> None:
    came: dict[str, list[float]] = {"link": [], "client": []}
    clients = [(kind, connect(proxy.url)) for kind in came for _ in range(20)]
    proxy.refuse()
    threads = [threading.Thread(target=come_back, args=(kind, client, came[kind])) for kind, client in clients]
    for thread in threads:
        thread.start()
    time.sleep(5)  # how long the server is down
    proxy.accept()
    for thread in threads:
        thread.join(10)
    for _, client in clients:
        client.close()
    for times in came.values():
        assert len(times) == 20
        assert max(times) - min(times) > 0.5
        assert max(sum(at <= other < at + 0.2 for other in times) for at in times) <= 10


def come_back(kind: str, client: redis.Redis, came: list[float]) -> None:
    """A worker's link, or a client that was connected before, calls until it is answered."""
    if kind == "client":
        library = Client(client, "q")
        library._was_reached = True
        library._call(client.ping)
    else:
        link = Link("test", Metrics(), log.Throttle())
        while not pings(link, client):
            link.pause()
    came.append(time.monotonic())


def pings(link: Link, client: redis.Redis) -> bool:
    try:
        return link.call("ping", client.ping)
    except LinkDownError:
        return False


def test_a_server_that_is_down_costs_few_lines_and_little_time(proxy: Proxy, behind: WorkerMaker, client: Client) -> None:
    worker = behind()
    proxy.refuse()
    wait_until(lambda: worker.get("/readyz")[0] == 503, message="a worker that notices")
    before, lines = worker.process.cpu_times(), len(worker.lines)
    time.sleep(3)  # what is measured is the passing of time
    after = worker.process.cpu_times()
    assert len(worker.lines) - lines < 20
    assert after.user + after.system - before.user - before.system < 0.3
    proxy.accept()
    assert client.result(client.enqueue("w5", max_tokens=2), timeout_s=20).state == "succeeded"


# ---- a call that is interrupted


@pytest.mark.parametrize("make", ["plain", "found"])
def test_an_interrupted_call_does_not_shift_later_replies(proxy: Proxy, redis_client: redis.Redis, make: str) -> None:
    redis_client.set("slotmill:a", b"a", ex=60)
    redis_client.set("slotmill:b", b"b", ex=60)
    found = redis.ConnectionPool(connection_class=_FoundConnection, find=lambda: ("127.0.0.1", proxy.port), protocol=2)
    with connect(proxy.url) if make == "plain" else redis.Redis.from_pool(found) as client:
        assert client.get("slotmill:a") == b"a"
        proxy.delay_s = 0.2
        with interrupted(0.1), pytest.raises(KeyboardInterrupt):
            client.get("slotmill:a")
        assert client.get("slotmill:b") == b"b"
        with interrupted(0.1), pytest.raises(KeyboardInterrupt), client.pipeline(transaction=False) as pipe:
            pipe.get("slotmill:a").get("slotmill:a").execute()
        assert client.get("slotmill:b") == b"b"


@contextmanager
def interrupted(after_s: float) -> Iterator[None]:
    """As Ctrl-C would, after a moment."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
