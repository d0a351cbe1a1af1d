"""Looks at a queue and its workers: asks on the control channel, hears the answers, keeps those of the last seconds.

Relies on `QueueAdmin` for the queue's own figures and on the heartbeats for which workers there are: who does not answer within
a moment is silent. Nothing is stored on the server. Leaves what the numbers mean to `figures` and how they look to
`view`. Connection errors surface as redis exceptions; the next look subscribes anew.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import redis

from worker.codec import MalformedError
from worker.connection import hear, publish, subscribe
from worker.keys import LANES
from worker.partitions import summed
from worker.queue_admin import QueueAdmin, QueueStats
from worker.snapshot import Snapshot, decode
from worker.top.figures import Figures, between, total

ANSWER_S = 1.0
"""A worker that has not answered by then is busy otherwise, stopped or dead."""
KEPT_S = 10.0
"""Figures are of so many seconds, where as many have been seen."""
FRESH_S = 2.5
"""A worker is shown as it was last seen for so long, before it is called silent."""
MAX_WORKERS = 256
"""Of those that answer and have no heartbeat."""
POLL_S = 0.05
OLD_S = 0.1
"""How long what came between two looks is read away, before it is cheaper to subscribe anew."""
CONFIRM_S = 5.0


@dataclass(frozen=True)
class WorkerLook:
    """A worker at one look. `now` is None while it is silent; `beat` is what its heartbeat says, empty without one."""

    id: str
    now: Snapshot | None
    before: Snapshot | None
    beat: Mapping[str, str]

    @cached_property
    def figures(self) -> Figures:
        """What happened between the two snapshots, or since its start."""
        return between(self.before, self.now) if self.now else Figures()


@dataclass(frozen=True)
class Look:
    """One look at a queue. `at` is unix time; `unreadable` counts what came instead of answers."""

    at: float
    queue: QueueStats
    workers: tuple[WorkerLook, ...]
    unreadable: int = 0

    @cached_property
    def figures(self) -> Figures:
        """Of all workers that answered."""
        return total(worker.figures for worker in self.workers if worker.now)


class Watch:
    """Looks at one queue, or at all partitions of one, over connections of its own."""

    def __init__(self, clients: Sequence[redis.Redis], queue: str, partitions: Sequence[str]) -> None:
        """A client for each of `partitions`, as for `QueueAdmin`; they stay the caller's to close."""
        self._queue = queue
        self._roads = [_Road(client, name) for client, name in zip(clients, partitions, strict=True)]
        self._seen: dict[str, deque[tuple[float, Snapshot]]] = {}

    def close(self) -> None:
        """End the subscriptions."""
        for road in self._roads:
            road.close()

    def served_elsewhere(self) -> str:
        """Where this queue has no worker, those of the server that have some, in words: worker/queues.py."""
        is_served = any(road.admin.stats().workers for road in self._roads)
        return "" if is_served else self._roads[0].admin.served_elsewhere()

    def look(self, may_wait: Callable[[], bool] = lambda: True) -> Look:
        """Ask, and wait up to `ANSWER_S` for the answers of all whose heart beats, or as long as it `may_wait`."""
        try:
            return self._look(may_wait)
        except redis.RedisError:
            self.close()
            raise

    def _look(self, may_wait: Callable[[], bool]) -> Look:
        for road in self._roads:
            road.ask()
        until = time.monotonic() + ANSWER_S
        stats = merged(self._queue, [road.admin.stats() for road in self._roads])
        awaited = {worker["id"] for worker in stats.workers} | self._seen.keys()  # FLUSHALL takes heartbeats
        newest, unreadable = dict[str, Snapshot](), 0
        while time.monotonic() < until and not awaited <= newest.keys() and may_wait():
            for road in self._roads:
                for answer in road.heard(POLL_S / len(self._roads), until):
                    unreadable += answer is None
                    if answer is not None and (answer.id in awaited or answer.id in newest or len(newest) < MAX_WORKERS):
                        newest[answer.id] = max(newest.get(answer.id, answer), answer, key=lambda each: each.up_s)
        for answer in newest.values():
            self._keep(answer)
        return Look(time.time(), stats, tuple(self._workers(stats)), unreadable)

    def _keep(self, answer: Snapshot) -> None:
        """One answer for each look: those to others who look, or to other partitions, may be a moment apart."""
        now = time.monotonic()
        kept = self._seen.setdefault(answer.id, deque())
        if not kept or answer.up_s != kept[-1][1].up_s:
            kept.append((now, answer))
        while len(kept) > 2 and now - kept[1][0] >= KEPT_S:
            kept.popleft()

    def _workers(self, stats: QueueStats) -> list[WorkerLook]:
        beats = {worker["id"]: worker for worker in stats.workers}
        now = time.monotonic()
        fresh = {name: kept for name, kept in self._seen.items() if now - kept[-1][0] < FRESH_S}
        self._seen = {name: kept for name, kept in self._seen.items() if name in beats or name in fresh}
        return [_worker(name, fresh.get(name), beats.get(name, {})) for name in sorted({*beats, *fresh})]


