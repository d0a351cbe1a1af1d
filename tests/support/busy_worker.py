"""A real worker through everything that its metrics can tell of, scraped by a real Prometheus, in under a minute.

A tiny random model, few slots, and fewer KV blocks than they want. Jobs wait in a paused queue, then run: in all lanes,
delayed, cancelled, past their deadline, refused, out of attempts, taken by another worker, through a crash of the engine and a
server that is out of memory. Last comes a load whose tokens are counted. What was done when is kept for tests that compare it
with what Prometheus says. Each wait is for what the worker or the server shows, never for time to pass.
"""

import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import redis

from tests.support.jobs import Producer
from tests.support.prometheus import SCRAPE_S, Prometheus
from tests.support.server import brokers, embedded_server, pending
from tests.support.tiny import random_prompts, save_tiny_llama
from tests.support.wait import wait_until
from tests.support.worker import WorkerUnderTest
from worker.broker import Broker
from worker.client import Client
from worker.connection import connect
from worker.keys import HEARTBEAT_S, Keys
from worker.queue_admin import QueueAdmin

QUEUE = "mill"
RUN_S = 60.0
LANES = {"high": 8, "normal": 24, "low": 12}
"""Jobs that wait in the paused queue."""
DELAYED = {"high": 1, "normal": 2, "low": 3}
"""Jobs that are not due for an hour."""
NUM_TOKENS = 200
COUNTED_JOBS, COUNTED_TOKENS = 20, 100
OPTIONS = {
    "max-slots": 10,
    "kv-blocks": 120,
    "swap-blocks": 24,  # for one long request: others that are preempted meanwhile are computed again
    "token-budget": 128,
    "lease-s": 6,
    "dtype": "float32",
    "threads": 1,  # two would wait for each other wherever something else wants a core
}


@dataclass
class Story:
    """What happened when, in Unix time, and to how many."""

    prometheus: Prometheus
    started: float
    paused: float = 0.0
    """The queue was paused, and everything in it was scraped."""
    busy: float = 0.0
    counted_from: float = 0.0
    counted_tokens: int = 0
    ended: float = 0.0
    jobs: list[str] = field(default_factory=list)


