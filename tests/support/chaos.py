"""Workers that are started again when they end, and what happens to them and to their server, drawn from a seed.

Relies on `load` for the clients and on `worker` for processes. SLOTMILL_CHAOS_SEED repeats a run's choices (not its timing),
SLOTMILL_CHAOS_SCALE multiplies how much happens.
"""

import contextlib
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import psutil

from tests.support.jobs import Producer
from tests.support.load import Asked, Load, Told, faults_of_queue
from tests.support.server import leaked_keys
from tests.support.wait import wait_until
from tests.support.worker import WorkerUnderTest, runs
from worker.connection import connect
from worker.embedded import EmbeddedServer
from worker.keys import GROUP, Keys

SCALE = float(os.environ.get("SLOTMILL_CHAOS_SCALE", "1"))


def new_seed() -> int:
    """SLOTMILL_CHAOS_SEED, or another one each time."""
    return int(os.environ.get("SLOTMILL_CHAOS_SEED") or random.SystemRandom().randrange(2**32))


class Fleet:
    """So many workers; one that has ended is replaced at once, as an init system would."""

    def __init__(self, start: Callable[[], WorkerUnderTest], size: int) -> None:
        self._start = start
        self.members = [start() for _ in range(size)]
        self.num_started = size
        self._engines: set[psutil.Process] = set()
        self._leave = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor")
        self._supervisor.start()

    def close(self) -> None:
        """End all; AssertionError when one of their engines outlives them."""
        self._leave.set()
        self._supervisor.join()
        for worker in self.members:
            self.note_engines(worker)
            worker.close()
        wait_until(lambda: not any(map(runs, self._engines)), message=f"the end of {len(self._engines)} engines")

    def serving(self) -> list[WorkerUnderTest]:
        """Those that have an engine."""
        return [worker for worker in self.members if worker.process.poll() is None and worker.logged("engine_ready")]

    def note_engines(self, worker: WorkerUnderTest) -> None:
        """Remember what has to be gone at the end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._engines |= set(worker.engines())

    def _supervise(self) -> None:
        while not self._leave.wait(0.02):
            for i, worker in enumerate(self.members):
                if worker.process.poll() is not None:
                    worker.close()
                    self.members[i] = self._start()
                    self.num_started += 1


class Chaos:
    """What can happen to a fleet under load. Each method is one disturbance; `happened` counts them."""

    def __init__(
        self, url: str, queue: str, fleet: Fleet, load: Load, draw: random.Random, lease_s: float, enough: int
    ) -> None:
        """Workers are struck while at least `enough` of them serve."""
        self._enough = enough
        self._url, self._keys = url, Keys(queue)
        self.fleet, self.load = fleet, load
        self._draw, self._lease_s = draw, lease_s
        self._timers: list[threading.Timer] = []
        self.happened: Counter[str] = Counter()

    def close(self) -> None:
        """Let go on what stands still."""
        for timer in self._timers:
            timer.join()

    def kill_worker(self) -> None:
        """SIGKILL; the engine goes with it."""
        worker = self._freeze()
        self.fleet.note_engines(worker)
        worker.process.kill()
        wait_until(lambda: worker.process.poll() is not None, message="a killed worker's end")
        self.happened["worker killed"] += 1

    def kill_engine(self) -> None:
        worker = self._freeze()
        for engine in worker.engines():
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()
        _resume(worker.process)
        self.happened["engine killed"] += 1

    def stall_worker(self) -> None:
        """A worker that stands still for longer than its lease, and then goes on as if nothing had been."""
        worker = self._freeze()
        timer = threading.Timer(2.5 * self._lease_s, _resume, [worker.process])
        timer.start()
        self._timers.append(timer)
        self.happened["worker stalled"] += 1

    def drain_worker(self) -> None:
        self.drain(self._victim())

    def drain(self, worker: WorkerUnderTest) -> None:
        """SIGTERM, as in a rolling restart, once another could take over."""
        wait_until(lambda: set(self.fleet.serving()) - {worker}, 30, "another worker that serves")
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.process.terminate()
        self.happened["worker drained"] += 1

    def cut_connections(self) -> None:
        with connect(self._url) as client:
            for kind in ("normal", "pubsub"):
                client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        self.happened["connections cut"] += 1

    def forget_scripts(self) -> None:
        with connect(self._url) as client:
            client.script_flush()
        self.happened["scripts forgotten"] += 1

    def forget_group(self) -> None:
        wait_until(lambda: not self._on_trial(), 30, "a moment without a job on its last trial")
        with connect(self._url) as client:
            client.xgroup_destroy(self._keys.lane("normal"), GROUP)
        self.happened["group destroyed"] += 1

    def kill_server(self, server: EmbeddedServer) -> None:
        wait_until(lambda: not self._on_trial(), 30, "a moment without a job on its last trial")
        server.kill()
        time.sleep(self._draw.uniform(0, 0.5))  # how long it is gone
        server.start()
        self.happened["server killed"] += 1

    def _victim(self) -> WorkerUnderTest:
        """One of those that serve, at a time when most do: what is killed before it has begun proves little."""
        return self._draw.choice(
            wait_until(lambda: len(found := self.fleet.serving()) >= self._enough and found, 120, "workers that serve")
        )

    def _freeze(self) -> WorkerUnderTest:
        """A worker that serves, and stands still from now on.

        Spared are workers with a job that has crashed alone once: a second time makes it a dead letter, which a series of
        accidents cannot be told from. The worker stands still so that this does not change before it is killed.
        """
        return wait_until(self._frozen, 120, "a worker that need not be spared")

    def _frozen(self) -> WorkerUnderTest | None:
        worker = self._victim()
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.process.suspend()
            if not self._is_spared(worker):
                return worker
            _resume(worker.process)
        return None

    def _is_spared(self, worker: WorkerUnderTest) -> bool:
        return worker.logged("worker_started")[0]["worker"].encode() in self._on_trial()

    def _on_trial(self) -> set[bytes]:
        """The workers with a job that has crashed alone once and is not acquitted yet."""
        with connect(self._url) as client, client.pipeline(transaction=False) as pipe:
            for told in self.load.open:
                pipe.hmget(self._keys.job(told.job_id), "owner", "suspect", "crashes")
            rows = pipe.execute()
        return {owner for owner, suspect, crashes in rows if owner and suspect == b"1" and crashes not in (None, b"0")}


def _resume(process: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


class Run:
    """One run: a fleet, a load, a seed, and at the end every check."""

    def __init__(
        self,
        url: str,
        queue: str,
        start: Callable[[], WorkerUnderTest],
        jobs: Callable[[random.Random], Iterator[Asked]],
        *,
        num_workers: int,
        num_clients: int,
        lease_s: float,
        enough: int | None = None,
    ) -> None:
        """See `Chaos` for `enough`; half of the workers if not given."""
        self.seed = new_seed()
        self.draw = random.Random(self.seed)
        self._url, self._queue = url, queue
        self._started_at = time.monotonic()
        self.fleet = Fleet(start, num_workers)
        self.load = Load(url, queue, jobs(random.Random(self.seed + 1)), num_clients)
        self.chaos = Chaos(url, queue, self.fleet, self.load, self.draw, lease_s, enough or (num_workers + 1) // 2)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.load.finish()
        self.chaos.close()
        self.fleet.close()
        if error[0]:
            sys.stdout.write(f"SLOTMILL_CHAOS_SEED={self.seed}\n")

    def disturb(self, disturbances: list[Callable[[], None]], mean_pause_s: float) -> None:
        """All of these one after another, at random times."""
        for disturbance in disturbances:
            time.sleep(self._draw_pause(mean_pause_s))
            disturbance()

    def until_ended(self, num_jobs: int, timeout_s: float) -> None:
        wait_until(lambda: self.load.num_ended >= num_jobs, timeout_s, f"{num_jobs} ends (seed {self.seed})")

    def check(self) -> list[Told]:
        """Wait for the last job; AssertionError with the seed and what differs from an undisturbed run."""
        told = self.load.finish()
        self.chaos.close()
        with connect(self._url) as client:
            lanes = Producer(client, self._queue)
            with contextlib.suppress(AssertionError):  # an end that the server forgot is written again by another attempt
                wait_until(lambda: not lanes.entries(), 30)
            found = [fault for of_one in told for fault in of_one.faults()]
            found += faults_of_queue(client, self._queue, told)
            found += [f"{key} would live for ever" for key in leaked_keys(client, self._queue)]
        sys.stdout.write(f"{self.summary(told)}\n")
        assert not found, "\n".join(
            [f"SLOTMILL_CHAOS_SEED={self.seed}: {len(found)} faults, {self.summary(told)}", *found[:20]]
        )
        return told

    def summary(self, told: list[Told]) -> str:
        num_lost = sum(of_one.result.attempts - 1 for of_one in told if of_one.result)
        happened = ", ".join(f"{number} x {what}" for what, number in sorted(self.chaos.happened.items())) or "nothing killed"
        took_s = time.monotonic() - self._started_at
        return f"{len(told)} jobs, {num_lost} attempts lost, {happened}; {self.fleet.num_started} starts, {took_s:.0f} s"

    def _draw_pause(self, mean_s: float) -> float:
        return self.draw.uniform(0, 2 * mean_s)
