"""A batch file as the worker's queue: lines are claimed, run, tried again and ended as jobs of a server are, in this process.

Answers the calls of `Consumer` (`Source`) and `Publisher` (`Sink`) as the scripts in worker/scripts do, so that resuming after
a dead engine, quarantine and retries are the worker's own. Relies on who gives it the lines that are left. Leaves results to
who takes them from `ended`.

1. Nobody else claims, so no lease runs out; a call about an attempt that is over changes nothing, as it may be a repeat.
2. `_open` holds every line that was read and has not ended, in the order of the file; a line is in one of the other tables too.
3. The consumer's thread reads lines and takes results; the publisher's says how they end.
"""

import hashlib
import heapq
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine.errors import one_line
from worker.batch.lines import BatchLine
from worker.claims import Blame, Delivery, Emission, EmitReply, Finish
from worker.errors import InvalidJob, InvalidOption, SlotmillError
from worker.frames import Result, decode_result
from worker.verdict import DEAD_REMEDY
from worker.wire import encode_body

LANE = "normal"


@dataclass(slots=True)
class _Entry:
    """What the hash, the log and the lane's entry of a job hold on a server."""

    line: BatchLine
    index: int
    """Among the lines that were read."""
    body: bytes
    read_ms: int
    is_running: bool = False
    attempt: int = 0
    num_released: int = 0
    num_crashes: int = 0
    is_suspect: bool = False
    log: list[bytes] = field(default_factory=list)
    num_logged: int = 0


