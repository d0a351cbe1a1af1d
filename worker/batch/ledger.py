"""What the server knows of batches: a record of each, and the jobs of a batch, many at a time.

Relies on the scripts for each change and on the client for a server that goes and comes back: every call is safe to repeat, and
is repeated. A record counts what the scripts see: jobs added, and ended by state. Leaves files to the road.
"""

import os
import random
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import redis

from worker.broker import ENDED, Broker, EnqueueReply
from worker.client import CLOSED_S, Client
from worker.errors import InvalidOption, QueueClosed
from worker.frames import FINAL_STATES, Result, decode_result
from worker.lua import Scripts

PAGE: Final = 200
"""Jobs that one pipeline, or one script, is about."""
MEMORY_S: Final = 1.0
"""How long a server without memory is left alone."""
SETTLED_TTL_S: Final = 60
"""Life of a job's keys from when its result is on the client's disk: a late duplicate must still be recognised."""

T = TypeVar("T")
Job = tuple[str, bytes]
"""Id and body."""


@dataclass(frozen=True, slots=True)
class Record:
    """A batch as its record has it. Numbers of a batch that was only begun are those so far."""

    batch_id: str
    fields: Mapping[str, str]

    def __getitem__(self, name: str) -> int:
        """A number of the record; 0 where it says nothing."""
        return int(self.fields.get(name, 0))

    @property
    def num_good(self) -> int:
        """Lines that jobs are made of."""
        return self["total"] - self["bad"]

    @property
    def num_ended(self) -> int:
        """Jobs that have, in whatever way."""
        return sum(self[state] for state in FINAL_STATES)

    @property
    def num_failed(self) -> int:
        """Lines whose jobs ended in another way than by success, as far as a count of jobs tells."""
        return min(self.num_ended - self["succeeded"], self.num_good)

    @property
    def num_succeeded(self) -> int:
        """Lines whose jobs succeeded. A line that was run for more than one output has made more than one job."""
        return min(self["succeeded"], self.num_good - self.num_failed)

    @property
    def is_cancelled(self) -> bool:
        """Whether it takes no jobs any more."""
        return "cancelled_ms" in self.fields

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come of it as it is."""
        added = self["added"]
        return self.num_ended >= (added if self.is_cancelled or "written_ms" in self.fields else max(added, self.num_good))

    @property
    def was_retried(self) -> bool:
        """Whether lines that had failed were added again."""
        return "retrying" in self.fields

    @property
    def status(self) -> str:
        """In OpenAI's words."""
        if self.is_cancelled:
            return "cancelled" if self.has_ended else "cancelling"
        return "completed" if self.has_ended else "in_progress"

    def to_openai(self) -> dict[str, Any]:
        """As `openai.types.Batch`, and beside its fields the counts by state."""
        counts = {name: self[name] for name in ("added", *FINAL_STATES)}
        requests = {"total": self["total"], "completed": self.num_succeeded, "failed": self["bad"] + self.num_failed}
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.fields.get("endpoint", ""),
            "input_file_id": self.fields.get("input", ""),
            "completion_window": "30d",
            "status": self.status,
            "created_at": self["created_ms"] // 1000,
            "request_counts": requests,
            "counts": counts,
        }


def job_id(batch_id: str, number: int) -> str:
    """The job of a line."""
    return f"{batch_id}-{number}"


def number_of(job: str) -> int:
    """The line of a job."""
    return int(job.rpartition("-")[2])


