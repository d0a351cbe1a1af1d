"""What operators do to a whole queue: look, pause, close, bound, purge; and to the jobs that it has set aside.

Relies on the scripts in worker/scripts for each change, one round trip that is safe to repeat, and on fetch.lua and enqueue.lua
for what the settings in `cfg` bring about. Nothing here deletes a job's entry: what is purged ends when a worker comes to it.
No call ships more bodies than the one it is asked for, and none takes longer on a longer queue but for the pages of `purge`,
`dead_rows` and `replay`. Connection errors surface as redis exceptions, as in worker/broker.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import redis

from worker.broker import Broker, LaneCounts
from worker.keys import LANES, PSEUDO_CONSUMERS, WORKER_TTL_S
from worker.lua import Scripts
from worker.queues import served_elsewhere

PAGE: Final = 200
"""Entries, jobs or rows that one call looks at."""
PAGE_BYTES: Final = 4 * 1024 * 1024
"""Bodies that one call looks through; it may overshoot by one."""


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One look at a queue. `purging` are the lanes with entries before their mark; `due_in_s` is the next delayed job's."""

    queue: str
    is_paused: bool
    is_closed: bool
    max_queued: int | None
    lanes: Mapping[str, LaneCounts]
    purging: tuple[str, ...]
    delayed: int
    due_in_s: float | None
    dead: int
    done: int
    workers: tuple[dict[str, str], ...]
    """What each live worker last said of itself, with its `id` and `seen_s`, the seconds since."""

    @property
    def num_waiting(self) -> int:
        """Jobs that no worker holds, delayed ones included."""
        return self.delayed + sum(lane.waiting for lane in self.lanes.values())

    @property
    def num_running(self) -> int:
        """Jobs in the hands of workers."""
        return sum(lane.pending - lane.released - lane.suspects for lane in self.lanes.values())


@dataclass(frozen=True, slots=True)
class DeadRow:
    """One row of the dead, without its body. `lane` is normal where the row does not say."""

    row_id: str
    job_id: str
    lane: str
    why: str
    attempts: int
    owner: str
    error: str
    body_bytes: int

    @property
    def dead_ms(self) -> int:
        """Unix time at which it was set aside."""
        return int(self.row_id.partition("-")[0])


ReplayStatus = Literal["queued", "exists", "gone", "bodiless"]
"""`exists`: another job has the id, the rows stay; `gone`: somebody was faster; `bodiless`: there is nothing to run."""


