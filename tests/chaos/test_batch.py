"""Batch files through a queue while command, workers and server are killed: each line is answered once."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
import redis

from tests.support.chaos import SCALE, Fleet, new_seed
from tests.support.server import embedded_server
from tests.support.wait import wait_until
from tests.support.worker import ForkedWorker, WorkerMaker, workers
from worker import cli, command
from worker.connection import connect
from worker.embedded import EmbeddedServer
from worker.keys import Keys

NUM_KILLS = int(12 * SCALE)
STEP_S = 0.02
NUM_LINES = 250 * NUM_KILLS
"""The engines alone take 1.25 s for those of one kill, so that the last kill comes before the last line."""
LEASE_S = 1.0
WINDOW = 500
KEYS = Keys("q")

pytestmark = pytest.mark.timeout(300 * max(1, SCALE))


def write_lines(path: Path, count: int) -> Path:
    body = {"prompt": "w5 w7", "max_tokens": 4, "model": "fake"}
    lines = ({"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with embedded_server(data_dir=tmp_path / "data") as running:
        yield running


@pytest.fixture
def make(own_server: EmbeddedServer, fake_model: Path) -> Iterator[WorkerMaker]:
    with workers(own_server.url, "q", fake_model) as maker:
        yield maker


class Submit:
    """The command as a process, gone on with whenever it is killed."""

    def __init__(self, server: EmbeddedServer, given: Path, out: Path) -> None:
        self._words = ["batch", "submit", "-i", str(given), "-o", str(out), "--resume", "--window", "100"]
        self._words += ["--redis-url", server.url, "--queue", "q"]
        self.process = self._start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def finish(self) -> int:
        """Its exit code, started again where it found no server."""
        while (code := self.process.wait(200)) == command.NO_SERVER:
            self.process = self._start()
        return code

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-m", "worker.cli", *self._words])


@pytest.mark.parametrize("order", ["done", "input"])
def test_a_command_and_workers_killed_at_random_answer_each_line_once(
    own_server: EmbeddedServer, make: WorkerMaker, tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTMILL_ORDER", order)
    seed = new_seed()
    draw = random.Random(seed)
    given, out = write_lines(tmp_path / "in.jsonl", NUM_LINES), tmp_path / "out.jsonl"
    slow = ("--lease-s", str(LEASE_S), "--max-slots", "8")
    fleet = Fleet(lambda: make(*slow, delay_s=STEP_S, is_awaited=False, kind=ForkedWorker), 2)
    submit = Submit(own_server, given, out)
    try:
        for i in range(NUM_KILLS):
            time.sleep(draw.uniform(0.3, 1.2))
            if i == NUM_KILLS // 2:
                own_server.kill()
                own_server.start()
            elif draw.random() < 0.5:
                submit.kill()
            else:
                draw.choice(fleet.members).process.kill()
        assert submit.finish() == command.OK, f"SLOTMILL_CHAOS_SEED={seed}"
    finally:
        submit.process.kill()
        submit.process.wait()
        fleet.close()
    assert command.run(cli.cli, ["batch", "verify", "-i", str(given), "-o", str(out)]) == 0, f"SLOTMILL_CHAOS_SEED={seed}"


def test_the_memory_of_the_server_does_not_grow_with_the_file(
    own_server: EmbeddedServer, make: WorkerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been collected lives for a second here."""
    monkeypatch.setattr("worker.batch.ledger.SETTLED_TTL_S", 1)
    make("--max-slots", "64", delay_s=0.0)
    used = []
    for count in (2_000, int(20_000 * SCALE)):
        with connect(own_server.url) as client, _Sampler(client) as sampler:
            submit(own_server, write_lines(tmp_path / f"{count}.jsonl", count))
            wait_until(lambda client=client: not _jobs(client), 30, "the last key of a job gone")
            client.xtrim(KEYS.done, 0)  # bounded by itself
            used.append(int(client.info("memory")["used_memory"]))
        assert sampler.most_waiting <= WINDOW
    assert used[1] < used[0] + (1 << 20)


def submit(server: EmbeddedServer, given: Path) -> None:
    words = ["batch", "submit", "-i", str(given), "-o", f"{given}.out", "--window", str(WINDOW)]
    assert command.run(cli.cli, [*words, "--redis-url", server.url, "--queue", "q"]) == 0


def _jobs(client: redis.Redis) -> list[bytes]:
    kinds = (KEYS.job(""), KEYS.log(""), KEYS.result(""))
    return [key for kind in kinds for key in client.scan_iter(f"{kind}*", count=1000)]


class _Sampler:
    """The most jobs that were on the queue at a time."""

    def __init__(self, client: redis.Redis) -> None:
        self._client, self._over = client, Event()
        self._thread = Thread(target=self._sample)
        self.most_waiting = 0

    def __enter__(self) -> "_Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.05):
            self.most_waiting = max(self.most_waiting, int(self._client.xlen(KEYS.lane("low"))))
