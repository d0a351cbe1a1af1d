"""May we take another job now? What was taken is refused, ended, or handed to the engine.

The main thread's loop. Relies on a `Source` for claims, on `wire` and `text` for what a body means. Leaves everything after the
hand-over to the reader and the publisher, to `verdict` who is not tried again, and to the engine whether a log already meets an
end in tokens.

A claimed job is held before anything can go wrong with it, so every road leads to an ending: whatever is unexpected fails that
job alone, and what the server did not answer is tried again.
"""

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from redis.exceptions import ResponseError

from engine.request import Request
from worker import log
from worker.attempt import EXPIRED, MISSED_BY_ENGINE, RELEASED_BY_DRAIN, Attempt, Ending, completed, internal_error
from worker.claims import Delivery
from worker.connection import hide_password
from worker.errors import InvalidJob, ServerUnavailable, SlotmillError, UnknownVersion
from worker.inflight import InFlight
from worker.link import Link, LinkDownError
from worker.metrics import Metrics
from worker.reader import Destination, Serving
from worker.requests import check_fit, replay, requests_for
from worker.settings import Settings
from worker.tenants import Tenants
from worker.traceparent import parse, trace_id_for
from worker.verdict import ISOLATED_STEPS, dead_letter
from worker.wire import MAX_BODY_BYTES, Job, decode_job

WAIT_S = 1.0
AHEAD_DIVISOR = 16
"""One job for 16 slots, one at least, is taken ahead: a slot that becomes free is filled in the next step and not after a
round trip: with answers of 20 tokens that step would be 5 % of all slot-steps."""
AHEAD_WAIT_S = 0.05
"""Nothing is taken ahead before a worker with a free slot has had this time to take it."""

WINDOW_WAIT_S = 0.1
"""While a suspect runs alone its end is waited for, so that the next may come at once; new jobs are looked for so often."""

_log = log.get("consumer")


class Source(Protocol):
    """Where jobs come from: a queue on a server, the partitions of one, or a file. See `Broker` for what each call means."""

    @property
    def is_paused(self) -> bool: ...
    @property
    def next_due_s(self) -> float | None: ...
    def ensure_group(self) -> None: ...
    def fetch(self, free: int, *, aging: int = ..., may_take_suspect: bool = ...) -> Sequence[Delivery]: ...
    def reclaim(self, in_hand: Iterable[Delivery]) -> int: ...
    def wait_for_entry(self, block_s: float) -> None: ...
    def adopt(self, delivery: Delivery, job_id: str) -> Delivery | None: ...
    def log_of(self, delivery: Delivery) -> list[bytes]: ...
    def leave(self) -> None: ...


