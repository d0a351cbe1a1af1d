"""The attempts in our hands, and the few ways in which one leaves them.

Shared by all threads of the worker, under one lock that is held for bookkeeping only. Relies on `Attempt`; leaves it to the
consumer, the reader and the leases to say when something ends, and to the publisher to write it.

1. An attempt is *held* from the claim until the server has acknowledged its end, or until it is dropped as somebody else's.
2. It is *open* until it has an `ending`; only open attempts count against the slots.
3. It is *inside* while the engine has it. Whoever ends it takes it out, so the engine's late tokens find nobody.
4. What goes to the engine is sent under the lock, so that an abort never overtakes its request.
5. An ending is set once and never changes.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from engine.messages import Abort
from engine.request import Request
from worker import log
from worker.attempt import CANCELLED, Attempt, Ending
from worker.metrics import Metrics
from worker.tracing import Tracing

_log = log.get("inflight")


class InFlight:
    """The table of attempts. Each of `sends` hands a message to one of the engines; none may block."""

    def __init__(self, metrics: Metrics, *sends: Callable[[Request | Abort], None], tracing: Tracing | None = None) -> None:
        self._metrics = metrics
        self.tracing = tracing
        """Takes the attempts that have left, where spans are exported."""
        self._sends = sends
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._held: dict[str, Attempt] = {}
        self._inside: dict[str, Attempt] = {}
        self._dirty: set[Attempt] = set()
        self.changed = threading.Event()
        """Set when a slot may have become free; the consumer clears it."""
        self.busy_since = [0.0] * len(sends)
        """`time.monotonic` of when each engine last got work after having none."""

    def held(self) -> list[Attempt]:
        """All attempts whose lease is ours to keep."""
        with self._lock:
            return list(self._held.values())

    def inside(self, engine: int | None = None) -> list[Attempt]:
        """The attempts that this engine has, or any."""
        with self._lock:
            return [attempt for attempt in self._inside.values() if engine in (None, attempt.engine)]

    def num_slots_of(self, engine: int) -> int:
        """How many slots the attempts take that this engine has."""
        return sum(attempt.width for attempt in self.inside(engine))

    @property
    def num_held(self) -> int:
        """How many attempts are held."""
        return len(self._held)

    @property
    def num_open(self) -> int:
        """How many slots the attempts take that are held and have no ending yet."""
        with self._lock:
            return sum([attempt.width for attempt in self._held.values() if attempt.ending is None])

    def get(self, request_id: str) -> Attempt | None:
        """The attempt that an engine has under this name."""
        with self._lock:
            return self._inside.get(request_id)

    def add(self, attempt: Attempt) -> None:
        """Hold a claimed attempt."""
        with self._lock:
            self._held[attempt.request_id] = attempt
            if attempt.ending:
                self._mark(attempt)

    def enter(self, attempt: Attempt, *requests: Request) -> bool:
        """Hand it to the engine, as one request or one for each choice; its start is now due in the log.

        False when its end was asked for or it was lost meanwhile.
        """
        with self._lock:
            if attempt.asked or attempt.ending or attempt.request_id not in self._held:
                return False
            if not any(other.engine == attempt.engine for other in self._inside.values()):
                self.busy_since[attempt.engine] = time.monotonic()
            self._inside[attempt.request_id] = attempt
            attempt.entered_at = time.time()
            for request in requests:
                self._send(request)
            self._mark(attempt)
            return True

    def cancel(self, job_id: str) -> None:
        """End the attempts at this job, of which there may be none."""
        for attempt in self.held():
            if attempt.delivery.job_id == job_id:
                self.ask(attempt, CANCELLED)

    def ask(self, attempt: Attempt, ending: Ending) -> None:
        """End it with what it has: at once, or, as long as that is not read from its log, when the consumer comes to it."""
        with self._lock:
            if not attempt.outputs:
                attempt.asked = attempt.asked or ending
                return
        self.end(attempt, ending)

    def end(self, attempt: Attempt, ending: Ending, *, inside: bool = True) -> bool:
        """Set how it ends, once; the publisher writes it. False when it has an ending already or was lost.

        `inside` is false when the engine has let go of it by itself.
        """
        with self._lock:
            if attempt.ending or attempt.request_id not in self._held:
                return False
            for output in attempt.outputs:
                output.close(ending.finish_reason)
            attempt.ending = ending
            attempt.ended_at = time.time()
            self._leave(attempt, abort=inside)
            self._mark(attempt)
        self.changed.set()
        return True

    def end_choice(self, attempt: Attempt, choice: int) -> None:
        """Take one choice out of the engine; the others go on."""
        with self._lock:
            if attempt.request_id in self._inside:
                self._send(Abort(attempt.request_id, choice))
        self.changed.set()

    def drop(self, attempt: Attempt, why: str) -> bool:
        """Forget an attempt at a job that somebody else has now, or that (`unwritable`, from within the handler of the error)
        cannot be written; False when it was gone already.
        """
        if not self._remove(attempt):
            return False
        self._metrics.jobs_fenced.labels(why).inc()
        self._metrics.wasted_tokens.labels("fenced").inc(attempt.num_in_vain)
        if self.tracing:
            self.tracing.note(attempt, why if why == "unwritable" else "fenced")
        if why == "unwritable":
            _log.log(attempt.level(logging.ERROR), "job_unwritable", **attempt.about, exc_info=True)
        else:
            _log.log(attempt.level(logging.WARNING), "job_fenced", **attempt.about, found_by=why, tokens=attempt.num_tokens)
        return True

    def done(self, attempt: Attempt) -> bool:
        """Let go of an attempt whose end is acknowledged."""
        return self._remove(attempt)

    def touch(self, attempts: Iterable[Attempt]) -> None:
        """Tell the publisher that these have something new."""
        with self._lock:
            for attempt in attempts:
                self._mark(attempt)

    def wait_for_writing(self, timeout_s: float) -> set[Attempt]:
        """The attempts touched since the last call, waiting for one up to `timeout_s`."""
        with self._lock:
            if not self._dirty:
                self._written.wait(timeout_s)
            dirty, self._dirty = self._dirty, set()
            return dirty

    def is_held(self, attempt: Attempt) -> bool:
        """Whether it is still ours to write."""
        with self._lock:
            return attempt.request_id in self._held

    def wake(self) -> None:
        """Make the publisher look around, so that it sees that the worker leaves."""
        with self._lock:
            self._written.notify_all()

    def _mark(self, attempt: Attempt) -> None:
        self._dirty.add(attempt)
        self._written.notify_all()

    def _leave(self, attempt: Attempt, *, abort: bool) -> None:
        if attempt.request_id in self._inside and abort:
            self._send(Abort(attempt.request_id))
        self._inside.pop(attempt.request_id, None)

    def _send(self, message: Request | Abort) -> None:
        """To the engine of an attempt that is inside."""
        self._sends[self._inside[message.request_id].engine](message)

    def _remove(self, attempt: Attempt) -> bool:
        with self._lock:
            found = self._held.pop(attempt.request_id, None) is not None
            self._dirty.discard(attempt)
            self._leave(attempt, abort=True)
        self.changed.set()
        return found