class _Road:
    """One queue, or partition: where to ask and where the answers come."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self._client: Any = client
        self.admin = QueueAdmin(client, queue)
        self._answers: redis.client.PubSub | None = None

    def ask(self) -> None:
        if self._answers is not None and not self._has_passed(self._answers):
            self.close()
        if self._answers is None:
            self._answers = subscribe(self._client, self.admin.keys.look)
            if hear(self._answers, CONFIRM_S) is None:
                raise redis.TimeoutError("no confirmation of a subscription")
        publish(self._client, self.admin.keys.control, "look")

    @staticmethod
    def _has_passed(answers: redis.client.PubSub) -> bool:
        """Whether all that came since the last look is read: it was true then, and who said it may be dead by now."""
        until = time.monotonic() + OLD_S
        while time.monotonic() < until:
            if hear(answers, 0.0) is None:
                return True
        return False

    def heard(self, timeout_s: float, until: float) -> list[Snapshot | None]:
        """What has come, waiting for the first of it, reading no longer than `until`; None for what cannot be read."""
        assert self._answers is not None, "ask first"
        answers: list[Snapshot | None] = []
        while time.monotonic() < until and (heard := hear(self._answers, 0.0 if answers else timeout_s)):
            if heard[0] == "message":
                answers.append(_read(heard[1]))
        return answers

    def close(self) -> None:
        if self._answers is not None:
            self._answers.close()
            self._answers = None


def merged(queue: str, stats: Sequence[QueueStats]) -> QueueStats:
    """Partitions as one queue: sums; the worst of ages; paused, closed and bounded where all are; each worker once."""
    if len(stats) == 1:
        return stats[0]
    limits = [each.max_queued for each in stats if each.max_queued is not None]
    due = [each.due_in_s for each in stats if each.due_in_s is not None]
    return replace(
        stats[0],
        queue=queue,
        is_paused=all(each.is_paused for each in stats),
        is_closed=all(each.is_closed for each in stats),
        max_queued=sum(limits) if len(limits) == len(stats) else None,
        lanes={lane: summed([each.lanes[lane] for each in stats]) for lane in LANES},
        purging=tuple(lane for lane in LANES if any(lane in each.purging for each in stats)),
        delayed=sum(each.delayed for each in stats),
        due_in_s=min(due, default=None),
        dead=sum(each.dead for each in stats),
        done=sum(each.done for each in stats),
        workers=tuple({worker["id"]: worker for each in stats for worker in each.workers}.values()),
    )


def _worker(name: str, kept: deque[tuple[float, Snapshot]] | None, beat: Mapping[str, str]) -> WorkerLook:
    if not kept:
        return WorkerLook(name, None, None, beat)
    return WorkerLook(name, kept[-1][1], kept[0][1] if len(kept) > 1 else None, beat)


def _read(packed: object) -> Snapshot | None:
    try:
        return decode(packed) if isinstance(packed, bytes) else None
    except MalformedError:
        return None
