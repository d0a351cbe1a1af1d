"""Batch files through the queue: adds the lines as jobs, and writes what becomes of them.

`submit` adds and leaves. `Collector` keeps a window of lines on the server and writes results as they come: neither its memory
nor the server's grows with the file. `fetch` writes what has ended of a batch that somebody has added. Relies on `Ledger` for
the server and on `BatchOutput` for the files; leaves words for people to `queue_commands`.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from operator import not_
from pathlib import Path
from typing import Final, Protocol

from worker.batch.ledger import PAGE, Job, Ledger, Record, job_id, number_of, pages, pause_of
from worker.batch.lines import ID_PREFIX, BadLine, BatchLine, outcome_of
from worker.batch.output import BatchOutput, read_line
from worker.batch.plan import BLANK, TODO, Plan
from worker.frames import FINAL_STATES, Result
from worker.wire import encode_body

WINDOW_BYTES: Final = 64 << 20
"""Bodies of unfinished lines that are kept here, to be added again should the server lose them."""
PAGE_BYTES: Final = 8 << 20
"""Bodies that one call adds; it may overshoot by one."""
BLOCK_S: Final = 0.5
LOOK_S: Final = 5.0
"""How often the jobs themselves are looked at: ends may have passed unheard, or a server have lost what it had."""
SETTLE_S: Final = 1.0
AGAIN: Final = tuple(state for state in FINAL_STATES if state != "succeeded")


class Watch(Protocol):
    """Who is told how it goes."""

    def progress(self, num_done: int) -> None:
        """So many of the good lines are done with."""

    def full(self) -> None:
        """The queue has no room for now."""

    def silence(self) -> None:
        """Nothing has ended since the last call of `progress`; comes once a `BLOCK_S`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be added, and how."""

    batch_id: str
    plan: Plan
    facts: Mapping[str, object]
    """For the record on the server."""
    lane: str = "low"
    result_ttl_s: int = 7 * 86_400

    def job_of(self, line: BatchLine) -> Job:
        """The line as a job."""
        name = job_id(self.batch_id, line.number)
        fields = {"id": name, "batch_id": self.batch_id, "priority": self.lane, "result_ttl_s": self.result_ttl_s}
        return name, encode_body({**line.body, **fields})


@dataclass(slots=True)
class Tally:
    """What has come of it."""

    added: int = 0
    known: int = 0
    """Were on the server already."""
    succeeded: int = 0
    failed: int = 0
    lost: int = 0
    """Ended, and their results are gone."""
    is_cancelled: bool = False


def submit(ledger: Ledger, batch: Batch, watch: Watch) -> Tally:
    """Add all lines that are not there yet, waiting for room where the queue has none."""
    ledger.open(batch.batch_id, **batch.facts)
    tally = Tally()
    todo = batch.plan.todo()
    while jobs := _take(batch, todo, PAGE):
        counts = _add_all(ledger, batch, jobs, watch)
        tally.added += counts["queued"]
        tally.known += counts["duplicate"]
        watch.progress(tally.added + tally.known)
        if counts["cancelled"]:
            tally.is_cancelled = True
            break
    return tally


def _take(batch: Batch, todo: Iterator[BatchLine], at_most: int) -> list[Job]:
    """The next lines as jobs, few of them where they are big."""
    jobs: list[Job] = []
    size = 0
    for line in islice(todo, at_most):
        jobs.append(batch.job_of(line))
        size += len(jobs[-1][1])
        if size >= PAGE_BYTES:
            break
    return jobs


def _add_all(ledger: Ledger, batch: Batch, jobs: Sequence[Job], watch: Watch) -> Counter[str]:
    """Add them, waiting for room where the queue has none; how many met what."""
    counts: Counter[str] = Counter()
    while jobs:
        replies = ledger.add(batch.batch_id, batch.lane, jobs)
        counts.update(reply.status for reply in replies)
        jobs = [job for job, reply in zip(jobs, replies, strict=True) if reply.status == "full"]
        if jobs:
            watch.full()
            time.sleep(pause_of(replies))
    return counts


@dataclass(slots=True)
class Collector:
    """One run of a batch whose results are written as they come."""

    ledger: Ledger
    batch: Batch
    output: BatchOutput
    watch: Watch
    window: int
    is_ordered: bool = False
    """What has ended waits for the lines before it, and counts in the window until then."""
    tally: Tally = field(default_factory=Tally)
    _todo: Iterator[BatchLine] = field(init=False)
    _open: dict[str, bytes] = field(default_factory=dict)
    """Bodies of the jobs that are on the server, as far as known."""
    _refused: list[Job] = field(default_factory=list)
    """To be added, again or since there was no room."""
    _written: list[str] = field(default_factory=list)
    """Succeeded, and not known to be on the disk."""
    _last: int = 0
    """The last line that was added."""
    _is_read: bool = False
    _not_before: float = 0.0
    _looked: float = 0.0
    _settled: float = 0.0

    def run(self) -> Tally:
        """Until every line is done with, or the batch was cancelled and the jobs that it had have ended."""
        self._todo = self.batch.plan.todo()
        position, _ = self.ledger.ends_after(None, self.batch.batch_id, 0)
        self.ledger.open(self.batch.batch_id, **self.batch.facts)
        self._looked = time.monotonic()
        while self._fill() or self._open or self._refused:
            position, ended = self.ledger.ends_after(position, self.batch.batch_id, BLOCK_S)
            self._collect([each for each in dict.fromkeys(ended) if each in self._open])
            if not ended:
                self.watch.silence()
            if time.monotonic() - self._looked >= LOOK_S:
                self._looked = time.monotonic()
                self._look(list(self._open))
            self._settle()
        self._settle(is_last=True)
        if not self.tally.is_cancelled:
            self.ledger.note_written(self.batch.batch_id)
        return self.tally

    def _fill(self) -> bool:
        """Add while there is room in the window and on the queue; whether there is more to add."""
        while not self.tally.is_cancelled and time.monotonic() >= self._not_before:
            jobs = self._refused or _take(self.batch, self._todo, self._room())
            self._refused = []
            if not jobs:
                self._is_read = self._is_read or self._room() > 0
                break
            self._add(jobs[:PAGE])
            self._refused += jobs[PAGE:]
        return not self._is_read and not self.tally.is_cancelled

    def _room(self) -> int:
        if sum(map(len, self._open.values())) >= WINDOW_BYTES:
            return 0
        used = self._last + 1 - self._first_unwritten() if self.is_ordered else len(self._open)
        return max(0, min(PAGE, self.window - used))

    def _first_unwritten(self) -> int:
        return min(map(number_of, (*self._open, *(name for name, _ in self._refused))), default=self._last + 1)

    def _add(self, jobs: list[Job]) -> None:
        replies = self.ledger.add(self.batch.batch_id, self.batch.lane, jobs)
        there = []
        for job, reply in zip(jobs, replies, strict=True):
            if reply.status == "cancelled":
                self.tally.is_cancelled = True
            elif reply.status == "full":
                self._refused.append(job)
            else:
                self._open[job[0]] = job[1]
                self._last = max(self._last, number_of(job[0]))
                self.tally.added += reply.status == "queued"
                there += [job[0]] if reply.status == "duplicate" else []
        if self.tally.is_cancelled:
            self._refused = []
        elif self._refused:
            self.watch.full()
            self._not_before = time.monotonic() + pause_of(replies)
        self.tally.known += len(there)
        self._look(there)

    def _look(self, ids: list[str]) -> None:
        """Collect those that have ended; what the server has lost is added again."""
        for page in pages(ids):
            states = dict(zip(page, self.ledger.states(page), strict=True))
            self._collect([each for each, state in states.items() if state in FINAL_STATES])
            lost = [(each, self._open.pop(each)) for each, state in states.items() if state is None]
            if lost and not self.tally.is_cancelled:
                self.ledger.open(self.batch.batch_id, **self.batch.facts)  # its record may have gone with them
                self._refused += lost

    def _collect(self, ids: list[str]) -> None:
        for each, result in self.ledger.results(ids):
            del self._open[each]
            if result is None:
                self.tally.lost += 1
            elif write(self.output, result, self.tally) and result.state == "succeeded":
                self._written.append(each)
        if ids:
            self.watch.progress(self.tally.succeeded + self.tally.failed + self.tally.lost)

    def _settle(self, *, is_last: bool = False) -> None:
        """Let go of what is on the disk. Of lines that wait for their turn that is none."""
        if not is_last and time.monotonic() - self._settled < SETTLE_S:
            return
        self._settled = time.monotonic()
        self.output.sync()
        first = self._first_unwritten()
        is_safe = [not self.is_ordered or number_of(each) < first for each in self._written]
        safe, self._written = list(compress(self._written, is_safe)), list(compress(self._written, map(not_, is_safe)))
        self.ledger.settle(safe)


def write(output: BatchOutput, result: Result, tally: Tally) -> bool:
    """Write what a job has come to; False where its line is done already."""
    is_new = output.write(outcome_of(result))
    tally.succeeded += is_new and result.state == "succeeded"
    tally.failed += is_new and result.state != "succeeded"
    return is_new


@dataclass(slots=True)
class Fetcher:
    """Writes what has ended of a batch that is on the server."""

    ledger: Ledger
    batch_id: str
    plan: Plan
    output: BatchOutput
    watch: Watch
    tally: Tally = field(default_factory=Tally)

    def fetch(self) -> None:
        """One walk over the lines that are not done, in their order."""
        for page in pages(number for number in range(1, self.plan.last + 1) if self.plan.state_of(number) == TODO):
            ids = [job_id(self.batch_id, number) for number in page]
            states = dict(zip(ids, self.ledger.states(ids), strict=True))
            ended = [each for each, state in states.items() if state in FINAL_STATES]
            self._write(ended)

    def follow(self) -> None:
        """Until the batch has ended."""
        position, _ = self.ledger.ends_after(None, self.batch_id, 0)
        look_at = 0.0
        while not self.ledger.find(self.batch_id).has_ended:
            if time.monotonic() >= look_at:
                began = time.monotonic()
                self.fetch()
                look_at = time.monotonic() + max(LOOK_S, 10 * (time.monotonic() - began))  # a walk over many lines is work
            position, ended = self.ledger.ends_after(position, self.batch_id, BLOCK_S)
            self._write([each for each in dict.fromkeys(ended) if self.plan.state_of(number_of(each)) == TODO])
            if not ended:
                self.watch.silence()
        self.fetch()

    def _write(self, ids: list[str]) -> None:
        for _, result in self.ledger.results(ids):
            if result is not None:
                write(self.output, result, self.tally)
        self.watch.progress(self.tally.succeeded + self.tally.failed)


class Numbers(Plan):
    """A plan of which nothing is known but the numbers of its lines: the input is elsewhere, or another by now."""

    def __init__(self, last: int, fingerprint: str, batch_id: str, written: Sequence[Path]) -> None:
        """`written` are files of an earlier call, whose lines are done."""
        self.path = Path(os.devnull)
        self.last, self.fingerprint = last, fingerprint
        self.num_lines = self.num_good = last
        self.num_done = 0
        self._states = bytearray([BLANK]) + bytearray([TODO]) * last
        self._numbers: dict[str, int] = {}
        prefix = f"{ID_PREFIX}{batch_id}-"
        for path in written:
            with path.open("rb") as file:
                found = [record for line in file if (record := read_line(line)) and record["id"].startswith(prefix)]
            self._numbers |= {record["custom_id"]: number_of(record["id"]) for record in found}

    def __exit__(self, *_: object) -> None: ...

    def bad(self) -> Iterator[BadLine]:
        return iter(())

    def number_of(self, custom_id: str) -> int | None:
        return self._numbers.get(custom_id)


def retry_failed(ledger: Ledger, batch: Batch, watch: Watch) -> int:
    """Run the jobs again that have ended and did not succeed; how many."""
    record = ledger.find(batch.batch_id)
    ids = (job_id(batch.batch_id, number) for number in range(1, batch.plan.last + 1))
    failed = {number_of(each) for page in pages(ids) for each, state in _states(ledger, page) if state in AGAIN}
    failed |= set(map(int, record.fields.get("retrying", "").split()))  # of a call that was killed half way
    ledger.reopen(batch.batch_id)
    num_done = 0
    todo = (line for line in batch.plan.todo() if line.number in failed)
    while jobs := _take(batch, todo, PAGE):
        ledger.open(batch.batch_id, retrying=" ".join(str(number_of(each)) for each, _ in jobs))
        ledger.forget([each for each, _ in jobs])
        _add_all(ledger, batch, jobs, watch)
        ledger.open(batch.batch_id, retrying="")
        watch.progress(num_done := num_done + len(jobs))
    return num_done


def cancel(ledger: Ledger, record: Record, watch: Watch) -> int:
    """End a batch: it takes no more jobs, and those that have not ended do soon; how many those are."""
    ledger.close(record.batch_id)
    num_done = num_asked = 0
    for page in pages(job_id(record.batch_id, number) for number in range(1, record["last"] + 1)):
        num_asked += ledger.cancel(page)
        watch.progress(num_done := num_done + len(page))
    return num_asked


def _states(ledger: Ledger, ids: list[str]) -> Iterator[tuple[str, str | None]]:
    return zip(ids, ledger.states(ids), strict=True)
