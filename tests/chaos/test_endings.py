"""Every way in which a job ends: one end frame, one result, one row in `done`, and a client that is told of it once."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from tests.support.jobs import Producer, answer, events, token_ids, words
from tests.support.load import Held
from tests.support.wait import wait_until
from tests.support.worker import ForkedWorker, WorkerMaker, WorkerUnderTest
from worker.client import Client, Delta
from worker.frames import Result

SLOW_S = 0.02
LONG = {"prompt": "w85 w9", "max_tokens": 400}


@pytest.fixture
def start(make_worker: WorkerMaker) -> Callable[..., WorkerUnderTest]:
    return partial(make_worker, "--max-slots", "2", delay_s=SLOW_S, kind=ForkedWorker)


class Follower:
    """A connected client."""

    def __init__(self, url: str, queue: str, job_id: str) -> None:
        self.job_id = job_id
        self.deltas: list[Delta] = []
        self._client = Client(url, queue)
        self._threads = ThreadPoolExecutor(1)
        self._end = self._threads.submit(self._follow)

    def _follow(self) -> Result:
        stream = self._client.stream(self.job_id, 30)
        self.deltas.extend(stream)
        assert stream.result
        return stream.result

    def end(self) -> Result:
        """The result, once the stream has ended; what was told adds up to it."""
        result = self._end.result(40)
        held = Held()
        assert [fault for delta in self.deltas for fault in held.add(delta)] == []
        for choice in result.choices:
            assert held.ids.get(choice.index, []) == list(choice.token_ids)
            assert held.text.get(choice.index, "") == choice.text
        return result

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()


@pytest.fixture
def follow(redis_url: str, queue: str) -> Iterator[Callable[[str], Follower]]:
    followers: list[Follower] = []

    def one(job_id: str) -> Follower:
        followers.append(Follower(redis_url, queue, job_id))
        return followers[-1]

    yield one
    for follower in followers:
        follower.close()


@contextmanager
def one_end(producer: Producer, follow: Callable[[str], Follower], state: str, code: str | None) -> Iterator[str]:
    """Gives a job id to enqueue under; afterwards that job has ended in `state` and everybody was told so exactly once."""
    job_id = uuid.uuid4().hex
    with producer.listening([job_id]) as heard:
        yield job_id
        result = follow(job_id).end()
        wait_until(lambda: "end" in events(heard[job_id]), message="an end on the channel")
    assert (result.state, result.code) == (state, code), result.error
    assert result == producer.result(job_id)
    assert events(heard[job_id]).count("end") == events(producer.log(job_id)).count("end") == 1
    ends = [fields for _, fields in producer.client.xrange(producer.keys.done) if fields[b"id"].decode() == job_id]
    assert [fields[b"state"].decode() for fields in ends] == [state]
    wait_until(lambda: producer.entries() == 0, message="empty lanes")


Start = Callable[..., WorkerUnderTest]
Follow = Callable[[str], Follower]


@pytest.mark.parametrize(
    ("body", "state", "code"),
    [
        ({"max_tokens": 20}, "succeeded", None),
        ({"max_tokens": 0}, "succeeded", None),
        ({"max_tokens": -1}, "failed", "invalid"),
        ({"prompt": " ".join(["w5"] * 600)}, "failed", "invalid"),
        ({"deadline_ms": 1}, "expired", "expired"),
        ({"v": 9}, "dead", "unknown_version"),
    ],
    ids=["succeeded", "no tokens", "invalid", "too long", "expired", "unknown version"],
)
def test_an_end_by_itself_is_told_once(
    start: Start, producer: Producer, follow: Follow, body: dict[str, object], state: str, code: str | None
) -> None:
    start()
    with one_end(producer, follow, state, code) as job_id:
        producer.add(job_id, **{"prompt": "w85 w9"} | body)


def test_a_job_that_is_cancelled_while_it_runs_ends_once(
    start: Start, producer: Producer, follow: Follow, redis_url: str, queue: str
) -> None:
    start()
    with one_end(producer, follow, "cancelled", "cancelled") as job_id, Client(redis_url, queue) as client:
        producer.add(job_id, **LONG)
        wait_until(lambda: producer.num_logged(job_id) > 3, message="tokens")
        for _ in range(3):
            client.cancel(job_id)


def test_a_job_that_is_cancelled_while_it_waits_ends_once_and_without_a_token(
    start: Start, producer: Producer, follow: Follow, redis_url: str, queue: str
) -> None:
    with one_end(producer, follow, "cancelled", "cancelled") as job_id, Client(redis_url, queue) as client:
        producer.add(job_id, **LONG)
        client.cancel(job_id)
        start()
    assert producer.result(job_id).usage.completion_tokens == 0


def test_a_job_that_is_cancelled_during_a_drain_ends_once(
    start: Start, producer: Producer, follow: Follow, redis_url: str, queue: str
) -> None:
    worker = start("--drain-s", "20")
    with one_end(producer, follow, "cancelled", "cancelled") as job_id, Client(redis_url, queue) as client:
        producer.add(job_id, **LONG)
        wait_until(lambda: producer.num_logged(job_id) > 3, message="tokens")
        worker.process.terminate()
        worker.wait_for_log("draining")
        client.cancel(job_id)
    assert worker.wait() == 0


def test_a_job_whose_cancel_its_dead_worker_never_heard_ends_once(
    start: Start, producer: Producer, follow: Follow, redis_url: str, queue: str
) -> None:
    worker = start("--lease-s", "0.5")
    with one_end(producer, follow, "cancelled", "cancelled") as job_id, Client(redis_url, queue) as client:
        producer.add(job_id, **LONG)
        wait_until(lambda: producer.num_logged(job_id) > 3, message="tokens")
        worker.stop(9)
        client.cancel(job_id)
        start("--lease-s", "0.5")
    ids = list(producer.result(job_id).choices[0].token_ids)
    assert ids == answer(LONG["prompt"], len(ids)) == token_ids(producer.log(job_id))


def test_a_deadline_in_the_middle_gives_the_text_so_far(start: Start, producer: Producer, follow: Follow) -> None:
    start()
    with one_end(producer, follow, "expired", "expired") as job_id:
        producer.add(job_id, deadline_ms=int(time.time() * 1000 + 1000), **LONG)
    choice = producer.result(job_id).choices[0]
    assert 0 < len(choice.token_ids) < LONG["max_tokens"]
    assert list(choice.token_ids) == answer(LONG["prompt"], len(choice.token_ids))
    assert choice.text == words(choice.token_ids)
    assert choice.finish_reason == "expired"


def test_a_deadline_that_passes_while_nobody_serves_gives_the_text_so_far(
    start: Start, producer: Producer, follow: Follow
) -> None:
    worker = start("--lease-s", "0.5")
    deadline_ms = int(time.time() * 1000 + 1500)
    with one_end(producer, follow, "expired", "expired") as job_id:
        producer.add(job_id, deadline_ms=deadline_ms, **LONG)
        wait_until(lambda: producer.num_logged(job_id) > 3, message="tokens")
        worker.stop(9)
        wait_until(lambda: time.time() * 1000 > deadline_ms, message="the deadline")
        start("--lease-s", "0.5")
    choice = producer.result(job_id).choices[0]
    assert 3 < len(choice.token_ids) < LONG["max_tokens"]
    assert list(choice.token_ids) == answer(LONG["prompt"], len(choice.token_ids))


def test_a_cancel_and_an_end_that_cross_are_one_end(start: Start, producer: Producer, redis_url: str, queue: str) -> None:
    start("--max-slots", "8")
    with Client(redis_url, queue) as client:
        jobs = [producer.add(prompt="w85 w9", max_tokens=10 + i % 3) for i in range(60)]
        for job_id in jobs:
            client.cancel(job_id)
        results = [client.result(job_id, 30) for job_id in jobs]
    for job_id, result in zip(jobs, results, strict=True):
        assert result.state in ("succeeded", "cancelled")
        assert events(producer.log(job_id)).count("end") == 1
    rows = [fields[b"id"].decode() for _, fields in producer.client.xrange(producer.keys.done)]
    assert sorted(rows) == sorted(jobs)