class Ledger:
    """The batches of one queue. `server` stays the caller's to close."""

    def __init__(self, server: redis.Redis, queue: str) -> None:
        self._server: Any = server
        self.broker = Broker(server, queue, "client")
        self.keys = self.broker.keys
        self._scripts = Scripts(server)
        self._ask = Client(server, queue)._call  # its patience, without its single jobs
        self.lacks_memory = False
        """Why the jobs that were added last met a full queue: the server had no room for more."""

    def open(self, batch_id: str, **facts: object) -> Record:
        """Says what a batch is; its record, made where there was none."""
        keys = (self.keys.batch(batch_id), self.keys.batches)
        pairs = [part for name, value in facts.items() for part in (name, os.fsencode(str(value)))]  # of paths as they are
        flat = self._ask(lambda: self._scripts.run("batch", keys, self.keys.prefix, batch_id, *pairs))
        return _record(batch_id, dict(zip(flat[::2], flat[1::2], strict=True)))

    def get(self, batch_id: str) -> Record | None:
        """The record of a batch."""
        found = self._ask(lambda: self._server.hgetall(self.keys.batch(batch_id)))
        return _record(batch_id, found) if b"created_ms" in found else None

    def find(self, batch_id: str) -> Record:
        """The same. `InvalidOption` where there is none."""
        if (record := self.get(batch_id)) is not None:
            return record
        remedy = "`worker batch list` names those there are; one is remembered for 30 days"
        raise InvalidOption(f"batch {batch_id[:64]!r}: not on queue {self.keys.queue}; {remedy}")

    def records(self) -> list[Record]:
        """All that are remembered, the newest first."""
        ids = [key.decode() for key in self._ask(lambda: self._server.zrange(self.keys.batches, 0, -1, desc=True))]
        found = self._pipeline([("HGETALL", self.keys.batch(batch_id)) for batch_id in ids])
        pairs = [dict(zip(flat[::2], flat[1::2], strict=True)) if isinstance(flat, list) else flat for flat in found]
        return [_record(batch_id, fields) for batch_id, fields in zip(ids, pairs, strict=True) if fields]

    def close(self, batch_id: str) -> None:
        """A batch takes no jobs from now on."""
        self.open(batch_id, cancelled_ms=int(time.time() * 1000))

    def note_written(self, batch_id: str) -> None:
        """All its lines are in somebody's files, those that the server has lost or never had included."""
        self.open(batch_id, written_ms=int(time.time() * 1000))

    def reopen(self, batch_id: str) -> None:
        """It takes some again."""
        self._ask(lambda: self._server.hdel(self.keys.batch(batch_id), "cancelled_ms"))

    def add(self, batch_id: str, lane: str, jobs: Sequence[Job]) -> list[EnqueueReply]:
        """One reply for each. `QueueClosed` when the queue is drained."""
        replies = self._ask(lambda: self._enqueue(jobs, lane, batch_id))
        if any(reply.status == "closed" for reply in replies):
            remedy = (
                f"`worker queue resume --queue {shlex.quote(self.keys.queue)}` reopens it; then go on with the same command"
            )
            raise QueueClosed(f"queue {self.keys.queue}: closed: it takes no jobs while it is drained; {remedy}", CLOSED_S)
        return replies

    def _enqueue(self, jobs: Sequence[Job], lane: str, batch_id: str) -> list[EnqueueReply]:
        try:
            replies = self.broker.enqueue_many(jobs, lane, batch_id)
        except redis.OutOfMemoryError:  # as a full queue: who collects meanwhile what has ended makes room
            self.lacks_memory = True
            return [EnqueueReply("full", name, MEMORY_S) for name, _ in jobs]
        self.lacks_memory = False
        return replies

    def states(self, ids: Sequence[str]) -> list[str | None]:
        """How each job stands; None for one that is not known."""
        found = self._pipeline([("HGET", self.keys.job(each), "state") for each in ids])
        return [None if state is None else state.decode() for state in found]

    def results(self, ids: Sequence[str]) -> Iterator[tuple[str, Result | None]]:
        """What each job that has ended has come to; None where nothing is stored (any more)."""
        for page in pages(ids):
            for each, stored in zip(page, self._pipeline([("GET", self.keys.result(each)) for each in page]), strict=True):
                yield each, None if stored is None else decode_result(stored)

    def cancel(self, ids: Sequence[str]) -> int:
        """Asks for the end of jobs; how many had not ended."""
        args = [((self.keys.job(each),), (self.keys.prefix, each, self.keys.control)) for each in ids]
        states = self._ask(lambda: self._scripts.run_many("cancel", args))
        return sum(state is not None and state not in ENDED for state in states)

    def forget(self, ids: Sequence[str]) -> list[str | None]:
        """Forgets those that have ended and did not succeed; the state that each was in, None for one that is not known."""
        args = [((self.keys.job(each),), (self.keys.prefix, each)) for each in ids]
        states = self._ask(lambda: self._scripts.run_many("forget", args))
        return [None if state is None else state.decode() for state in states]

    def settle(self, ids: Sequence[str]) -> None:
        """Lets go soon of jobs whose results are on the client's disk."""
        for page in pages(ids):
            self._ask(partial(self._scripts.run, "settle", [self.keys.cursor], self.keys.prefix, SETTLED_TTL_S, *page))

    def ends_after(self, position: str | None, batch_id: str, block_s: float) -> tuple[str, list[str]]:
        """(where to go on, jobs of the batch that have ended since `position`); None begins now, without waiting.

        The stream is capped, so that some may be missed: look at the jobs now and then.
        """
        if position is None:
            last = self._ask(lambda: self._server.xrevrange(self.keys.done, count=1))
            return last[0][0].decode() if last else "0-0", []
        block_ms = max(1, int(block_s * 1000))
        found = self._ask(lambda: self._server.xread({self.keys.done: position}, count=10 * PAGE, block=block_ms))
        rows = found[0][1] if found else []
        ended = [fields[b"id"].decode() for _, fields in rows if fields.get(b"batch") == batch_id.encode()]
        return rows[-1][0].decode() if rows else position, ended

    def _pipeline(self, commands: Sequence[Sequence[str]]) -> list[Any]:
        def send() -> list[Any]:
            with self._server.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                answers: list[Any] = pipe.execute()
                return answers

        return self._ask(send) if commands else []


def pages(items: Iterable[T]) -> Iterator[list[T]]:
    """`items`, as many at a time as one call is about."""
    rest = iter(items)
    while page := list(islice(rest, PAGE)):
        yield page


def pause_of(replies: Sequence[EnqueueReply]) -> float:
    """Seconds until there may be room, so that producers do not come back at once."""
    return max((reply.retry_after_s for reply in replies), default=0.0) * random.uniform(1.0, 1.5)


def _record(batch_id: str, fields: Mapping[bytes, bytes]) -> Record:
    return Record(batch_id, {name.decode(): os.fsdecode(value) for name, value in fields.items()})
