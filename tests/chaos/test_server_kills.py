"""The server killed and started again under streaming load, with its append-only file: a short gap and nothing else."""

import os
import random
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from tests.support.chaos import SCALE, Run
from tests.support.load import Asked, fake_jobs
from tests.support.server import embedded_server, wait_written
from tests.support.worker import ForkedWorker, WorkerMaker, WorkerUnderTest, workers
from worker.client import Client
from worker.connection import connect
from worker.embedded import EmbeddedServer

NUM_KILLS = int(10 * SCALE)
LEASE_S = 2.0

pytestmark = pytest.mark.timeout(300 * max(1, SCALE))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def own_server(data: Path) -> Iterator[EmbeddedServer]:
    with embedded_server(data_dir=data) as running:
        yield running


@pytest.fixture
def make(own_server: EmbeddedServer, fake_model: Path) -> Iterator[WorkerMaker]:
    with workers(own_server.url, "q", fake_model) as maker:
        yield maker


def start(make: WorkerMaker) -> WorkerUnderTest:
    return make("--lease-s", str(LEASE_S), "--max-slots", "4", delay_s=0.02, is_awaited=False, kind=ForkedWorker)


def test_a_server_killed_ten_times_under_load_loses_and_repeats_nothing(own_server: EmbeddedServer, make: WorkerMaker) -> None:
    with connect(own_server.url) as client:
        client.config_set("appendfsync", "always")
    with Run(own_server.url, "q", partial(start, make), fake_jobs, num_workers=3, num_clients=12, lease_s=LEASE_S) as run:
        run.disturb([partial(run.chaos.kill_server, own_server)] * NUM_KILLS, mean_pause_s=0.8)
        run.check()


def test_a_server_that_loses_its_last_half_second_again_and_again_repeats_nothing_to_a_client(
    own_server: EmbeddedServer, make: WorkerMaker, data: Path
) -> None:
    """As `appendfsync everysec` may when the whole machine dies: tokens, claims and ends that were answered are gone."""
    jobs = list(islice(fake_jobs(random.Random(1)), 40))
    with Client(own_server.url, "q") as client:
        for number, asked in enumerate(jobs):  # before the first kill: only what is on disk is promised
            client.enqueue(id=f"{asked.kind}-{number}", max_attempts=20, **asked.body)

    def again(_: random.Random) -> Iterator[Asked]:
        return iter(jobs)

    with Run(own_server.url, "q", partial(start, make), again, num_workers=3, num_clients=12, lease_s=LEASE_S) as run:
        run.disturb([partial(lose_half_a_second, own_server, data)] * 5, mean_pause_s=0.4)
        run.until_ended(len(jobs), timeout_s=60)
        run.check()


def lose_half_a_second(server: EmbeddedServer, data: Path) -> None:
    with connect(server.url) as client:
        wait_written(client)
    (log,) = data.rglob("*.incr.aof")
    size = log.stat().st_size
    time.sleep(0.5)
    server.kill()
    assert log.stat().st_size > size, "nothing was lost: it proves nothing"
    os.truncate(log, size)
    server.start()
