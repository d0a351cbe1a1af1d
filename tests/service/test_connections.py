"""A queue's life by every way to a server: TLS, Sentinels, a cluster, and a user who may do no more than is needed."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.endpoints import ENDPOINTS, MASTER, Endpoint, cluster_node, sentinels, tls_in_front_of
from tests.support.jobs import Producer, answer, events, token_ids
from tests.support.server import BrokerMaker, drop_queue, end_of, frame_to_emit, make_old, take_over
from tests.support.streams import Reader, Work, text
from tests.support.wait import wait_until
from tests.support.worker import workers
from worker import cli, command
from worker.broker import Broker
from worker.client import AsyncClient, Client
from worker.connection import connect, hear, is_cluster
from worker.embedded import EmbeddedServer
from worker.errors import InvalidOption, ServerUnavailable
from worker.keys import Keys

SLOW_S = 0.02


@pytest.fixture(scope="module", params=ENDPOINTS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    with ENDPOINTS[request.param]() as running:
        yield running


@pytest.fixture(scope="module")
def redis_url(endpoint: Endpoint) -> str:
    return endpoint.url


@pytest.fixture
def redis_client(endpoint: Endpoint) -> Iterator[redis.Redis]:
    """May do everything."""
    with connect(endpoint.admin_url) as client:
        client.execute_command("ACL", "LOG", "RESET")
        yield client
        refused = client.execute_command("ACL", "LOG")
        assert not refused, f"commands, keys or channels that the user lacks: {refused}"


@pytest.fixture
def client(redis_url: str, queue: str) -> Iterator[Client]:
    with Client(redis_url, queue) as made:
        yield made


# ---- by every way


def test_a_job_lives_through_all_its_changes(broker: Broker, other: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.heartbeat({"state": "serving"})
    assert broker.enqueue("a", "high", b"body", idempotency_key="k", max_queued=5).status == "queued"
    assert broker.enqueue("b", "high", b"body", idempotency_key="k").job_id == "a"
    [job] = broker.fetch(5)
    assert broker.emit([frame_to_emit(job, 0, 1)])[0].status == "ok"
    assert broker.renew([job]).lost == set()
    broker.release([job])
    [again] = other.fetch(5)
    assert other.emit([frame_to_emit(again, 1, 2)])[0].status == "ok"
    assert other.cancel("a") == "running"
    assert other.renew([again]).cancelled == {"a"}
    assert other.finish([end_of(again, "dead", error="why")]) == ["ok"]
    assert (broker.result("a"), broker.job("a")["state"], len(broker.read_log("a"))) == (b"result", "dead", 3)
    assert (broker.has_worker(), broker.still_open(["a"]), broker.queue_counts()["high"].entries) == (True, [], 0)


def test_a_job_of_a_dead_worker_is_taken_over(broker: Broker, other: Broker, redis_client: redis.Redis, queue: str) -> None:
    broker.enqueue("a", "normal", b"body")
    [job] = broker.fetch(1)
    make_old(redis_client, queue, job)
    [again] = take_over(other)
    assert (again.job_id, again.attempt) == ("a", 2)


def test_a_raw_entry_is_found_cancelled_and_moved_to_its_name(broker: Broker, redis_client: redis.Redis, queue: str) -> None:
    entry = redis_client.xadd(Keys(queue).lane("normal"), {"j": '{"prompt":"x","id":"named"}'}).decode()
    assert (broker.register(entry), broker.cancel(entry)) == ("queued", "queued")
    [job] = broker.fetch(1)
    moved = broker.adopt(job, "named")
    assert moved is not None
    assert broker.finish([end_of(moved, "cancelled")]) == ["ok"]


def test_an_entry_ends_the_wait_for_one(broker: Broker, make_broker: BrokerMaker) -> None:
    broker.fetch(1)
    producer = threading.Timer(0.2, lambda: make_broker("producer").enqueue("a", "normal", b""))
    producer.start()
    broker.wait_for_entry(20.0)
    producer.join()
    assert [job.job_id for job in broker.fetch(1)] == ["a"]


def test_a_listener_hears_of_a_cancel(broker: Broker) -> None:
    broker.enqueue("a", "normal", b"")
    broker.fetch(1)
    listener = broker.listen()
    broker.cancel("a")
    assert hear(listener, 5.0) == ("message", b"cancel a")
    listener.close()


def test_a_stream_is_live_through_a_killed_connection(
    client: Client, broker: Broker, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.client.CHECK_S", 60.0)  # what is not heard is not looked for
    reader = Reader(client, client.enqueue("Hi"))
    work = Work.claim(broker)
    for k in range(60):
        work.tokens()
        if k % 20 == 10:
            redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    reader.wait_for(60)
    result = work.finish()
    assert reader.join().holds(result)


def test_streams_of_an_event_loop_end_one_by_one_and_live_through_a_killed_connection(
    redis_url: str, queue: str, broker: Broker, redis_client: redis.Redis
) -> None:
    async def read(client: AsyncClient, job_id: str) -> str:
        return "".join([part async for part in client.stream(job_id, 30.0).text()])

    async def read_all() -> list[str]:
        async with AsyncClient(redis_url, queue) as client:
            job_ids = [await client.enqueue("Hi") for _ in range(3)]
            readings = {job_id: asyncio.create_task(read(client, job_id)) for job_id in job_ids}
            works = await asyncio.to_thread(lambda: [Work.claim(broker) for _ in readings])
            for work in works:  # the others still listen when one of them leaves
                await asyncio.to_thread(write, work, is_killed=work is works[-1])
                await readings[work.delivery.job_id]
            return [reading.result() for reading in readings.values()]

    def write(work: Work, is_killed: bool) -> None:
        for k in range(20):
            work.tokens()
            if is_killed and k == 10:
                redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        work.finish()

    assert asyncio.run(read_all()) == [text(0, 20)] * 3


def test_a_worker_serves_eight_streams_and_a_cancel(
    redis_url: str, queue: str, fake_model: Path, client: Client, redis_client: redis.Redis
) -> None:
    with workers(redis_url, queue, fake_model) as make:
        worker = make(delay_s=SLOW_S)
        endless = client.enqueue("w8 w8", max_tokens=400, temperature=0, stream=False)
        readers = {i: Reader(client, client.enqueue(f"w{i} w9", max_tokens=40, temperature=0)) for i in range(2, 9)}
        assert {i: reader.join().ids for i, reader in readers.items()} == {i: answer(f"w{i} w9", 40) for i in readers}
        client.cancel(endless)
        assert client.result(endless, timeout_s=10).state == "cancelled"
        assert worker.stop() == 0
        assert not worker.logged("server_unusable")


# ---- Sentinels


def test_streams_go_on_at_the_replica_when_the_master_is_killed(fake_model: Path) -> None:
    with sentinels() as servers, workers(servers.url, "q", fake_model) as make:
        worker = make("--lease-s", "30", delay_s=SLOW_S)
        with connect(servers.master.url) as master, connect(servers.replica.url) as replica, Client(servers.url, "q") as client:
            readers = {i: Reader(client, client.enqueue(f"w{i} w9", max_tokens=300, temperature=0)) for i in range(2, 6)}
            for reader in readers.values():
                reader.wait_for(10)
            assert master.wait(1, 5000) == 1
            servers.master.kill()
            assert {i: reader.join().ids for i, reader in readers.items()} == {i: answer(f"w{i} w9", 300) for i in readers}
            producer = Producer(replica, "q")
            for reader in readers.values():
                log = producer.log(reader.stream.job_id)
                assert token_ids(log) == reader.ids
                assert events(log).count("end") == 1
            assert replica.xlen(producer.keys.done) == len(readers)
        wait_until(lambda: worker.get("/readyz")[0] == 200, message="a ready worker")
        assert len(worker.logged("server_unusable")) < 20


def test_a_master_that_was_demoted_is_left_at_the_first_refusal() -> None:
    with sentinels(patience_s=60) as servers, connect(servers.url) as client, connect(servers.master.url) as master:
        client.set("slotmill:a", b"1")
        with connect(f"redis://127.0.0.1:{servers.port}") as sentinel:
            wait_until(lambda: fails_over(sentinel), message="a replica that may be promoted")
            ask = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
            wait_until(lambda: int(sentinel.execute_command(*ask)[1]) == servers.replica.port, message="another master")
        master.replicaof("127.0.0.1", servers.replica.port)

        def writes() -> bool:
            try:
                return bool(client.set("slotmill:a", b"2"))
            except redis.ConnectionError:
                return False

        wait_until(writes, message="a write to the new master")
        with connect(servers.replica.url) as replica:
            assert replica.get("slotmill:a") == b"2"


def fails_over(sentinel: redis.Redis) -> bool:
    try:
        return bool(sentinel.execute_command("SENTINEL", "FAILOVER", MASTER))
    except redis.ResponseError:  # it does not know the replica well enough yet
        return False


def test_a_master_that_no_sentinel_knows_is_named() -> None:
    with (
        sentinels() as servers,
        Client(servers.url.replace(MASTER, "nobody"), patience_s=0) as client,
        pytest.raises(ServerUnavailable, match="none of them knows where nobody is"),
    ):
        client.state("a")


# ---- cluster


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[tuple[EmbeddedServer, EmbeddedServer]]:
    """A cluster of which each node owns half the slots: queue `q` (slot 11958) lives on the second."""
    with cluster_node() as first, cluster_node() as second, connect(first.url) as one, connect(second.url) as two:
        one.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        two.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        one.execute_command("CLUSTER", "MEET", "127.0.0.1", second.port, second_bus(two))
        for node in (one, two):
            wait_until(lambda node=node: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"), 20.0, "a cluster")
        yield first, second


def second_bus(node: redis.Redis) -> int:
    return int(node.config_get("cluster-port")["cluster-port"])


def test_a_queue_is_reached_at_the_node_that_owns_it_by_any_node(two_nodes: tuple[EmbeddedServer, EmbeddedServer]) -> None:
    first, second = two_nodes
    for port in (first.port, second.port):
        with Client(f"redis+cluster://127.0.0.1:{port}", "q") as client, connect(second.url) as owner:
            assert client.state(job_id := client.enqueue("Hi")) == "queued"
            assert owner.exists(Keys("q").job(job_id))
            drop_queue(owner, "q")


def test_the_queues_of_a_cluster_are_listed_node_by_node(
    two_nodes: tuple[EmbeddedServer, EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two_nodes
    url = f"redis+cluster://127.0.0.1:{first.port}"
    with Client(url, "q") as client, connect(second.url) as owner:
        client.enqueue("Hi")
        assert command.run(cli.cli, ["queue", "list", "--redis-url", url, "--queue", "q"]) == 0
        drop_queue(owner, "q")
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()] == ["queue", "q"]
    assert shown.err == "worker: only queues on the node of queue q; --queue with the name of another asks its node\n"


def test_a_stream_follows_its_queue_to_another_node(
    two_nodes: tuple[EmbeddedServer, EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.client.CHECK_S", 60.0)  # what is not heard is not looked for
    first, second = two_nodes
    url = f"redis+cluster://127.0.0.1:{first.port}"
    with connect(first.url) as one, connect(second.url) as two, Client(url, "q") as client, connect(url, "q") as own:
        broker = Broker(own, "q", "me")
        broker.ensure_group()
        reader = Reader(client, client.enqueue("Hi"))
        work = Work.claim(broker)
        work.tokens(3)
        reader.wait_for(3)
        listener = broker.listen()
        move_queue(two, one, first.port)
        with contextlib.closing(listener), pytest.raises(redis.ConnectionError, match="moved to another node"):
            hear(listener, 5.0)
        wait_until(lambda: finishes(work), message="an end at the new node")
        assert reader.join().ids == [100, 101, 102]
        assert one.exists(Keys("q").result(reader.stream.job_id))
        move_queue(one, two, second.port)


def finishes(work: Work) -> bool:
    try:
        work.finish()
    except redis.ConnectionError:
        return False
    return True


def move_queue(source: redis.Redis, target: redis.Redis, port: int) -> None:
    """As an operator moves the slot of a queue that rests."""
    slot = source.execute_command("CLUSTER", "KEYSLOT", Keys("q").prefix)
    ids = [node.execute_command("CLUSTER", "MYID").decode() for node in (source, target)]
    target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    keys = source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
    source.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
    for node in (target, source):
        node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])


def test_a_cluster_is_told_from_one_server() -> None:
    with connect("redis+cluster://a,b:7", "q") as cluster, connect("redis://a") as single:
        assert (is_cluster(cluster), is_cluster(single)) == (True, False)


# ---- TLS


def test_a_certificate_of_an_unknown_authority_is_one_line_that_names_the_remedy(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    with (
        tls_in_front_of(server.port, tmp_path / "ca.pem") as port,
        Client(f"rediss://localhost:{port}") as client,
        pytest.raises(ServerUnavailable, match=r"CERTIFICATE_VERIFY_FAILED.*mend ssl_ca_certs") as refused,
    ):
        client.state("a")
    assert "\n" not in str(refused.value)


def test_a_certificate_for_another_name_is_refused(server: EmbeddedServer, tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    with (
        tls_in_front_of(server.port, authority) as port,
        Client(f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority}") as client,
        pytest.raises(ServerUnavailable, match=r"IP address mismatch.*mend ssl_ca_certs"),
    ):
        client.state("a")


def test_a_file_of_certificates_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidOption, match=r"ssl_ca_certs: there is no file /nowhere\.pem"):
        connect("rediss://h?ssl_ca_certs=/nowhere.pem")
