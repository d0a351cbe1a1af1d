"""Random sequences of everything that scripts do, against what must always hold: every job in one place, all of them end.

Workers that lose their leases, replies that are lost, raw entries, settings and operators, on a real server. After each
step the whole queue is read and judged (`World.check`); in the end it is drained, and all that was taken has a result.
"""

import random
from collections.abc import Callable

import pytest
import redis

from tests.support.server import BrokerMaker, end_of, frame_to_emit, leaked_keys
from worker.broker import ENDED, Broker, Delivery
from worker.keys import LANES, Keys
from worker.queue_admin import QueueAdmin

NUM_STEPS = 150
BLAMES = ("none", "bystander", "batch", "solo")
STATES = ("succeeded", "failed", "cancelled", "expired", "dead")


class World:
    """A queue, three workers with what they hold, and what producers were promised."""

    def __init__(self, client: redis.Redis, queue: str, make_broker: BrokerMaker, seed: int) -> None:
        self.random = random.Random(seed)
        self.client = client
        self.queue = queue
        self.keys = Keys(queue)
        self.admin = QueueAdmin(client, queue)
        self.brokers = [make_broker(name) for name in ("ann", "bob", "cyd")]
        self.held: dict[str, list[Delivery]] = {broker.worker_id: [] for broker in self.brokers}
        self.stale: list[tuple[Broker, Delivery]] = []
        """Claims that were given up, ended or taken over: writing under them must change nothing."""
        self.logged: dict[str, int] = {}
        self.promised: set[str] = set()
        self.last_attempt: dict[str, int] = {}
        self.purged: set[tuple[str, str]] = set()
        """Entries, after their lanes, that nobody had seen when their lane was purged."""
        self.trace: list[str] = []

    def step(self) -> None:
        actions: list[Callable[[], object]] = [
            *[self.enqueue] * 6,
            *[self.fetch] * 8,
            *[self.emit] * 5,
            *[self.finish] * 5,
            *[self.release] * 3,
            *[self.retry] * 3,
            *[self.die] * 2,
            *[self.reclaim] * 4,
            self.renew,
            self.acquit,
            self.acquit,
            self.cancel,
            self.adopt,
            self.register,
            self.haunt,
            self.haunt,
            self.add_raw,
            self.add_raw,
            self.make_due,
            self.make_due,
            self.settings,
            self.purge,
            self.replay,
            self.leave,
        ]
        action = self.random.choice(actions)
        self.trace.append(action.__name__)
        action()

    def enqueue(self) -> None:
        rnd = self.random
        job_id = rnd.choice([f"job-{rnd.randrange(40)}", "jöb-ü", "1-0", "a" * 128, "工作"])
        reply = rnd.choice(self.brokers).enqueue(
            job_id,
            rnd.choice(LANES),
            b"body",
            idempotency_key=rnd.choice([None, None, f"key-{rnd.randrange(5)}"]),
            max_queued=rnd.choice([None, 30]),
            delay_s=rnd.choice([0, 0, 0, 100]),
            deadline_ms=rnd.choice([None, None, 1, 2**42]),
        )
        if reply.status in ("queued", "delayed"):
            self.promised.add(job_id)
            self.last_attempt.pop(job_id, None)
            self.logged.pop(job_id, None)

    def add_raw(self) -> None:
        rnd = self.random
        name = rnd.choice([{}, {"id": f"job-{rnd.randrange(40)}"}, {"id": "named"}])
        lanes = rnd.choice([LANES, ("normal",)])
        entry = "*"
        for lane in lanes:  # the same entry id in all of them
            try:
                entry = self.client.xadd(self.keys.lane(lane), {**name, "m": b"raw"}, id=entry)
            except redis.ResponseError:
                entry = self.client.xadd(self.keys.lane(lane), {**name, "m": b"raw"})

    def fetch(self) -> None:
        broker, may = self.random.choice(self.brokers), self.random.random() < 0.5
        jobs = broker.fetch(self.random.randrange(1, 6), aging=2, may_take_suspect=may)
        suspects = [job.job_id for job in jobs if job.is_suspect]
        assert len(suspects) <= may, f"suspects {suspects} for a worker that may take {int(may)}"
        for job in jobs:
            assert job.ending == "cancelled" or (job.lane, job.entry_id) not in self.purged, f"{job.job_id} outlived a purge"
            assert job.attempt > self.last_attempt.get(job.job_id, 0)
            self.last_attempt[job.job_id] = job.attempt
            self.logged[job.job_id] = job.num_logged
        if self.random.random() < 0.9:  # otherwise the reply is lost
            self.held[broker.worker_id] += jobs

    def _any_held(self) -> tuple[Broker, Delivery] | None:
        found = [(broker, job) for broker in self.brokers for job in self.held[broker.worker_id]]
        return self.random.choice(found) if found else None

    def _let_go(self, broker: Broker, job: Delivery) -> None:
        self.held[broker.worker_id].remove(job)
        self.stale = [*self.stale[-20:], (broker, job)]

    def emit(self) -> None:
        if picked := self._any_held():
            broker, job = picked
            n = self.logged[job.job_id] if self._owns(broker, job) else 0
            frames = [frame_to_emit(job, n, n + 3), frame_to_emit(job, n + 3, n + 5)]
            replies = broker.emit(frames[: self.random.choice([1, 2])])
            if replies[-1].status in ("ok", "cancel"):
                self.logged[job.job_id] = replies[-1].n
                assert broker.emit(frames[len(replies) - 1 : len(replies)]) == replies[-1:]
            else:
                assert not self._owns(broker, job)

    def _owns(self, broker: Broker, job: Delivery) -> bool:
        return broker.job(job.job_id).get("lease") == job.lease and broker.job(job.job_id)["state"] == "running"

    def finish(self) -> None:
        if picked := self._any_held():
            broker, job = picked
            was_ours = self._owns(broker, job)
            finish = end_of(job, job.ending or self.random.choice(STATES), result_ttl_s=60)
            statuses = broker.finish([finish])
            assert (statuses == ["ok"]) == was_ours
            assert broker.finish([finish]) == statuses
            self._let_go(broker, job)

    def release(self) -> None:
        if picked := self._any_held():
            broker, job = picked
            blame = self.random.choice(BLAMES)
            was_ours, before = self._owns(broker, job), broker.job(job.job_id)
            for _ in range(self.random.choice([1, 2])):
                broker.release([job], blame)
            after = broker.job(job.job_id)
            if was_ours:
                free = blame in ("none", "bystander")
                assert int(after["released"]) == int(before["released"]) + free
                assert int(after.get("crashes", 0)) == int(before.get("crashes", 0)) + (blame == "solo")
            self._let_go(broker, job)

    def retry(self) -> None:
        if picked := self._any_held():
            broker, job = picked
            was_ours = self._owns(broker, job)
            calls = [(job, self.random.choice([0.0, 100.0]))] * self.random.choice([1, 2])
            statuses = broker.retry(calls)
            assert (statuses[0] == "ok") == was_ours
            self._let_go(broker, job)

    def die(self) -> None:
        """A worker forgets what it held, and no lease of it is young any more."""
        broker = self.random.choice(self.brokers)
        for lane in LANES:
            rows = self.client.xpending_range(self.keys.lane(lane), "workers", "-", "+", 1000, broker.worker_id)
            for row in rows:
                self.client.xclaim(
                    self.keys.lane(lane), "workers", broker.worker_id, 0, [row["message_id"]], idle=3_600_000, justid=True
                )
        if self.random.random() < 0.5:
            for job in list(self.held[broker.worker_id]):
                self._let_go(broker, job)

    def reclaim(self) -> None:
        broker = self.random.choice(self.brokers)
        broker.reclaim(self.held[broker.worker_id])

    def renew(self) -> None:
        broker = self.random.choice(self.brokers)
        lost = broker.renew(self.held[broker.worker_id]).lost
        for job in list(self.held[broker.worker_id]):
            if job.job_id in lost and not self._owns(broker, job):
                self._let_go(broker, job)

    def acquit(self) -> None:
        if picked := self._any_held():
            broker, job = picked
            broker.acquit([job])

    def cancel(self) -> None:
        if self.promised:
            self.random.choice(self.brokers).cancel(self.random.choice(sorted(self.promised)))

    def register(self) -> None:
        lane = self.random.choice(LANES)
        last = self.client.xrevrange(self.keys.lane(lane), count=1)
        self.random.choice(self.brokers).register(last[0][0].decode() if last else "named")

    def adopt(self) -> None:
        if picked := self._any_held():
            broker, job = picked
            if (
                b"id" in (job.fields or {})
                or job.job_id.startswith("adopted")
                or job.num_logged
                or self.logged.get(job.job_id)
                or job.attempt > 1
            ):
                return
            name = f"adopted-{self.random.randrange(10)}"
            adopted = broker.adopt(job, name)
            if adopted is None:
                self.held[broker.worker_id].remove(job)
                return
            assert broker.adopt(job, name) == adopted
            self.held[broker.worker_id].remove(job)
            self.held[broker.worker_id].append(adopted)
            self.logged[name] = 0
            self.last_attempt[name] = adopted.attempt

    def haunt(self) -> None:
        """Somebody who has lost a job writes as if he had not."""
        if not self.stale:
            return
        broker, job = self.random.choice(self.stale)
        if broker.job(job.job_id).get("lease") == job.lease:
            return
        before = self.client.hgetall(self.keys.job(job.job_id)), self.client.xlen(self.keys.log(job.job_id))
        assert broker.emit([frame_to_emit(job, 0, 1)])[0].status == "fenced"
        assert broker.finish([end_of(job)]) == ["fenced"]
        assert broker.retry([(job, 0.0)]) == ["fenced"]
        broker.release([job], "solo")
        broker.acquit([job])
        broker.renew([job])
        assert before == (self.client.hgetall(self.keys.job(job.job_id)), self.client.xlen(self.keys.log(job.job_id)))

    def make_due(self) -> None:
        delayed = self.random.choice(self.keys.delayed_lanes)
        for job_id in self.client.zrange(delayed, 0, self.random.randrange(3)):
            self.client.zadd(delayed, {job_id: 1})

    def settings(self) -> None:
        self.random.choice(
            [self.admin.pause, self.admin.resume, self.admin.resume, self.admin.close, lambda: self.admin.set_limit(None)]
        )()

    def purge(self) -> None:
        lane = self.random.choice(LANES)
        last = self.client.xinfo_groups(self.keys.lane(lane))[0]["last-delivered-id"].decode()
        self.purged |= {(lane, entry.decode()) for entry, _ in self.client.xrange(self.keys.lane(lane), f"({last}")}
        self.admin.purge([lane])

    def replay(self) -> None:
        jobs = self.admin.dead_jobs()
        if self.random.random() < 0.2:
            self.admin.drop([row for rows in list(jobs.values())[:1] for row in rows])
        else:
            for job_id, rows in list(jobs.items())[:2]:
                if self.admin.replay([rows]) == ["queued"]:
                    self.last_attempt.pop(job_id, None)
                    self.logged.pop(job_id, None)
                    self.promised.add(job_id)

    def leave(self) -> None:
        broker = self.random.choice(self.brokers)
        broker.leave()
        broker.clean_up()
        broker.heartbeat({"state": "serving"})

    def check(self) -> None:
        """What holds between any two calls."""
        places: dict[str, list[str]] = {}
        for lane in LANES:
            self._check_lane(lane, places)
        delayed = {job_id.decode(): lane for lane in LANES for job_id in self.client.zrange(self.keys.delayed(lane), 0, -1)}
        for job_id in self._all_jobs():
            self._check_job(job_id, places.get(job_id, []), delayed.get(job_id))
        assert not leaked_keys(self.client, self.queue)

    def _check_lane(self, lane: str, places: dict[str, list[str]]) -> None:
        key = self.keys.lane(lane)
        entries = {entry.decode(): fields for entry, fields in self.client.xrange(key)}
        rows = self.client.xpending_range(key, "workers", "-", "+", 10_000)
        holders = {row["message_id"].decode(): row["consumer"].decode() for row in rows}
        last = _order(self.client.xinfo_groups(key)[0]["last-delivered-id"].decode())
        assert holders.keys() <= entries.keys(), "a claim of an entry that is gone"
        for entry in entries:
            assert entry in holders or _order(entry) > last, f"{lane} {entry} is with nobody and will never be read"
        for job_id in self._all_jobs():
            at, stream, alias = self.client.hmget(self.keys.job(job_id), "entry", "stream", "alias")
            if alias is None and stream.decode() == lane and at.decode() in entries:
                places.setdefault(job_id, []).append(holders.get(at.decode(), ""))

    def _all_jobs(self) -> list[str]:
        prefix = self.keys.job("")
        return [key.decode().removeprefix(prefix) for key in self.client.scan_iter(f"{prefix}*", count=1000)]

    def _check_job(self, job_id: str, holders: list[str], delayed_in: str | None) -> None:
        job = {name.decode(): value.decode() for name, value in self.client.hgetall(self.keys.job(job_id)).items()}
        if "alias" in job:
            return
        state = job["state"]
        has_ended = state.encode() in ENDED
        about = f"{job_id} {state} {holders} {job}"
        assert delayed_in == (job["stream"] if state == "delayed" else None), about
        assert (state == "delayed") == bool(self.client.exists(self.keys.parked(job_id))), about
        assert has_ended == bool(self.client.exists(self.keys.result(job_id))), about
        assert len(holders) == (state in ("queued", "running")), about
        assert self.client.ttl(self.keys.job(job_id)) > 0, about
        if state == "running":
            assert holders == [job["owner"]], about
        if state == "queued":
            assert holders[0] in ("", "suspects" if job.get("suspect") else "released"), about
            assert "lease" not in job, about
        if has_ended:
            assert self.client.ttl(self.keys.job(job_id)) <= 60, about

    def drain(self) -> None:
        """All that is left comes to an end within as many rounds as there can be."""
        self.admin.resume()
        self.admin.set_limit(None)
        for _ in range(300):
            for broker in self.brokers:
                self.held[broker.worker_id] = []
                self.die()
            for delayed in self.keys.delayed_lanes:
                for job_id in self.client.zrange(delayed, 0, -1):
                    self.client.zadd(delayed, {job_id: 1})
            self.brokers[0].reclaim([])
            jobs = self.brokers[0].fetch(50)
            self.brokers[0].finish([end_of(job, job.ending or "succeeded") for job in jobs])
            if self.admin.num_open() == (0, 0):
                break
        assert self.admin.num_open() == (0, 0)
        open_jobs = [job for job in self._all_jobs() if self.brokers[0].job(job).get("state", "").encode() not in ENDED]
        assert not open_jobs
        assert all(self.client.exists(self.keys.result(job_id)) for job_id in self.promised)


def _order(entry: str) -> tuple[int, ...]:
    return tuple(map(int, entry.split("-")))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_job_is_in_one_place_and_ends(
    redis_client: redis.Redis, queue: str, make_broker: BrokerMaker, seed: int
) -> None:
    world = World(redis_client, queue, make_broker, seed)
    try:
        for _ in range(NUM_STEPS):
            world.step()
            world.check()
        world.drain()
    except BaseException as error:
        error.add_note(f"seed {seed}: {' '.join(world.trace)}")
        raise
