"""A queue in several partitions: one worker serves them all, each job stays where it was put."""

import json
import shlex
from unittest.mock import Mock

import pytest
import redis

from tests.support.jobs import Producer, answer, token_ids
from tests.support.server import BrokerMaker, brokers, drop_queue, end_of, frame_to_emit, leaked_keys, make_old
from tests.support.worker import WorkerMaker
from worker import cli, command
from worker.broker import Broker
from worker.client import Client
from worker.errors import InvalidOption
from worker.keys import names_of, partition_of
from worker.partitions import PartitionedClient, Partitions
from worker.queue_admin import QueueAdmin


@pytest.fixture
def parts(redis_url: str, queue: str, redis_client: redis.Redis):
    """Three partitions of the test's queue."""
    names = names_of(queue, 3)
    makers = [BrokerMaker(redis_url, name) for name in names]
    yield [maker("me") for maker in makers]
    for maker, name in zip(makers, names, strict=True):
        maker.close()
        leaked = leaked_keys(redis_client, name)
        drop_queue(redis_client, name)
        assert not leaked


@pytest.fixture
def whole(parts: list[Broker]) -> Partitions:
    return Partitions(parts)


def test_an_id_belongs_to_the_partition_that_its_crc_says() -> None:
    assert partition_of("q", "job-1", 4) == "q.3"
    assert {partition_of("q", str(i), 4) for i in range(100)} == {"q.0", "q.1", "q.2", "q.3"}
    assert partition_of("q", "job-1", 1) == "q"


@pytest.mark.parametrize("number", [0, 65])
def test_a_number_of_partitions_that_cannot_be_is_refused(number: int) -> None:
    with pytest.raises(InvalidOption, match=f"--partitions: {number} "):
        names_of("q", number)


def test_every_partition_is_served_and_none_always_first(whole: Partitions, parts: list[Broker]) -> None:
    for number, broker in enumerate(parts):
        for i in range(3):
            broker.enqueue(f"{number}-{i}", "normal", b"")
    taken = [job.job_id for _ in range(9) for job in whole.fetch(1)]
    assert sorted(taken) == sorted(f"{number}-{i}" for number in range(3) for i in range(3))
    assert {job_id[0] for job_id in taken[:3]} == {"0", "1", "2"}


def test_one_fetch_takes_no_more_than_asked_for_in_all_and_one_suspect(whole: Partitions, parts: list[Broker]) -> None:
    for number, broker in enumerate(parts):
        broker.enqueue(f"suspect-{number}", "normal", b"")
        broker.release(broker.fetch(1), "batch")
        broker.enqueue(f"new-{number}", "normal", b"")
    assert len(whole.fetch(2)) == 2
    assert sum(job.is_suspect for job in whole.fetch(9)) == 1


def test_what_one_partition_gave_is_not_lost_when_the_next_does_not_answer(whole: Partitions, parts: list[Broker]) -> None:
    for number, broker in enumerate(parts):
        broker.enqueue(str(number), "normal", b"")
    refuses = redis.ConnectionError("gone")
    parts[0].fetch = Mock(side_effect=refuses)  # type: ignore[method-assign]
    answers = []
    for _ in range(3):
        try:
            answers.append([job.job_id for job in whole.fetch(9)])
        except redis.ConnectionError:
            answers.append(["error"])
    assert answers == [["1", "2"], ["error"], ["error"]]


def test_a_jobs_whole_life_stays_in_its_partition(whole: Partitions, parts: list[Broker]) -> None:
    for number, broker in enumerate(parts):
        broker.enqueue(str(number), "normal", b"")
    jobs = whole.fetch(3)
    frames = [frame_to_emit(job, 0, int(job.job_id) + 1) for job in jobs]
    assert [reply.n for reply in whole.emit(frames)] == [int(job.job_id) + 1 for job in jobs]
    assert [whole.log_of(job) for job in jobs] == [[b"frame"]] * 3
    assert whole.renew(jobs).lost == set()
    kept, retried, released = jobs
    whole.release([released])
    assert whole.retry([(retried, 60.0)]) == ["ok"]
    assert whole.finish([end_of(kept)]) == ["ok"]
    states = {number: broker.job(str(number))["state"] for number, broker in enumerate(parts)}
    assert states == {int(kept.job_id): "succeeded", int(retried.job_id): "delayed", int(released.job_id): "queued"}
    assert whole.next_due_s is None
    [again] = whole.fetch(3)
    assert (again.job_id, whole.next_due_s) == (released.job_id, pytest.approx(60, abs=5))


def test_jobs_of_dead_workers_are_found_in_every_partition(
    whole: Partitions, parts: list[Broker], redis_url: str, redis_client: redis.Redis, queue: str
) -> None:
    with brokers(redis_url, f"{queue}.2") as maker:
        dead = maker("dead")
        dead.enqueue("a", "normal", b"")
        [job] = dead.fetch(1)
    make_old(redis_client, f"{queue}.2", job)
    assert whole.reclaim([]) == 1
    assert [(job.job_id, job.queue) for job in whole.fetch(3)] == [("a", f"{queue}.2")]


def test_counts_are_of_all_partitions(whole: Partitions, parts: list[Broker]) -> None:
    for number, broker in enumerate(parts):
        broker.enqueue(str(number), "low", b"")
    assert whole.queue_counts()["low"].entries == 3


