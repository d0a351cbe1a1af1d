"""Texts, checked results and calls in one line of the client library, on a real server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.streams import Work, text
from worker import client as library
from worker.broker import Broker
from worker.client import Client
from worker.errors import JobFailed
from worker.keys import DEFAULT_QUEUE


@pytest.fixture
def client(redis_url: str, queue: str) -> Iterator[Client]:
    with Client(redis_url, queue) as made:
        yield made


def test_text_comes_as_it_is_made(client: Client, broker: Broker) -> None:
    job_id = client.enqueue("Hi")
    work = Work.claim(broker)
    work.tokens(2)
    parts = client.stream(job_id).text()
    assert next(parts) == text(0, 2)
    work.tokens(3)
    result = work.finish()
    assert text(0, 2) + "".join(parts) == text(0, 5) == result.text


def test_the_text_of_a_job_that_fails_ends_with_the_failure(client: Client, broker: Broker) -> None:
    job_id = client.enqueue("Hi")
    work = Work.claim(broker)
    work.tokens(2)
    result = work.finish("expired", "expired")
    parts = client.stream(job_id).text()
    assert next(parts) == text(0, 2)
    with pytest.raises(JobFailed, match=f"job {job_id}: expired") as failed:
        next(parts)
    assert (failed.value.result, failed.value.state) == (result, "expired")


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_a_job_is_generated_in_one_call_that_raises_unless_it_succeeds(client: Client, broker: Broker, state: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.generate, "Hi", timeout_s=30, max_tokens=3)
        result = Work.claim(broker).finish(state, choices=False)
        error = asked.exception(30)
    if state == "succeeded":
        assert asked.result() == result
    else:
        assert isinstance(error, JobFailed)
        assert error.result == result


def test_the_environment_names_server_and_queue_as_it_does_for_commands(
    redis_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLOTMILL_REDIS_URL", "SLOTMILL_QUEUE"):
        monkeypatch.delenv(name, raising=False)
    assert library.from_env() == ("redis://127.0.0.1:6379/0", DEFAULT_QUEUE)
    monkeypatch.setenv("SLOTMILL_REDIS_URL", redis_url)
    monkeypatch.setenv("SLOTMILL_QUEUE", queue)
    assert library.from_env() == (redis_url, queue)
    with Client.from_env() as client:
        assert client.state(client.enqueue("Hi")) == "queued"


def test_a_name_that_the_library_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'worker\.client' has no attribute 'Asink'"):
        library.Asink  # noqa: B018