class QueueAdmin:
    """One queue as its operators see it. `client` as for Broker; it stays the caller's to close."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self._client: Any = client
        self._broker = Broker(client, queue, "admin")
        self._scripts = Scripts(client)
        self.keys = self._broker.keys

    def pause(self) -> bool:
        """Nothing is claimed from now on, what runs goes on; whether it was otherwise."""
        return self._configure("pause", paused="1")

    def resume(self) -> bool:
        """Jobs are claimed and taken from producers again; whether it was otherwise."""
        return self._configure("resume", paused="", closed="")

    def close(self) -> bool:
        """Producers are answered `closed` from now on; whether it was otherwise."""
        return self._configure("", closed="1")

    def set_limit(self, max_queued: int | None) -> bool:
        """At most so many jobs may be unfinished, whoever adds one; whether it was otherwise."""
        return self._configure("", max_queued="" if max_queued is None else str(max_queued))

    def stats(self) -> QueueStats:
        """Counts, settings and live workers; as quick on a queue of a million."""
        lanes = self._broker.queue_counts()
        with self._client.pipeline() as pipe:
            pipe.time().hgetall(self.keys.config).xlen(self.keys.dead).xlen(self.keys.done)
            pipe.zrange(self.keys.workers, 0, -1, withscores=True)
            for delayed in self.keys.delayed_lanes:
                pipe.zrange(delayed, 0, 0, withscores=True)
            (seconds, micros), config, dead, done, beats, *firsts = pipe.execute()
        now_ms = seconds * 1000 + micros // 1000
        settings = {name.decode(): value.decode() for name, value in config.items()}
        return QueueStats(
            queue=self.keys.queue,
            is_paused=settings.get("paused") == "1",
            is_closed=settings.get("closed") == "1",
            max_queued=int(settings["max_queued"]) if "max_queued" in settings else None,
            lanes=lanes,
            purging=tuple(lane for lane in LANES if _is_ahead(settings.get(f"purged:{lane}", "0-0"), lanes[lane])),
            delayed=sum(lane.delayed for lane in lanes.values()),
            due_in_s=min((max(0.0, (due - now_ms) / 1000) for first in firsts for _, due in first), default=None),
            dead=dead,
            done=done,
            workers=self._workers(beats, now_ms),
        )

    def served_elsewhere(self) -> str:
        """See worker/queues.py."""
        return served_elsewhere(self._client, self.keys.queue)

    def num_open(self) -> tuple[int, int]:
        """Jobs in the lanes, waiting or running, and jobs that are not due yet, both of the same moment."""
        with self._client.pipeline() as pipe:
            for lane, delayed in zip(self.keys.lanes, self.keys.delayed_lanes, strict=True):
                pipe.xlen(lane).zcard(delayed)
            counts = pipe.execute()
        return sum(counts[::2]), sum(counts[1::2])

    def purge(self, lanes: Sequence[str] = LANES) -> int:
        """Everything that waits in these lanes now ends as cancelled when a worker comes to it; how many that are.

        What has never been started is marked at once, the rest is asked for its end in pages. Jobs that run go on.
        """
        streams = [self.keys.lane(lane) for lane in lanes]
        never_started: int = sum(self._scripts.run("purge", [self.keys.config, *streams], self.keys.prefix))
        counts = self._broker.queue_counts()
        held = [lane for lane in lanes if counts[lane].released or counts[lane].suspects]
        given_back = sum(self._purge_pending(lane, consumer) for lane in held for consumer in PSEUDO_CONSUMERS)
        return never_started + given_back + sum(map(self._purge_delayed, lanes))

    def dead_rows(self) -> Iterator[DeadRow]:
        """All rows of the dead, newest first. An id may come several times: the first of them counts."""
        start = b"+"
        while start:
            rows, start = self._scripts.run("dead", [self.keys.dead], self.keys.prefix, start, PAGE, PAGE_BYTES)
            yield from map(_dead_row, rows)

    def dead_jobs(self, job_ids: Sequence[str] | None = None) -> dict[str, list[DeadRow]]:
        """Of each dead job, or each of these that is one, its rows, newest first."""
        wanted, found = None if job_ids is None else set(job_ids), dict[str, list[DeadRow]]()
        for row in self.dead_rows():
            if wanted is None or row.job_id in wanted:
                found.setdefault(row.job_id, []).append(row)
        return found

    def dead_body(self, row: DeadRow) -> tuple[Literal["m", "j"], bytes] | None:
        """The body of a dead job as its producer wrote it, `m` msgpack or `j` JSON; None when the row holds none or is gone."""
        for _, fields in self._client.xrange(self.keys.dead, row.row_id, row.row_id):
            if b"m" in fields:
                return "m", fields[b"m"]
            if b"j" in fields:
                return "j", fields[b"j"]
        return None

    def replay(self, jobs: Sequence[Sequence[DeadRow]]) -> list[ReplayStatus]:
        """Give dead jobs, each as its rows, a new life under their ids, in their lanes, whatever limit the queue has."""
        statuses: list[ReplayStatus] = []
        for start in range(0, len(jobs), PAGE):
            calls = [
                (
                    [self.keys.job(rows[0].job_id), self.keys.dead],
                    [self.keys.prefix, rows[0].job_id, *(row.row_id for row in rows)],
                )
                for rows in jobs[start : start + PAGE]
            ]
            statuses += [status.decode() for status in self._scripts.run_many("replay", calls)]
        return statuses

    def drop(self, rows: Sequence[DeadRow]) -> int:
        """Remove rows of the dead; how many were still there."""
        pages = [rows[start : start + PAGE] for start in range(0, len(rows), PAGE)]
        return sum(self._client.xdel(self.keys.dead, *(row.row_id for row in page)) for page in pages)

    def _configure(self, word: str, **settings: str) -> bool:
        pairs = [part for pair in settings.items() for part in pair]
        return bool(self._scripts.run("configure", [self.keys.config], self.keys.prefix, self.keys.control, word, *pairs))

    def _workers(self, beats: Sequence[tuple[bytes, float]], now_ms: int) -> tuple[dict[str, str], ...]:
        alive = heard_of(beats, now_ms)
        with self._client.pipeline(transaction=False) as pipe:
            for name in alive:
                pipe.hgetall(self.keys.worker(name))
            said = pipe.execute(raise_on_error=False)  # a key of another kind says nothing
        return tuple(
            _texts(fields) | {"id": name, "seen_s": f"{max(0.0, seen_s):.1f}"}
            for (name, seen_s), fields in zip(alive.items(), said, strict=True)
        )

    def _purge_pending(self, lane: str, consumer: str) -> int:
        asked: int = 0
        start = b"-"
        while start:
            args = (self.keys.prefix, consumer, start, PAGE, PAGE_BYTES)
            number, start = self._scripts.run("purge_pending", [self.keys.lane(lane)], *args)
            asked += number
        return asked

    def _purge_delayed(self, lane: str) -> int:
        asked: int = 0
        cursor = b"0"
        while True:
            number, cursor = self._scripts.run("purge_delayed", [self.keys.delayed(lane)], self.keys.prefix, cursor, PAGE)
            asked += number
            if cursor == b"0":
                return asked


def heard_of(beats: Iterable[tuple[bytes, float]], now_ms: float) -> dict[str, float]:
    """Worker -> seconds since its last heartbeat, of those heard of within three; `beats` are their names with unix ms."""
    seen_s = {name.decode(errors="replace"): (now_ms - at) / 1000 for name, at in beats}
    return {name: age_s for name, age_s in seen_s.items() if age_s <= WORKER_TTL_S}


def _texts(said: object) -> dict[str, str]:
    """What a worker, or whoever may write there, says of it."""
    fields = said.items() if isinstance(said, dict) else ()
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in fields}


def _is_ahead(mark: str, lane: LaneCounts) -> bool:
    """Whether entries before the mark are still to come to a worker."""
    return _order(mark) > _order(lane.delivered)


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))


def _dead_row(reply: Sequence[Any]) -> DeadRow:
    row_id, body_bytes, *flat = reply
    texts = [part.decode(errors="replace") for part in flat]
    fields = dict(zip(texts[::2], texts[1::2], strict=True))
    lane = fields.get("lane", "normal")
    return DeadRow(
        row_id=row_id.decode(),
        job_id=fields.get("id", ""),
        lane=lane if lane in LANES else "normal",
        why=fields.get("why", ""),
        attempts=int(fields.get("attempts", 0)),
        owner=fields.get("owner", ""),
        error=fields.get("error", ""),
        body_bytes=body_bytes,
    )
