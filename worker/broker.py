"""Every change of a job's state on the server, as typed calls around the Lua scripts in worker/scripts.

Each call is one round trip that is safe to repeat. Connection errors surface as redis exceptions and nothing is retried
here: the caller owns reconnecting and resends what it does not know to have arrived. Threads may share a Broker; each call
takes a connection of its own from the client's pool. What a body means is worker/wire.py's business, who decides to call is
the consumer's.
"""

import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import redis
from redis.exceptions import ResponseError

from worker import keys as names
from worker import log
from worker.claims import Blame, Delivery, Emission, EmitReply, Finish, RenewReply
from worker.connection import hear, publish, subscribe
from worker.errors import InvalidOption, ServerUnavailable
from worker.frames import FINAL_STATES
from worker.keys import GROUP, LANES, Keys
from worker.lua import Call, Scripts
from worker.wire import MAX_BODY_BYTES

ENDED: Final = tuple(state.encode() for state in FINAL_STATES)
MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
"""fetch stops taking jobs once they carry this much; it may overshoot by a few bodies."""
SCAN_LIMIT: Final = 500
"""Entries that one fetch looks at, so that a flood of duplicates cannot hold the server."""
RECLAIM_ENTRIES: Final = 1_000
"""Entries of each lane that one reclaim looks at."""
LOOK_ENTRIES: Final = 10_000
LOOK_BYTES: Final = 64 * 1024 * 1024
"""How far `register` looks through what no worker has seen."""
BLOCK_MARGIN_S: Final = 5.0
UNHEARD_S: Final = 10.0
MAX_UNHEARD: Final = 16
"""For so long fetches give back what earlier ones claimed whose reply was lost: a slow server may run those later."""

_log = log.get("broker")
_group_lines = log.Throttle()


@dataclass(frozen=True, slots=True)
class EnqueueReply:
    """`job_id` is the job in the queue, which an idempotency key may have chosen; `full` says when to come again, `closed` that
    the queue takes nothing until it is opened again, `cancelled` that its batch was.
    """

    status: Literal["queued", "delayed", "duplicate", "full", "closed", "cancelled"]
    job_id: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """Entries of a lane, of those the ones that workers hold, and the age of the oldest one that waits.

    Of those that wait, `released` and `suspects` have run before; nothing up to the entry `delivered` is new to the workers.
    `delayed` jobs are not due yet and have no entry.
    """

    entries: int
    pending: int
    oldest_age_s: float
    released: int = 0
    suspects: int = 0
    delayed: int = 0
    delivered: str = field(default="0-0", compare=False)

    @property
    def waiting(self) -> int:
        """Entries that no worker holds."""
        return max(0, self.entries - self.pending)