@contextmanager
def busy_worker() -> Iterator[Story]:
    """The story, told to its end; Prometheus goes on answering."""
    with ExitStack() as stack:
        model = save_tiny_llama(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        url = stack.enter_context(embedded_server()).url
        admin = stack.enter_context(connect(url))
        QueueAdmin(admin, QUEUE).pause()
        started, worker = time.time(), _start(url, model)
        stack.callback(worker.close)
        target = urlsplit(worker.wait_for_log("worker_started", RUN_S)["metrics"]).netloc
        story = Story(stack.enter_context(Prometheus([target])), started)
        client = stack.enter_context(Client(url, QUEUE))
        other = stack.enter_context(brokers(url, QUEUE))("other", lease_s=float(OPTIONS["lease-s"]))
        told = _Teller(story, worker, admin, client, other)
        told.wait_in_line()
        told.run()
        told.count()
        yield story


def _start(url: str, model: Path) -> WorkerUnderTest:
    engine = ("--engine-command", shlex.join((sys.executable, "-m", "engine.serve")))
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    return WorkerUnderTest("--redis-url", url, "--queue", QUEUE, "--model", str(model), "--run-ahead", *engine, *options)


class _Teller:
    def __init__(self, story: Story, worker: WorkerUnderTest, admin: redis.Redis, client: Client, other: Broker) -> None:
        self._story, self._worker, self._admin, self._client, self._other = story, worker, admin, client, other
        self._prompts = [list(prompt) for prompt in random_prompts(16, longest=150)]
        self._producer = Producer(admin, QUEUE)

    def wait_in_line(self) -> None:
        """Jobs of all lanes, and some that are not due, in a paused queue, until Prometheus has seen them."""
        for lane, count in LANES.items():
            self._story.jobs += [self._add(number, priority=lane) for number in range(count)]
        for lane, count in DELAYED.items():
            for number in range(count):
                self._add(number, priority=lane, delay_s=3600)
        entries = partial(self._ask, "sum(slotmill_queue_entries)")
        wait_until(lambda: entries() == sum(LANES.values()), RUN_S, "a scrape of the queue")
        wait_until(lambda: self._worker.get("/readyz")[0] == 200, RUN_S, "a ready worker")
        wait_until(lambda: self._ask("sum(slotmill_queue_paused)") == 1, RUN_S, "a scrape of the pause")
        self._story.paused = time.time()

    def run(self) -> None:
        """All that may happen to jobs, at once and one after the other."""
        QueueAdmin(self._admin, QUEUE).resume()
        for abandoned in self._other.fetch(1):
            self._make_old(abandoned.lane, abandoned.entry_id, "other")
        self._wait_for("preemptions_total", "recompute")
        self._wait_for("preemptions_total", "swap")
        wait_until(lambda: self._ask("rate(slotmill_generated_tokens_total[4s])") > 0, RUN_S, "a rate")
        self._story.busy = time.time()
        self._trouble()
        self._lose_jobs()
        doomed = self._add(1, priority="high", max_attempts=1)
        wait_until(lambda: self._producer.num_logged(doomed) > 0, RUN_S, "a job with its only attempt under way")
        self._worker.engine().kill()
        self._wait_for("jobs_released_total", "engine")
        wait_until(lambda: self._worker.metric("engine_up", "0") == 1, RUN_S, "the engine again")
        self._admin.config_set("maxmemory", 1)
        self._wait_for("redis_errors_total", "out_of_memory")
        self._admin.config_set("maxmemory", 0)
        for job_id in [*self._story.jobs, doomed]:
            self._client.result(job_id, RUN_S)
        for lane in LANES:  # workers tell of a lane only with each heartbeat
            while not self._ask(f'max_over_time(slotmill_queue_pending{{priority="{lane}"}}[5m])'):
                self._client.result(self._add(0, priority=lane), RUN_S)

    def count(self) -> None:
        """A load whose tokens are known, and silence around it that covers a rate."""
        self._scrape_on()
        self._story.counted_from = time.time()
        jobs = [self._add(number, max_tokens=COUNTED_TOKENS) for number in range(COUNTED_JOBS)]
        results = [self._client.result(job_id, RUN_S) for job_id in jobs]
        self._story.counted_tokens = sum(len(result.choices[0].token_ids) for result in results)
        self._scrape_on()
        self._story.ended = time.time()

    def _trouble(self) -> None:
        """Refusals, two choices of one prompt, a cancel, a deadline."""
        self._admin.xadd(Keys(QUEUE).lane("high"), {"v": "9", "id": "from-the-future", "j": "{}"})
        self._story.jobs += [
            self._producer.add(lane="high", max_tokens=4),
            self._add(0, priority="high", n=2, temperature=1.0),
            self._add(2, priority="high", deadline_ms=round(time.time() * 1000) + 300),
        ]
        cancelled = self._add(3, priority="high", max_tokens=200)
        wait_until(lambda: self._producer.num_logged(cancelled) > 0, RUN_S, "a job to cancel")
        self._client.cancel(cancelled)

    def _lose_jobs(self) -> None:
        """Another worker takes jobs that ours holds: while tokens are written, and while only a renewal can notice."""
        self._lose_until("jobs_fenced_total", "emit")
        engine = self._worker.engine()
        engine.suspend()
        self._lose_until("leases_lost_total", "taken")
        engine.resume()

    def _lose_until(self, name: str, label: str) -> None:
        """A loss may be noticed in the other way first."""
        while not self._worker.metric(name, label):
            before = self._num_fenced()
            wait_until(self._take, RUN_S, "a job to take")
            wait_until(lambda before=before: self._num_fenced() > before, RUN_S, "a loss that is noticed")  # type: ignore[misc]

    def _num_fenced(self) -> float:
        return sum(value for (name, _), value in self._worker.samples().items() if name == "jobs_fenced_total")

    def _take(self) -> bool:
        """As after a pause of the worker's host. What was taken is given back, so that it goes on elsewhere."""
        for lane in LANES:
            for entry_id, (holder, *_) in pending(self._admin, QUEUE, lane).items():
                [(_, fields)] = self._admin.xrange(Keys(QUEUE).lane(lane), entry_id, entry_id)
                job_id = fields[b"id"].decode()
                if holder != "other" and self._producer.num_logged(job_id):
                    self._make_old(lane, entry_id, holder)
                    self._other.reclaim([])
                    taken = self._other.fetch(1)
                    self._other.release(taken)
                    return job_id in [job.job_id for job in taken]
        return False

    def _make_old(self, lane: str, entry_id: str, holder: str) -> None:
        """As if the holder had not renewed for an hour."""
        self._admin.xclaim(Keys(QUEUE).lane(lane), "workers", holder, 0, [entry_id], idle=3_600_000, justid=True)

    def _add(self, number: int, **fields: object) -> str:
        prompt = self._prompts[number % len(self._prompts)]
        body = {"prompt_token_ids": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True} | fields
        return self._client.enqueue(**body)  # type: ignore[arg-type]

    def _wait_for(self, name: str, label: str) -> None:
        wait_until(lambda: self._worker.metric(name, label) > 0, RUN_S, f"{name} {label}")

    def _ask(self, expr: str) -> float:
        found = self._story.prometheus.at(expr, time.time())
        return found[0].points[0][1] if found else 0.0

    def _scrape_on(self) -> None:
        """Return when Prometheus has seen a whole rate interval, and heartbeats told of the queue, without a change."""
        since = time.time()
        quiet_s = max(5 * SCRAPE_S, HEARTBEAT_S)
        wait_until(lambda: self._ask("timestamp(slotmill_slots)") > since + quiet_s, RUN_S, "scrapes")
