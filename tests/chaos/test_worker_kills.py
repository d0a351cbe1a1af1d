"""Workers that are killed at random under streaming load: nobody can tell by what comes out of the queue."""

import pytest

from tests.support.chaos import SCALE, Run
from tests.support.load import fake_jobs
from tests.support.worker import ForkedWorker, WorkerMaker

NUM_KILLS = int(200 * SCALE)
NUM_JOBS = int(400 * SCALE)
LEASE_S = 0.5
STEP_S = 0.01

pytestmark = pytest.mark.timeout(600 * max(1, SCALE))


def test_200_kills_of_workers_over_400_streams_lose_nothing_and_repeat_nothing(
    make_worker: WorkerMaker, redis_url: str, queue: str
) -> None:
    def start():
        return make_worker("--lease-s", str(LEASE_S), "--max-slots", "4", delay_s=STEP_S, is_awaited=False, kind=ForkedWorker)

    with Run(redis_url, queue, start, fake_jobs, num_workers=5, num_clients=12, lease_s=LEASE_S) as run:
        run.disturb([run.chaos.kill_worker] * NUM_KILLS, mean_pause_s=0.3)
        run.until_ended(NUM_JOBS, timeout_s=120 * max(1, SCALE))
        told = run.check()
    assert sum(of_one.result.attempts > 1 for of_one in told if of_one.result) > NUM_KILLS / 2