class FileBroker:
    """The lines that a plan has left, as jobs `<batch id>-<line>`."""

    is_paused = False

    def __init__(self, lines: Iterator[BatchLine], batch_id: str, worker_id: str, window: int | None = None) -> None:
        """With `window` no line is read that is so many lines or more behind the first one that has not ended."""
        self.worker_id = worker_id
        self.ended: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._lines = lines
        self._batch_id = batch_id
        self._window = window
        self._num_read = 0
        self._is_read = False
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._open: dict[str, _Entry] = {}
        self._suspects: deque[_Entry] = deque()
        self._released: deque[_Entry] = deque()
        self._delayed: list[tuple[float, int, _Entry]] = []

    @property
    def is_done(self) -> bool:
        """Whether every line has ended and its result was taken."""
        return self._is_read and not self._open and self.ended.empty()

    @property
    def next_due_s(self) -> float | None:
        """Seconds until the next line is tried again."""
        with self._lock:
            return max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None

    def ensure_group(self) -> None:
        """See `Broker`, as for all that follows."""

    def leave(self) -> None: ...

    def fetch(self, free: int, *, aging: int = 0, may_take_suspect: bool = True) -> list[Delivery]:
        """A suspect, then lines that ran before, then new ones; `aging` has no lane to help."""
        del aging
        with self._lock:
            self._promote()
            waiting = [self._suspects.popleft()] if may_take_suspect and self._suspects else []
            while self._released and len(waiting) < free:
                waiting.append(self._released.popleft())
            while len(waiting) < free and (entry := self._read()):
                waiting.append(entry)
            return [self._claim(entry) for entry in waiting]

    def wait_for_entry(self, block_s: float) -> None:
        """Returns when a line has ended or waits again, or after `block_s` seconds."""
        self._bell.wait(block_s)
        self._bell.clear()

    def reclaim(self, in_hand: Iterable[Delivery]) -> int:
        """Lines that the worker has dropped since what they say could not be written."""
        held = {delivery.job_id for delivery in in_hand}
        with self._lock:
            lost = [entry for job_id, entry in self._open.items() if entry.is_running and job_id not in held]
            for entry in lost:
                self._give_back(entry, "batch")
        return len(lost)

    def adopt(self, delivery: Delivery, job_id: str) -> Delivery:
        return replace(delivery, job_id=job_id)

    def log_of(self, delivery: Delivery) -> list[bytes]:
        return self._open[delivery.job_id].log

    def emit(self, emissions: Sequence[Emission]) -> list[EmitReply]:
        with self._lock:
            return [self._emit(emission) for emission in emissions]

    def finish(self, finishes: Sequence[Finish]) -> list[str]:
        return [self._finish(finish) for finish in finishes]

    def release(self, deliveries: Sequence[Delivery], blame: Blame = "none") -> None:
        with self._lock:
            for entry in filter(None, map(self._running, deliveries)):
                self._give_back(entry, blame)
        self._bell.set()

    def retry(self, retries: Sequence[tuple[Delivery, float]]) -> list[str]:
        with self._lock:
            for delivery, delay_s in retries:
                if entry := self._running(delivery):
                    entry.is_running = False
                    heapq.heappush(self._delayed, (time.monotonic() + delay_s, entry.index, entry))
        self._bell.set()
        return ["ok"] * len(retries)

    def acquit(self, deliveries: Sequence[Delivery]) -> None:
        with self._lock:
            for entry in filter(None, map(self._running, deliveries)):
                entry.is_suspect = False

    def _running(self, claim: Delivery | Emission) -> _Entry | None:
        """The line of an attempt that is not over."""
        entry = self._open.get(claim.job_id)
        return entry if entry and entry.is_running and entry.attempt == claim.attempt else None

    def _read(self) -> _Entry | None:
        """The next line that can be a job; None when there is none, or not yet."""
        while not self._is_read and not self._is_far_ahead():
            if (line := self._next_line()) is None:
                self._is_read = True
                return None
            job_id = f"{self._batch_id}-{line.number}"
            try:
                body = encode_body(line.body)
            except InvalidJob as refusal:
                self._put(Result(id=job_id, state="failed", code=refusal.code, error=str(refusal)), line)
                continue
            self._open[job_id] = entry = _Entry(line, self._num_read, body, int(time.time() * 1000))
            self._num_read += 1
            return entry
        return None

    def _is_far_ahead(self) -> bool:
        oldest = next(iter(self._open.values()), None)
        return self._window is not None and oldest is not None and self._num_read - oldest.index >= self._window

    def _next_line(self) -> BatchLine | None:
        try:
            return next(self._lines, None)
        except SlotmillError:
            raise
        except Exception as error:  # nothing can be known of the lines behind it
            why = one_line(error)
            raise InvalidOption(f"--input: cannot be read any more: {why}; mend it and go on with --resume") from error

    def _promote(self) -> None:
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            self._queue(heapq.heappop(self._delayed)[2])

    def _claim(self, entry: _Entry) -> Delivery:
        job_id = f"{self._batch_id}-{entry.line.number}"
        entry.attempt += 1
        entry.is_running = True
        return Delivery(
            job_id=job_id,
            entry_id=str(entry.line.number),
            lane=LANE,
            fields={b"m": entry.body},
            size=len(entry.body),
            attempt=entry.attempt,
            counted_attempts=entry.attempt - entry.num_released,
            lease=str(entry.attempt),
            seed=int(hashlib.sha256(job_id.encode()).hexdigest()[:15], 16),  # the same when a batch is resumed
            num_logged=entry.num_logged,
            enqueued_ms=entry.read_ms,
            started_ms=entry.read_ms,
            source="released" if entry.attempt > 1 else "new",
            is_suspect=entry.is_suspect,
            num_crashes=entry.num_crashes,
        )

    def _emit(self, emission: Emission) -> EmitReply:
        if not (entry := self._running(emission)):
            return EmitReply("fenced", 0)
        if emission.previous_n != entry.num_logged:
            return EmitReply("behind", entry.num_logged)
        entry.log.append(emission.frame)
        entry.num_logged = emission.n
        return EmitReply("ok", emission.n)

    def _finish(self, finish: Finish) -> str:
        with self._lock:
            entry = self._running(finish.delivery)
            if entry and finish.expected_n not in (None, entry.num_logged):
                return "behind"
        if entry:
            self._put(decode_result(finish.result), entry.line)
            with self._lock:  # after its result is there: whoever finds nothing open has all results
                del self._open[finish.delivery.job_id]
            self._bell.set()
        return "ok"

    def _put(self, result: Result, line: BatchLine) -> None:
        """With the line's own metadata, as a body that could not be read has none; no dead job is kept anywhere."""
        error = result.error and result.error.removesuffix(DEAD_REMEDY)
        self.ended.put(replace(result, metadata=line.body["metadata"], error=error))

    def _give_back(self, entry: _Entry, blame: Blame) -> None:
        """As worker/scripts/_give_back.lua, which draws the table."""
        entry.is_suspect |= blame != "none"
        entry.num_released += blame in ("none", "bystander")
        entry.num_crashes += blame == "solo"
        entry.is_running = False
        self._queue(entry)

    def _queue(self, entry: _Entry) -> None:
        (self._suspects if entry.is_suspect else self._released).append(entry)