class Consumer:
    """The loop that takes jobs."""

    def __init__(
        self,
        broker: Source,
        link: Link,
        inflight: InFlight,
        *,
        engines: Destination,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._broker = broker
        self._link = link
        self._faults = log.Throttle(log.FAULT_LINE_S)
        self._inflight = inflight
        self._engines = engines
        self._metrics = metrics
        self._settings = settings
        self._tenants = Tenants(settings.tenant_weights, are_isolated=settings.isolate_tenants)
        self._claimed: deque[Attempt] = deque()
        self._has_group = False
        self._reclaim_at = 0.0
        self.turned_at = time.monotonic()
        """When the loop last came around; a probe watches it."""

    def run(self, may_go_on: Callable[[], bool]) -> None:
        """Take jobs until `may_go_on` says no, or, with `burst`, until there are none."""
        while may_go_on():
            self.turned_at = time.monotonic()
            try:
                self._expire()
                is_done = self._turn()
            except LinkDownError as error:
                if self._settings.burst and not self._link.last_ok:  # a script waits for its end, not for a server
                    where, why = hide_password(self._settings.redis_url), str(error.__cause__)[:200].rstrip(".")
                    raise ServerUnavailable(
                        f"--redis-url: {where}: {why}; mend it, or start a server with `worker redis`"
                    ) from error
                self._link.pause()
                continue
            except SlotmillError:
                raise  # a server that cannot serve
            except Exception:  # noqa: BLE001  a worker that ends takes its neighbours' work with it
                self._faults.write(_log.error, "turn_failed", exc_info=True)
                self._link.pause()
                continue
            if is_done:
                return

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait until an attempt has ended or `timeout_s` is over; ends what is past its deadline."""
        self.turned_at = time.monotonic()
        self._expire()
        self._inflight.changed.wait(min(timeout_s, self._until_deadline_s()))
        self._inflight.changed.clear()

    def give_back_claimed(self) -> None:
        """Release what was claimed and not started yet; for a worker that leaves."""
        while self._claimed:
            attempt = self._claimed.popleft()
            try:
                traceparent = self._decode(attempt).traceparent
            except InvalidJob as refusal:
                traceparent = refusal.traceparent
            self._note_known(attempt, traceparent)  # the line that tells of it names its trace
            self._inflight.end(attempt, RELEASED_BY_DRAIN)

    def say_goodbye(self) -> None:
        """Take this worker's name from the queue; a server that does not answer now forgets it by itself."""
        if self._link.is_failing or not self._has_group:
            return
        with contextlib.suppress(LinkDownError):
            self._link.call("leave", self._broker.leave)

    def _turn(self) -> bool:
        """Take what may be taken, or wait; whether a burst is over."""
        if not self._has_group:
            self._link.call("ensure_group", self._broker.ensure_group)
            self._has_group = True
        self._reclaim()
        serving = self._engines.serving
        if self._claimed and serving:
            self._start_claimed()
        elif not serving or not (room := self._room()):
            self.wait_for_room(WAIT_S)
        elif not self._claim(room):
            if self._broker.is_paused:
                self.wait_for_room(WAIT_S)
            elif self._has_suspect:
                self.wait_for_room(WINDOW_WAIT_S)  # the doorbell would not tell of the window's end
            elif not self._settings.burst:
                self._wait_for_entry()
            elif self._inflight.num_held:
                self.wait_for_room(WAIT_S)
            else:
                return True
        return False

    def _room(self) -> int:
        """How many jobs may be taken now: those that find a free slot, or, after a moment, the few that are taken ahead."""
        if (free := self._free_slots()) > 0:
            return free
        ahead = max(1, self._engines.num_slots // AHEAD_DIVISOR)
        if free + ahead > 0:
            self.wait_for_room(AHEAD_WAIT_S)
            free = self._free_slots()
        return free if free > 0 else max(0, free + ahead)  # a job of several choices may have taken more than that

    @property
    def _has_suspect(self) -> bool:
        return any(attempt.is_suspect for attempt in self._inflight.held())

    def _free_slots(self) -> int:
        return self._engines.num_slots - self._inflight.num_open

    def _claim(self, free: int) -> bool:
        """Claim up to `free` jobs, of suspects one at a time. Whether there were any."""
        aging, was_paused = self._settings.engine.aging, self._broker.is_paused
        may = not self._has_suspect
        for delivery in self._link.call("fetch", lambda: self._broker.fetch(free, aging=aging, may_take_suspect=may)):
            self._metrics.jobs_claimed.labels(delivery.source).inc()
            attempt = Attempt(delivery, num_logged=delivery.num_logged)
            if delivery.attempt == 1:
                self._metrics.queue_time_seconds.labels(attempt.priority).observe(attempt.queued_s)
            self._inflight.add(attempt)
            self._claimed.append(attempt)
        if self._broker.is_paused != was_paused:
            _log.info("queue_resumed" if was_paused else "queue_paused", queue=self._settings.queue)
        return bool(self._claimed)

    def _reclaim(self) -> None:
        """When it is time to look: let the jobs of dead workers wait for whoever is free."""
        if time.monotonic() < self._reclaim_at:
            return
        in_hand = [attempt.delivery for attempt in self._inflight.held()]
        next_at = time.monotonic() + self._settings.reclaim_s * random.uniform(0.8, 1.0)
        try:
            if num_found := self._link.call("reclaim", lambda: self._broker.reclaim(in_hand)):
                _log.warning("jobs_reclaimed", jobs=num_found)
        except LinkDownError as error:
            if isinstance(error.__cause__, ResponseError):
                self._reclaim_at = next_at  # it answers, but one job's key is none of ours: the others must be claimed
            raise
        self._reclaim_at = next_at

    def _start_claimed(self) -> None:
        """Start what is claimed, in order, each where most is free. It stays in line while the server does not answer."""
        while self._claimed and (serving := self._engines.serving):
            self.turned_at = time.monotonic()  # many long prompts take their time
            self._start_guarded(self._claimed[0], serving)
            self._claimed.popleft()

    def _start_guarded(self, attempt: Attempt, serving: Serving) -> None:
        try:
            ending = self._start(attempt, serving)
        except InvalidJob as refusal:
            ending = self._refused(attempt, refusal)
        except LinkDownError:
            raise
        except Exception as error:  # noqa: BLE001  one bad job must not take the worker with it
            _log.debug("job_failed", **attempt.about, exc_info=True)
            ending = internal_error(error)
        if ending:  # what was asked for comes first: nobody waits for another reason any more
            self._inflight.end(attempt, attempt.asked or ending)

    def _start(self, attempt: Attempt, serving: Serving) -> Ending | None:
        """From a claimed entry to a request inside the engine, or to an ending. `InvalidJob` for what cannot be served."""
        job = self._decode(attempt)
        if not self._is_under(attempt, job.id):
            return None
        self._note_known(attempt, job.traceparent)
        attempt.job = job
        if not attempt.asked and (given_up := dead_letter(attempt)):
            return given_up
        self._check_model(job)
        attempt.prompt_token_ids = tuple(serving.tokenizer.encode_prompt(job, serving.ready.max_model_len))
        check_fit(job, len(attempt.prompt_token_ids), serving.ready.max_slots)
        replay(attempt, job, serving.tokenizer, self._read_log(attempt))
        self._metrics.resumed_tokens.inc(attempt.num_tokens)
        if is_past_deadline(attempt, time.time()):
            return EXPIRED
        requests = requests_for(
            attempt,
            job,
            tenant=self._tenants.number(job.tenant),
            weight=self._tenants.weight(job.tenant),
            cache_salt=self._tenants.cache_salt(job.tenant),
            isolated_steps=ISOLATED_STEPS if attempt.is_alone else 0,
        )
        return self._hand_over(attempt, requests, serving) if requests else completed(attempt)

    def _hand_over(self, attempt: Attempt, requests: list[Request], serving: Serving) -> Ending | None:
        attempt.engine = serving.engine
        if not self._inflight.enter(attempt, *requests):
            return attempt.asked
        if asked := log.private(prompt=_prompt_of(attempt)):
            _log.log(attempt.level(), "job_started", **attempt.about, **asked)
        self._metrics.prompt_tokens.inc(len(attempt.prompt_token_ids))
        return None if self._engines.has(serving) else MISSED_BY_ENGINE

    def _decode(self, attempt: Attempt) -> Job:
        delivery = attempt.delivery
        if delivery.fields is None:
            raise InvalidJob("body", f"{delivery.size} bytes", f"at most {MAX_BODY_BYTES} bytes; shorten the prompt")
        return decode_job(delivery.fields, lane=delivery.lane)

    def _is_under(self, attempt: Attempt, job_id: str | None) -> bool:
        """Continue under the id that the body names, if any; False when that job exists, and this entry is a duplicate."""
        if not job_id or job_id == attempt.delivery.job_id:
            return True
        adopted = self._link.call("adopt", lambda: self._broker.adopt(attempt.delivery, job_id))
        self._inflight.done(attempt)
        if adopted is None:
            return False
        attempt.delivery = adopted
        self._inflight.add(attempt)
        return True

    def _note_known(self, attempt: Attempt, traceparent: str | None) -> None:
        """Its id and trace are known from now on; once, though a start may be tried again."""
        if attempt.is_known:
            return
        attempt.is_known = True
        delivery, parent = attempt.delivery, parse(traceparent)
        attempt.traceparent = traceparent
        if parent:
            attempt.trace_id = parent.trace_id
        elif self._inflight.tracing:
            attempt.trace_id = trace_id_for(delivery.job_id, delivery.enqueued_ms)
        if delivery.source == "reclaimed":
            about = {"tokens": delivery.num_logged, "crashes": delivery.num_crashes}
            _log.log(attempt.level(), "job_taken_over", **attempt.about, **about)

    def _check_model(self, job: Job) -> None:
        served = self._settings.model_name
        if job.model is not None and job.model != served:
            raise InvalidJob("model", job.model, f"this worker serves {served}; leave it out or name that one")

    def _read_log(self, attempt: Attempt) -> list[bytes]:
        """The frames of earlier attempts."""
        if not attempt.delivery.num_logged:
            return []
        return self._link.call("read_log", lambda: self._broker.log_of(attempt.delivery))

    def _refused(self, attempt: Attempt, refusal: InvalidJob) -> Ending | None:
        if not self._is_under(attempt, refusal.job_id):
            return None
        self._note_known(attempt, refusal.traceparent)
        return Ending("dead" if isinstance(refusal, UnknownVersion) else "failed", "error", refusal.code, str(refusal))

    def _wait_for_entry(self) -> None:
        if self._free_slots() <= 0:
            return  # only with a free slot: what the doorbell tells must be taken at once
        due_s = WAIT_S if self._broker.next_due_s is None else max(0.01, self._broker.next_due_s)
        wait_s = min(WAIT_S, self._until_deadline_s(), due_s, max(0.05, self._reclaim_at - time.monotonic()))
        self._link.call("wait", lambda: self._broker.wait_for_entry(wait_s))

    def _expire(self) -> None:
        now = time.time()
        for attempt in self._inflight.held():
            if attempt.is_going_on and is_past_deadline(attempt, now):
                self._inflight.ask(attempt, EXPIRED)

    def _until_deadline_s(self) -> float:
        """Seconds to the next deadline of an open attempt, at least 10 ms."""
        deadlines = [
            attempt.job.deadline_ms / 1000
            for attempt in self._inflight.held()
            if attempt.is_going_on and attempt.job and attempt.job.deadline_ms is not None
        ]
        return max(0.01, min(deadlines) - time.time()) if deadlines else WAIT_S


def is_past_deadline(attempt: Attempt, now: float) -> bool:
    """Whether the job's own deadline has passed at unix time `now`."""
    return attempt.job is not None and attempt.job.deadline_ms is not None and attempt.job.deadline_ms <= now * 1000


def _prompt_of(attempt: Attempt) -> str:
    job = attempt.job
    return str(job and (job.prompt or job.messages or job.prompt_token_ids))
