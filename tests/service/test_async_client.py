"""The client library for an event loop on a real server, with the worker's part played by hand."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis

from tests.support.server import BrokerMaker, brokers, embedded_server, wait_written
from tests.support.streams import Listens, Reader, Work, ids, text
from tests.support.wait import wait_until
from worker.broker import Broker
from worker.client import AsyncClient, Client, Delta
from worker.connection import connect
from worker.embedded import EmbeddedServer
from worker.errors import InvalidJob, JobFailed, QueueFull, ServerUnavailable, UnknownJob, WaitTimeout
from worker.frames import ControlFrame, Result
from worker.switchboard import Ear

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread of its own; it may have no task left at the end."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    try:
        yield made
        wait_until(lambda: not asyncio.all_tasks(made), message="tasks over")
    finally:
        made.call_soon_threadsafe(made.stop)
        thread.join()
        made.close()


@pytest.fixture
def run(loop: asyncio.AbstractEventLoop) -> Run:
    return lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(30)


@pytest.fixture
def client(redis_url: str, queue: str, run: Run) -> Iterator[AsyncClient]:
    made = AsyncClient(redis_url, queue)
    yield made
    run(made.close())


def test_a_client_that_is_closed_says_so(client: AsyncClient, redis_url: str, queue: str, run: Run) -> None:
    job_id = run(client.enqueue("Hi"))
    run(client.close())
    with pytest.raises(RuntimeError, match="client: it is closed"):
        run(client.state(job_id))
    threaded = Client(redis_url, queue)
    threaded.close()
    with pytest.raises(RuntimeError, match="client: it is closed"):
        threaded.enqueue("Hi")


class AsyncReader(Reader):
    """Reads a stream as a task, with the checks of `Reader`."""

    def __init__(self, client: AsyncClient, loop: asyncio.AbstractEventLoop, job_id: str) -> None:
        self.stream: Any = client.stream(job_id, 30.0)
        self.deltas: list[Delta] = []
        self.error: Exception | None = None
        self.ids: list[int] = []
        self.text = ""
        self.future = asyncio.run_coroutine_threadsafe(self._read_all(), loop)

    async def _read_all(self) -> None:
        async for delta in self.stream:
            self._take(delta)

    def join(self) -> "AsyncReader":
        self.future.result(30)
        return self


@pytest.fixture
def follow(client: AsyncClient, loop: asyncio.AbstractEventLoop) -> Callable[[str], AsyncReader]:
    return lambda job_id: AsyncReader(client, loop, job_id)


Follow = Callable[[str], AsyncReader]


@pytest.mark.usefixtures("unchecked")
def test_a_stream_gives_every_token_once_in_order_and_then_the_result(
    client: AsyncClient, run: Run, follow: Follow, broker: Broker, listens: Listens
) -> None:
    job_id = run(client.enqueue("Hi", max_tokens=9))
    work = Work.claim(broker)
    work.tokens(2)  # in the log before anybody listens
    reader = follow(job_id)
    reader.wait_for(2)
    listens(job_id)
    work.tokens(3)
    work.tokens(1, publish=False)  # found when the next one comes
    work.tokens(1)
    result = work.finish()
    assert reader.join().holds(result)


@pytest.mark.usefixtures("unchecked")
def test_many_streams_share_one_connection(
    client: AsyncClient, run: Run, follow: Follow, broker: Broker, redis_client: redis.Redis, listens: Listens
) -> None:
    job_ids = [run(client.enqueue("Hi")) for _ in range(50)]
    readers = [follow(job_id) for job_id in job_ids * 2]
    for job_id in job_ids:
        listens(job_id)
    assert len([1 for each in redis_client.client_list() if int(each["sub"]) > 1]) == 1
    works = {work.delivery.job_id: work for work in (Work.claim(broker) for _ in job_ids)}
    for _ in range(5):
        for work in works.values():
            work.tokens(2)
    results = {job_id: work.finish() for job_id, work in works.items()}
    assert all(reader.join().holds(results[reader.stream.job_id]) for reader in readers)


@pytest.mark.usefixtures("unchecked")
def test_who_listens_later_to_the_same_channel_hears_as_well(
    client: AsyncClient, run: Run, follow: Follow, broker: Broker, listens: Listens
) -> None:
    first = follow(job_id := run(client.enqueue("Hi")))
    listens(job_id)
    work = Work.claim(broker)
    work.tokens(3)
    first.wait_for(3)
    second = follow(job_id)
    second.wait_for(3)
    work.tokens(2)
    result = work.finish()
    assert first.join().holds(result)
    assert second.join().holds(result)


@pytest.mark.parametrize("retries", [False, True], ids=["ours", "redis-py"])
def test_a_killed_connection_costs_no_token_and_repeats_none(
    redis_url: str,
    queue: str,
    redis_client: redis.Redis,
    broker: Broker,
    loop: asyncio.AbstractEventLoop,
    run: Run,
    listens: Listens,
    retries: bool,
) -> None:
    with redis.Redis.from_url(redis_url) if retries else connect(redis_url) as own:
        client = AsyncClient(own, queue)
        reader = AsyncReader(client, loop, job_id := run(client.enqueue("Hi")))
        listens(job_id)
        work = Work.claim(broker)
        for k in range(100):
            work.tokens()
            if k % 20 == 10:
                redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        result = work.finish()
        assert reader.join().holds(result)
        run(client.close())


def test_a_reader_that_is_too_slow_reads_the_rest_from_the_log(
    client: AsyncClient,
    run: Run,
    loop: asyncio.AbstractEventLoop,
    broker: Broker,
    listens: Listens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.switchboard.MAX_HEARD", 4)
    dropped = threading.Event()
    stream, goes_on = client.stream(job_id := run(client.enqueue("Hi"))), asyncio.Event()

    def put(ear: Ear, item: Any, real: Any = Ear.put) -> None:
        real(ear, item)
        if ear._heard.full():
            dropped.set()

    monkeypatch.setattr("worker.switchboard.Ear.put", put)

    async def read() -> list[Delta]:
        deltas = []
        async for delta in stream:
            deltas.append(delta)
            await goes_on.wait()
        return deltas

    reading = asyncio.run_coroutine_threadsafe(read(), loop)
    listens(job_id)
    work = Work.claim(broker)
    for _ in range(50):
        work.tokens()
    assert dropped.wait(10)
    result = work.finish()
    loop.call_soon_threadsafe(goes_on.set)
    assert [token for delta in reading.result(30) for token in delta.token_ids] == list(ids(0, 50))
    assert stream.result == result


@pytest.mark.parametrize("how", ["cancelled", "left"])
def test_a_stream_that_is_ended_early_leaves_no_subscription_and_no_connection(
    client: AsyncClient, run: Run, loop: asyncio.AbstractEventLoop, broker: Broker, redis_client: redis.Redis,
    listens: Listens, how: str,
) -> None:  # fmt: skip
    job_id = run(client.enqueue("Hi"))
    work = Work.claim(broker)
    before = len(redis_client.client_list(_type="pubsub"))

    async def read() -> None:
        async for delta in client.stream(job_id):
            if how == "left" and delta.index == 2:
                break

    reading = asyncio.run_coroutine_threadsafe(read(), loop)
    listens(job_id)
    work.tokens(2)
    if how == "cancelled":
        reading.cancel()
    else:
        work.tokens(1)
        reading.result(30)
    listens(job_id, 0)
    wait_until(lambda: len(redis_client.client_list(_type="pubsub")) == before, message="connection closed")
    work.finish()


def test_results_are_waited_for_and_checked_when_asked(
    client: AsyncClient, run: Run, loop: asyncio.AbstractEventLoop, broker: Broker, listens: Listens
) -> None:
    good = asyncio.run_coroutine_threadsafe(client.generate("Hi", id="good", timeout_s=30), loop)
    listens("good")
    work = Work.claim(broker)
    work.tokens(2)
    result = work.finish()
    assert (good.result(30), result.text, run(client.state("good"))) == (result, text(0, 2), "succeeded")
    run(client.enqueue("Hi", id="bad"))
    assert run(client.cancel("bad")) == "queued"
    failed = Work.claim(broker).finish("failed", choices=False)
    assert run(client.result("bad")) == failed
    with pytest.raises(JobFailed, match="job bad: failed"):
        run(client.result("bad", check=True))


def test_text_comes_as_it_is_made_and_ends_with_the_jobs_failure(client: AsyncClient, run: Run, broker: Broker) -> None:
    job_id = run(client.enqueue("Hi"))
    work = Work.claim(broker)
    work.tokens(3)
    work.emit(ControlFrame(work.delivery.attempt, "restart", index=1, offset=1), 0)
    work.n = 3
    work.finish("failed", reason="error")
    given: list[str] = []

    async def read() -> None:
        async for part in client.stream(job_id).text():
            given.append(part)

    with pytest.raises(JobFailed):
        run(read())
    assert "".join(given) == text(0, 3)


@pytest.mark.parametrize("wait", [lambda c, i: c.result(i, 0.2), lambda c, i: c.generate("Hi", timeout_s=0.2)])
def test_a_wait_ends_in_time(client: AsyncClient, run: Run, wait: Callable[[AsyncClient, str], Any]) -> None:
    with pytest.raises(WaitTimeout):
        run(wait(client, run(client.enqueue("Hi"))))


@pytest.mark.parametrize("ask", [AsyncClient.state, AsyncClient.cancel, AsyncClient.result])
def test_a_job_that_never_was_is_unknown(client: AsyncClient, run: Run, ask: Callable[[AsyncClient, str], Any]) -> None:
    with pytest.raises(UnknownJob):
        run(ask(client, "nobody"))


def test_refusals_are_those_of_the_client(client: AsyncClient, run: Run) -> None:
    with pytest.raises(InvalidJob, match="temprature"):
        run(client.enqueue("Hi", temprature=1))
    run(client.enqueue("Hi"))
    with pytest.raises(QueueFull):
        run(client.enqueue("Hi", max_queued=1))


def test_a_server_that_was_never_there_is_reported_at_once(run: Run) -> None:
    client = AsyncClient("redis://127.0.0.1:1/0", patience_s=60)
    for ask in (client.enqueue("Hi"), client.result("k"), anext(client.stream("k").__aiter__())):
        with pytest.raises(ServerUnavailable, match="refused"):
            run(ask)
    run(client.close())


@pytest.fixture
def fragile() -> Iterator[tuple[EmbeddedServer, BrokerMaker]]:
    with embedded_server() as server, brokers(server.url, "q") as maker:
        yield server, maker


def test_a_stream_survives_a_killed_server(
    fragile: tuple[EmbeddedServer, BrokerMaker], run: Run, loop: asyncio.AbstractEventLoop
) -> None:
    server, make_broker = fragile
    broker, client = make_broker(), AsyncClient(server.url, "q")
    reader = AsyncReader(client, loop, run(client.enqueue("Hi")))
    work = Work.claim(broker)
    work.tokens(3)
    reader.wait_for(3)
    with connect(server.url) as plain:
        wait_written(plain)
    server.kill()
    server.start()
    work.tokens(2)
    result: Result = work.finish()
    assert reader.join().holds(result)
    run(client.close())