class Broker:
    """One worker's (or client's) view of one queue.

    Args:
        client: bytes replies, no retries, explicit socket timeouts, as worker/connection.py makes them; stays the caller's.
        queue: see Keys.
        worker_id: name under which jobs are held; unique among live workers.
        lease_s: how long a job may go without being renewed before others take it.
    """

    def __init__(self, client: redis.Redis, queue: str, worker_id: str, lease_s: float = 30.0) -> None:
        if worker_id in ("", *names.PSEUDO_CONSUMERS):
            taken = f"empty, or one of {', '.join(names.PSEUDO_CONSUMERS)}, which are taken"
            raise InvalidOption(f"worker_id: {worker_id!r}: {taken}; choose another name")
        self.keys = Keys(queue)
        self.worker_id = worker_id
        self.lease_s = lease_s
        self._client: Any = client  # redis-py's types cannot tell its sync replies from awaitables
        self._scripts = Scripts(client)
        self._delivered = dict.fromkeys(self.keys.lanes, "0-0")
        self.is_paused = False
        """Whether the queue was paused at the last fetch."""
        self.next_due_s: float | None = None
        """Seconds from the last fetch until the next delayed job is due; None when there is none."""
        self._unheard: dict[str, float] = {}
        """Nonces of fetches whose reply was lost, and when."""
        self._bell: redis.Redis | None = None
        self._bell_block_s = 0.0

    def close(self) -> None:
        """Closes the doorbell's connection."""
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    def ensure_group(self) -> None:
        """Makes lanes and group where missing, from the first entry on. Raises ServerUnavailable when the server is too old."""
        if self._client.execute_command("COMMAND INFO", "function") == [None]:
            raise ServerUnavailable("server: has no FUNCTION command: Redis >= 7.0 or Valkey >= 7.2 is needed; use a newer one")
        for lane in self.keys.lanes:
            try:
                self._client.xgroup_create(lane, GROUP, "0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    def enqueue(
        self,
        job_id: str,
        lane: str,
        body: bytes,
        *,
        idempotency_key: str | None = None,
        max_queued: int | None = None,
        delay_s: float = 0.0,
        deadline_ms: int | None = None,
        tenant: str | None = None,
        batch_id: str | None = None,
    ) -> EnqueueReply:
        """Adds a job unless its id or idempotency key is known or `max_queued` unfinished entries are in the lanes.

        `lane` is high, normal or low; `body` is msgpack, as wire.encode_body makes it, and is not looked at; it can be claimed
        after `delay_s`; `deadline_ms` is unix time. Tenant and batch are kept with the job.
        """
        kept = {"deadline_ms": deadline_ms, "tenant": tenant, "batch": batch_id}
        call = self._enqueue_call(job_id, lane, body, kept, idempotency_key, max_queued, delay_s)
        return _enqueue_reply(self._scripts.run("enqueue", call[0], *call[1]))

    def enqueue_many(self, jobs: Sequence[tuple[str, bytes]], lane: str, batch_id: str) -> list[EnqueueReply]:
        """Adds the jobs of a batch, each an id and a body, in one pipeline."""
        calls = [self._enqueue_call(job_id, lane, body, {"batch": batch_id}) for job_id, body in jobs]
        return [_enqueue_reply(reply) for reply in self._scripts.run_many("enqueue", calls)]

    def _enqueue_call(
        self,
        job_id: str,
        lane: str,
        body: bytes,
        kept: Mapping[str, str | int | None],
        idempotency_key: str | None = None,
        max_queued: int | None = None,
        delay_s: float = 0.0,
    ) -> Call:
        of_job = (self.keys.lane(lane), self.keys.job(job_id))
        keys = [*of_job, self.keys.done, self.keys.config, *self.keys.lanes, *self.keys.delayed_lanes]
        if idempotency_key is not None:
            keys.append(self.keys.idempotency(idempotency_key))
        pairs = [part for name, value in kept.items() if value is not None for part in (name, value)]
        bound = "" if max_queued is None else max_queued
        args = (job_id, body, bound, names.IDEMPOTENCY_TTL_S, int(delay_s * 1000), *pairs)
        return keys, (self.keys.prefix, *args)

    def fetch(self, free: int, *, aging: int = 64, may_take_suspect: bool = True) -> list[Delivery]:
        """Claims up to `free` jobs: high before normal before low, in each lane a suspect, then released, then new ones.

        Of each `aging` claims that pass by a waiting job of a lower lane the next is that lane's. A call claims one suspect
        at most. What a call has claimed whose reply was lost, the next gives back first. May answer fewer than there are (many
        duplicates, big bodies); wait_for_entry then returns at once.
        """
        if free <= 0:
            return []
        keys = (*self.keys.lanes, self.keys.config, self.keys.cursor)
        nonce = secrets.token_hex(8)  # for each call, not each worker: after a failover attempt numbers repeat
        limits = (MAX_BODY_BYTES, MAX_REPLY_BYTES, free, SCAN_LIMIT, aging, int(may_take_suspect))
        args = (self.worker_id, nonce, *limits, *self._unheard)
        try:
            taken, delivered, due_ms, is_paused = self._run_on_group("fetch", keys, *args)
        except (redis.ConnectionError, redis.TimeoutError):
            self._unheard = {**dict(list(self._unheard.items())[1 - MAX_UNHEARD :]), nonce: time.monotonic()}
            raise
        self._unheard = {lost: at for lost, at in self._unheard.items() if time.monotonic() - at < UNHEARD_S}
        self._delivered |= {lane: entry.decode() for lane, entry in zip(self.keys.lanes, delivered, strict=False)}
        self.is_paused = bool(is_paused)
        self.next_due_s = None if due_ms < 0 else due_ms / 1000
        return [_delivery(row, self.keys.queue) for row in taken]

    def reclaim(self, in_hand: Iterable[Delivery]) -> int:
        """Lets jobs whose lease ran out wait for their next claim, but for those in the caller's own hands; how many."""
        skip = (f"{job.lane}/{job.entry_id}" for job in in_hand)
        args = (self.worker_id, int(self.lease_s * 1000), RECLAIM_ENTRIES, *skip)
        return int(self._run_on_group("reclaim", (self.keys.cursor, *self.keys.lanes), *args))

    def wait_for_entry(self, block_s: float) -> None:
        """Returns when there are entries that no worker had seen at the last fetch, or after `block_s` seconds.

        Call it with a free slot only, and not while the queue is paused: entries that were left in the lane make it return at
        once. A job that another worker gives back does not ring, nor does one that becomes due.
        """
        block_ms = max(1, int(block_s * 1000))
        bell: Any = self._doorbell(block_s)
        bell.xread(self._delivered, count=1, block=block_ms)

    def adopt(self, delivery: Delivery, job_id: str) -> Delivery | None:
        """Moves a claimed job to the id that its body named; None when that job exists already (or ours is lost): forget it."""
        keys = [self.keys.job(delivery.job_id), self.keys.job(job_id), self.keys.lane(delivery.lane)]
        args = (self.keys.prefix, delivery.job_id, job_id, delivery.lease, delivery.entry_id)
        return replace(delivery, job_id=job_id) if self._scripts.run("adopt", keys, *args) == b"ok" else None

    def read_log(self, job_id: str) -> list[bytes]:
        """All frames of a job so far, in order."""
        return [fields[b"m"] for _, fields in self._client.xrange(self.keys.log(job_id))]

    def log_of(self, delivery: Delivery) -> list[bytes]:
        """The frames of a claimed job."""
        return self.read_log(delivery.job_id)

    def renew(self, deliveries: Sequence[Delivery]) -> RenewReply:
        """Extends the leases of `deliveries` from now."""
        if not deliveries:
            return RenewReply(set(), set())
        lost, cancelled = self._run_on_group("renew", [self.keys.cursor], self.worker_id, *_claims(deliveries))
        return RenewReply({job_id.decode() for job_id in lost}, {job_id.decode() for job_id in cancelled})

    def emit(self, emissions: Sequence[Emission]) -> list[EmitReply]:
        """Logs and publishes frames in one pipeline; a frame that is in the log already is answered `ok`, not added again."""
        calls = [(self._emit_keys(emission), self._emit_args(emission)) for emission in emissions]
        return [EmitReply(status.decode(), int(n)) for status, n in self._scripts.run_many("emit", calls)]

    def finish(self, finishes: Sequence[Finish]) -> list[Literal["ok", "fenced", "behind"]]:
        """Ends jobs in one pipeline: result, end frame, lifetimes, acknowledgement; `dead` also keeps the body for people."""
        calls = [(self._finish_keys(finish.delivery), self._finish_args(finish)) for finish in finishes]
        return [status.decode() for status in self._scripts.run_many("finish", calls)]

    def release(self, deliveries: Sequence[Delivery], blame: Blame = "none") -> None:
        """Gives jobs back: claimable at once by any worker, before newer entries."""
        if deliveries:
            self._run_on_group("release", [self.keys.cursor], blame, *_claims(deliveries))

    def retry(self, retries: Sequence[tuple[Delivery, float]]) -> list[Literal["ok", "fenced"]]:
        """Holds jobs back, each until its next attempt is due in so many seconds; this attempt counts."""
        calls = []
        for job, delay_s in retries:
            keys = [self.keys.job(job.job_id), self.keys.lane(job.lane)]
            calls.append((keys, (self.keys.prefix, job.job_id, job.lease, job.entry_id, int(delay_s * 1000))))
        return [status.decode() for status in self._scripts.run_many("retry", calls)]

    def acquit(self, deliveries: Sequence[Delivery]) -> None:
        """Ends the suspicion of jobs that have run alone for long enough."""
        if deliveries:
            pairs = [part for job in deliveries for part in (job.job_id, job.lease)]
            self._scripts.run("acquit", [self.keys.cursor], self.keys.prefix, *pairs)

    def clean_up(self) -> int:
        """Forgets consumers that hold nothing and whose workers are gone; how many."""
        keys = (self.keys.workers, self.keys.worker(self.worker_id), *self.keys.lanes)
        return int(self._run_on_group("janitor", keys, names.WORKER_TTL_S, ""))

    def leave(self) -> None:
        """Forgets this worker, unless it still holds something."""
        keys = (self.keys.workers, self.keys.worker(self.worker_id), *self.keys.lanes)
        self._scripts.run("janitor", keys, self.keys.prefix, names.WORKER_TTL_S, self.worker_id)

    def cancel(self, job_id: str) -> str | None:
        """Asks for a job's end (`cancel <id>` on the control channel); its state now, None when unknown."""
        state = self._scripts.run("cancel", [self.keys.job(job_id)], self.keys.prefix, job_id, self.keys.control)
        return None if state is None else str(state.decode())

    def register(self, job_id: str) -> str | None:
        """The state of a job; one that a bare XADD added and no worker has seen is looked for, and queued from now on."""
        state = self._scripts.run("register", self.keys.lanes, self.keys.prefix, job_id, LOOK_ENTRIES, LOOK_BYTES)
        return None if state is None else str(state.decode())

    def listen(self) -> redis.client.PubSub:
        """A confirmed subscription to the control channel, on a connection of its own; the caller's to close."""
        with contextlib.ExitStack() as on_failure:
            listener = subscribe(self._client, self.keys.control)
            on_failure.callback(listener.close)
            if hear(listener, BLOCK_MARGIN_S) is None:
                raise redis.TimeoutError("no confirmation of a subscription")
            on_failure.pop_all()
            return listener

    def show(self, snapshot: bytes) -> None:
        """Publishes what this worker says of itself to all who look."""
        publish(self._client, self.keys.look, snapshot)

    def job(self, job_id: str) -> dict[str, str]:
        """What the server knows of a job; empty when unknown."""
        found = self._client.hgetall(self.keys.job(job_id))
        if b"alias" in found:
            found = self._client.hgetall(self.keys.job(found[b"alias"].decode()))
        return {name.decode(): value.decode() for name, value in found.items()}

    def result(self, job_id: str) -> bytes | None:
        """The stored result, msgpack."""
        stored: bytes | None = self._client.get(self.keys.result(job_id))
        return stored

    def still_open(self, job_ids: Sequence[str]) -> list[str]:
        """Those of the jobs that have not ended as far as the server knows."""
        with self._client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(self.keys.job(job_id), "state")
            states: list[bytes | None] = pipe.execute()
        return [job_id for job_id, state in zip(job_ids, states, strict=True) if state not in ENDED]

    def has_worker(self) -> bool:
        """Whether a worker has said within three heartbeats that it serves this queue."""
        return bool(self._client.exists(self.keys.workers))

    def queue_counts(self) -> dict[str, LaneCounts]:
        """Counts for each lane, by priority."""
        rows = self._scripts.run("counts", self.keys.lanes, self.keys.prefix)
        return {
            lane: LaneCounts(entries, pending, age_ms / 1000, released, suspects, delayed, delivered.decode())
            for lane, (entries, pending, age_ms, released, suspects, delayed, delivered) in zip(LANES, rows, strict=True)
        }

    def paused_and_dead(self) -> tuple[bool, int]:
        """Whether the queue is paused now (`is_paused` is what the last fetch found), and how many rows the dead have."""
        with self._client.pipeline(transaction=False) as pipe:
            paused, dead = pipe.hget(self.keys.config, "paused").xlen(self.keys.dead).execute()
        return paused == b"1", dead

    def heartbeat(self, fields: Mapping[str, str | int | float]) -> None:
        """Says for three heartbeats that this worker is alive, and what of it."""
        pairs = [part for pair in fields.items() for part in pair]
        args = (self.keys.prefix, self.worker_id, names.WORKER_TTL_S, *pairs)
        self._scripts.run("heartbeat", [self.keys.workers, self.keys.worker(self.worker_id)], *args)

    def _run_on_group(self, name: str, keys: Sequence[str], *args: Any) -> Any:
        """Runs a script; makes the group anew, once, where FLUSHALL or a failover took it."""
        try:
            return self._scripts.run(name, keys, self.keys.prefix, *args)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
        _group_lines.write(_log.warning, "group_recreated", queue=self.keys.queue)
        self.ensure_group()
        return self._scripts.run(name, keys, self.keys.prefix, *args)

    def _doorbell(self, block_s: float) -> redis.Redis:
        """A client for blocking reads only, whose socket waits longer than the server blocks."""
        if self._bell is None or block_s > self._bell_block_s:
            self.close()
            pool = self._client.connection_pool
            timeouts = {"socket_timeout": block_s + BLOCK_MARGIN_S}
            own = redis.ConnectionPool(connection_class=pool.connection_class, **(pool.connection_kwargs | timeouts))
            self._bell, self._bell_block_s = redis.Redis.from_pool(own), block_s
        return self._bell

    def _emit_keys(self, emission: Emission) -> list[str]:
        return [self.keys.job(emission.job_id), self.keys.log(emission.job_id)]

    def _emit_args(self, emission: Emission) -> list[Any]:
        channel = self.keys.channel(emission.job_id) if emission.publish else ""
        guard = [emission.lease, emission.attempt, emission.previous_n, emission.n]
        return [self.keys.prefix, *guard, channel, names.RESULT_TTL_S, emission.frame]

    def _finish_keys(self, delivery: Delivery) -> list[str]:
        of_job = [key(delivery.job_id) for key in (self.keys.job, self.keys.log, self.keys.result)]
        return [*of_job, self.keys.lane(delivery.lane), self.keys.done, self.keys.dead]

    def _finish_args(self, finish: Finish) -> list[Any]:
        job = finish.delivery
        guard = [job.lease, job.attempt, "" if finish.expected_n is None else finish.expected_n, job.entry_id]
        end = [finish.state, finish.code, finish.result, finish.end_frame, self.keys.channel(job.job_id), finish.result_ttl_s]
        notes = [finish.batch_id or "", finish.error, names.DONE_MAXLEN, names.DEAD_MAXLEN]
        return [self.keys.prefix, job.job_id, *guard, *end, *notes]


