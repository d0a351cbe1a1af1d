"""All that can happen, in any order, under load, on a server of its own. The longer run is `make chaos`."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.chaos import SCALE, Run
from tests.support.load import fake_jobs
from tests.support.server import embedded_server
from tests.support.worker import ForkedWorker, WorkerMaker, WorkerUnderTest, workers
from worker.connection import connect
from worker.embedded import EmbeddedServer

LEASE_S = 1.0
NUM_JOBS = int(60 * SCALE)

pytestmark = pytest.mark.timeout(300 * max(1, SCALE))


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with embedded_server() as running, connect(running.url) as client:
        client.config_set("appendfsync", "always")
        yield running


@pytest.fixture
def make(own_server: EmbeddedServer, fake_model: Path) -> Iterator[WorkerMaker]:
    with workers(own_server.url, "q", fake_model) as maker:
        yield maker


def test_all_that_can_happen_happens_and_no_client_can_tell(own_server: EmbeddedServer, make: WorkerMaker) -> None:
    def start() -> WorkerUnderTest:
        options = ("--lease-s", str(LEASE_S), "--drain-s", "0.5", "--max-slots", "4")
        return make(*options, delay_s=0.01, is_awaited=False, kind=ForkedWorker)

    with Run(own_server.url, "q", start, fake_jobs, num_workers=5, num_clients=12, lease_s=LEASE_S) as run:
        chaos = run.chaos
        shares = {
            chaos.kill_worker: 10,
            chaos.kill_engine: 6,
            chaos.stall_worker: 4,
            chaos.drain_worker: 4,
            partial(chaos.kill_server, own_server): 3,
            chaos.cut_connections: 3,
            chaos.forget_scripts: 3,
            chaos.forget_group: 2,
        }
        planned = [what for what, share in shares.items() for _ in range(int(share * SCALE))]
        run.draw.shuffle(planned)
        run.disturb(planned, mean_pause_s=0.5)
        run.until_ended(NUM_JOBS, timeout_s=120 * SCALE)
        run.check()