def test_a_queue_is_paused_when_all_its_partitions_are(whole: Partitions, redis_client: redis.Redis, queue: str) -> None:
    told = []
    for name in names_of(queue, 3):
        told.append(whole.paused_and_dead()[0])
        QueueAdmin(redis_client, name).pause()
    assert [*told, whole.paused_and_dead()[0]] == [False, False, False, True]


def test_one_worker_answers_and_cancels_jobs_of_all_partitions(
    make_worker: WorkerMaker, redis_client: redis.Redis, queue: str, parts: list[Broker]
) -> None:
    make_worker("--partitions", "3", "--max-slots", "4", delay_s=0.01)
    producers = [Producer(redis_client, name) for name in names_of(queue, 3)]
    jobs = [(producer, producer.add(prompt=f"w{i}", max_tokens=9)) for i, producer in enumerate(producers * 3, 20)]
    endless = producers[1].add(prompt="w20", max_tokens=400)
    for i, (producer, job_id) in enumerate(jobs, 20):
        assert producer.result(job_id).state == "succeeded"
        assert token_ids(producer.log(job_id)) == answer(f"w{i}", 9)
    parts[1].cancel(endless)
    assert producers[1].result(endless).state == "cancelled"
    assert all(producer.entries() == 0 for producer in producers)


def test_a_client_puts_each_job_where_its_id_belongs_and_finds_it_there(
    make_worker: WorkerMaker, redis_url: str, queue: str, parts: list[Broker]
) -> None:
    make_worker("--partitions", "3")
    with PartitionedClient(redis_url, queue, 3) as client:
        jobs = {client.enqueue(f"w{i}", max_tokens=5, temperature=0): f"w{i}" for i in range(20, 32)}
        for job_id, prompt in jobs.items():
            assert [token for delta in client.stream(job_id, 20.0) for token in delta.token_ids] == answer(prompt, 5)
            assert client.result(job_id).state == client.state(job_id) == "succeeded"
            assert Client(redis_url, partition_of(queue, job_id, 3)).state(job_id) == "succeeded"
    assert all(broker.queue_counts()["normal"].entries == 0 for broker in parts)


def test_an_idempotency_key_meets_its_first_job_in_any_number_of_partitions(
    redis_url: str, queue: str, parts: list[Broker]
) -> None:
    with PartitionedClient(redis_url, queue, 3) as client:
        ids = {client.enqueue("w20", idempotency_key="once") for _ in range(4)}
        assert len(ids) == 1
        assert client.cancel(*ids) == "queued"


def run(redis_url: str, queue: str, *words: str) -> int:
    return command.run(cli.cli, [*words, "--redis-url", redis_url, "--queue", queue, "--partitions", "3"])


def test_commands_find_the_jobs_that_they_have_put_into_partitions(
    make_worker: WorkerMaker, redis_url: str, queue: str, parts: list[Broker], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(redis_url, queue, "enqueue", "--max-tokens", "3", *(f"w{i}" for i in range(20, 28))) == 0
    ids = capsys.readouterr().out.split()
    assert len({partition_of(queue, job_id, 3) for job_id in ids}) > 1
    assert run(redis_url, queue, "job", "cancel", *ids) == 0
    assert capsys.readouterr().out.split() == ["queued"] * 8
    make_worker("--partitions", "3")
    for how in ("result", "tail"):
        assert [run(redis_url, queue, "job", how, job_id, "--timeout-s", "10") for job_id in ids] == [1] * 8
    capsys.readouterr()
    assert run(redis_url, queue, "job", "show", ids[0], "--json") == 0
    assert json.loads(capsys.readouterr().out)["state"] == "cancelled"
    assert all(broker.queue_counts()["normal"].entries == 0 for broker in parts)


@pytest.mark.usefixtures("parts")
def test_hints_work_as_they_stand_for_a_queue_in_partitions(
    redis_url: str, queue: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("worker.client.CHECK_S", 0.02)
    monkeypatch.setattr("worker.job_commands.UNSERVED_S", 0.05)
    assert run(redis_url, queue, "enqueue", "--wait", "a", "--id", "k", "--timeout-s", "0.5") == 4
    part = partition_of(queue, "k", 3)
    told = capsys.readouterr().err.splitlines()[0]
    assert told.startswith(f"worker: no worker serves queue {part} yet; ")
    assert f"`worker start --queue {queue} --partitions 3 --redis-url" in told

    Broker(redis_client, part, "w").heartbeat({})
    QueueAdmin(redis_client, part).pause()
    assert run(redis_url, queue, "job", "result", "k", "--timeout-s", "0.5") == 4
    told = capsys.readouterr().err.splitlines()[0]
    assert command.run(cli.cli, shlex.split(told.split("`")[1])[1:]) == 0
    assert capsys.readouterr().out == f"queue {part}: open\n"

    monkeypatch.setattr(Client, "result", Mock(side_effect=KeyboardInterrupt))
    assert run(redis_url, queue, "job", "result", "k") == 3
    told = capsys.readouterr().err
    assert command.run(cli.cli, shlex.split(told.split("`")[1])[1:]) == 0
    assert capsys.readouterr().out == "queued\n"