def _enqueue_reply(reply: Sequence[bytes]) -> EnqueueReply:
    status, known, retry_after_ms = (part.decode() for part in reply)
    return EnqueueReply(status, known, int(retry_after_ms) / 1000)  # type: ignore[arg-type]


def _claims(deliveries: Iterable[Delivery]) -> list[str]:
    return [part for job in deliveries for part in (job.job_id, job.lease, job.lane, job.entry_id)]


def _delivery(row: Sequence[Any], queue: str) -> Delivery:
    job_id, entry_id, lane, flat, size, attempt, released, lease, seed, n, enqueued_ms, started_ms, source, *more = row
    ending, suspect, crashes = more
    return Delivery(
        job_id=job_id.decode(),
        entry_id=entry_id.decode(),
        lane=lane.decode(),
        fields=None if flat is None else dict(zip(flat[::2], flat[1::2], strict=True)),
        size=int(size),
        attempt=int(attempt),
        counted_attempts=int(attempt) - int(released),
        lease=lease.decode(),
        seed=int(seed, 16),
        num_logged=int(n),
        enqueued_ms=int(enqueued_ms),
        started_ms=int(started_ms),
        source=source.decode(),
        ending=ending.decode(),
        is_suspect=suspect == b"1",
        num_crashes=int(crashes),
        queue=queue,
    )
