"""Every change of a job's state on the server, as typed calls around the Lua scripts in worker/scripts.

Each call is one round trip that is safe to repeat. Connection errors surface as redis exceptions and nothing is retried
here: the caller owns reconnecting and resends what it does not know to have arrived. Threads may share a Broker; each call
takes a connection of its own from the client's pool. What a body means is worker/wire.py's business, who decides to call is
the consumer's.
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args
from urllib.parse import parse_qs, urlsplit

import redis
from redis.exceptions import ResponseError

from worker import keys as names
from worker import log
from worker.errors import InvalidOption, ServerUnavailable
from worker.frames import FinalState
from worker.keys import GROUP, LANES, Keys
from worker.lua import Scripts
from worker.wire import MAX_BODY_BYTES

ENDED: Final = tuple(state.encode() for state in get_args(FinalState))
MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
"""fetch and reclaim stop taking jobs once they carry this much; they may overshoot by a few bodies."""
SCAN_LIMIT: Final = 500
"""Entries that one fetch looks at, so that a flood of duplicates cannot hold the server."""
RECLAIM_ROUNDS: Final = 200
LOOK_ENTRIES: Final = 10_000
LOOK_BYTES: Final = 64 * 1024 * 1024
"""How far `register` looks through what no worker has seen."""
BLOCK_MARGIN_S: Final = 5.0
MAX_TIMEOUT_S: Final = 86_400.0
URL_ARGUMENTS: Final = (
    "db",
    "username",
    "password",
    "client_name",
    "socket_timeout",
    "socket_connect_timeout",
    "socket_keepalive",
    "health_check_interval",
    "max_connections",
)

_log = log.get("broker")
_group_lines = log.Throttle()


@dataclass(frozen=True, slots=True)
class Delivery:
    """A job that is ours for now.

    `attempt` only ever grows and fences; `counted_attempts` leaves out attempts that were given back. `size` is the bytes of
    the body, or of all that stands around it where that is more; `fields` is None when it is over MAX_BODY_BYTES. `seed` (60
    bits) stays the same for all attempts. `num_logged` tokens are in the log. With `ending` the job is to be finished in that
    state without being run.
    """

    job_id: str
    entry_id: str
    lane: str
    fields: dict[bytes, bytes] | None
    size: int
    attempt: int
    counted_attempts: int
    lease: str
    seed: int
    num_logged: int
    enqueued_ms: int
    source: Literal["new", "released", "reclaimed"]
    ending: Literal["", "cancelled", "expired"] = ""
    started_ms: int = 0
    """Unix time of the job's first claim, by whichever worker."""


@dataclass(frozen=True, slots=True)
class EnqueueReply:
    """`job_id` is the job in the queue, which an idempotency key may have chosen; `full` says when to come again."""

    status: Literal["queued", "duplicate", "full"]
    job_id: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RenewReply:
    """Job ids that are no longer ours, and ids of ours whose end was asked for."""

    lost: set[str]
    cancelled: set[str]


@dataclass(frozen=True, slots=True)
class Emission:
    """One frame for a job's log: tokens previous_n..n-1 of all choices; a control frame has previous_n == n."""

    job_id: str
    lease: str
    attempt: int
    previous_n: int
    n: int
    frame: bytes
    publish: bool = True


@dataclass(frozen=True, slots=True)
class EmitReply:
    """`ok`, `cancel`: the frame is in the log; `behind`: it is not, the log has `n` tokens; `fenced`: the job is not ours."""

    status: Literal["ok", "cancel", "fenced", "behind"]
    n: int


@dataclass(frozen=True, slots=True)
class Finish:
    """How a job ends. `expected_n` refuses the end (`behind`) unless the log has that many tokens."""

    delivery: Delivery
    state: FinalState
    code: str
    result: bytes
    end_frame: bytes
    result_ttl_s: int = names.RESULT_TTL_S
    expected_n: int | None = None
    batch_id: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class LaneCounts:
    """Entries of a lane, of those the ones that workers hold, and the age of the oldest one that waits."""

    entries: int
    pending: int
    oldest_age_s: float


def connect(url: str, timeout_s: float = 5.0) -> redis.Redis:
    """A client with bytes replies, explicit timeouts in seconds and no retries of its own; does not connect yet.

    `InvalidOption` for a URL that cannot be read; it may hold a password, so it is not shown.
    """
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "decode_responses": False}
    try:
        client = redis.Redis.from_url(url, retry=None, protocol=2, **options)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # only a connection knows which of the URL's arguments there are
        _check_url(url, pool.connection_kwargs)
    except (ValueError, TypeError, redis.RedisError):
        raise InvalidOption("redis URL: cannot be read; write redis://host:6379/0, rediss://... or unix:///path") from None
    return client


def _check_url(url: str, kwargs: Mapping[str, Any]) -> None:
    """ValueError for what redis-py takes from a URL and would leave out, fail at with every call, or take in place of ours."""
    address = urlsplit(url)
    database = address.path.strip("/")
    if address.scheme != "unix" and database and not re.fullmatch("[0-9]{1,9}", database):
        raise ValueError("no database")
    if address.scheme == "unix" and not address.path:
        raise ValueError("no path")
    if not all(name in URL_ARGUMENTS or name.startswith("ssl_") for name in parse_qs(address.query)):
        raise ValueError("an argument that is not the URL's to set")
    if kwargs.get("db", 0) < 0 or not all(
        0 < kwargs[name] < MAX_TIMEOUT_S for name in ("socket_timeout", "socket_connect_timeout")
    ):
        raise ValueError("a timeout that cannot be waited for")


class Broker:
    """One worker's (or client's) view of one queue.

    Args:
        client: bytes replies, no retries, explicit socket timeouts, as `connect` makes them; stays the caller's to close.
        queue: see Keys.
        worker_id: name under which jobs are held; unique among live workers.
        lease_s: how long a job may go without being renewed before others take it.
    """

    def __init__(self, client: redis.Redis, queue: str, worker_id: str, lease_s: float = 30.0) -> None:
        if worker_id in ("", "released"):
            raise InvalidOption(f"worker_id: {worker_id!r}: empty and 'released' are taken; choose another name")
        self.keys = Keys(queue)
        self.worker_id = worker_id
        self.lease_s = lease_s
        self._client: Any = client  # redis-py's types cannot tell its sync replies from awaitables
        self._scripts = Scripts(client)
        self._delivered = dict.fromkeys(self.keys.lanes, "0-0")
        self._bell: redis.Redis | None = None
        self._bell_block_s = 0.0

    def close(self) -> None:
        """Closes the doorbell's connection."""
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    def ensure_group(self) -> None:
        """Makes lanes and group where missing, from the first entry on. Raises ServerUnavailable when the server is too old."""
        if not self._client.execute_command("COMMAND INFO", "function"):
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
        deadline_ms: int | None = None,
        tenant: str | None = None,
        batch_id: str | None = None,
    ) -> EnqueueReply:
        """Adds a job unless its id or idempotency key is known or `max_queued` unfinished entries are in the lanes.

        `lane` is high, normal or low; `body` is msgpack, as wire.encode_body makes it, and is not looked at; `deadline_ms` is
        unix time. Tenant and batch are kept with the job.
        """
        keys = [self.keys.lane(lane), self.keys.job(job_id), self.keys.done, *self.keys.lanes]
        if idempotency_key is not None:
            keys.append(self.keys.idempotency(idempotency_key))
        kept = {"deadline_ms": deadline_ms, "tenant": tenant, "batch": batch_id}
        pairs = [part for name, value in kept.items() if value is not None for part in (name, value)]
        bound = "" if max_queued is None else max_queued
        reply = self._scripts.run("enqueue", keys, self.keys.prefix, job_id, body, bound, names.IDEMPOTENCY_TTL_S, *pairs)
        status, known, retry_after_ms = (part.decode() for part in reply)
        return EnqueueReply(status, known, int(retry_after_ms) / 1000)

    def fetch(self, free: int) -> list[Delivery]:
        """Claims up to `free` jobs: high before normal before low, in each lane released ones before new ones.

        May answer fewer than there are (many duplicates, big bodies); wait_for_entry then returns at once.
        """
        if free <= 0:
            return []
        args = (MAX_BODY_BYTES, MAX_REPLY_BYTES, free, SCAN_LIMIT)
        taken, delivered = self._claim("fetch", self.keys.lanes, *args)
        self._delivered = {lane: entry.decode() for lane, entry in zip(self.keys.lanes, delivered, strict=True)}
        return [_delivery(row) for row in taken]

    def reclaim(self, count: int, skip: Iterable[str]) -> list[Delivery]:
        """Claims up to `count` jobs whose lease ran out, but for the entries in `skip`, which are in the caller's own hands."""
        if count <= 0:
            return []
        args = (MAX_BODY_BYTES, MAX_REPLY_BYTES, count, int(self.lease_s * 1000), RECLAIM_ROUNDS, *skip)
        return [_delivery(row) for row in self._claim("reclaim", (self.keys.cursor, *self.keys.lanes), *args)]

    def wait_for_entry(self, block_s: float) -> None:
        """Returns when there are entries that no worker had seen at the last fetch, or after `block_s` seconds.

        Call it with a free slot only: entries that were left in the lane make it return at once. A job that another worker
        gives back does not ring.
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

    def release(self, deliveries: Sequence[Delivery], *, counted: bool = False) -> None:
        """Gives jobs back: claimable at once by any worker, before newer entries; `counted`: this was one of their attempts."""
        if deliveries:
            self._run_on_group("release", [self.keys.cursor], int(counted), *_claims(deliveries))

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
        listener: redis.client.PubSub = self._client.pubsub()
        listener.subscribe(self.keys.control)
        if listener.get_message(timeout=BLOCK_MARGIN_S) is None:
            listener.close()
            raise redis.TimeoutError("no confirmation of a subscription")
        return listener

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
        return {lane: LaneCounts(row[0], row[1], row[2] / 1000) for lane, row in zip(LANES, rows, strict=True)}

    def heartbeat(self, fields: Mapping[str, str | int | float]) -> None:
        """Says for three heartbeats that this worker is alive, and what of it."""
        pairs = [part for pair in fields.items() for part in pair]
        args = (self.keys.prefix, self.worker_id, names.WORKER_TTL_S, *pairs)
        self._scripts.run("heartbeat", [self.keys.workers, self.keys.worker(self.worker_id)], *args)

    def _claim(self, name: str, keys: Sequence[str], *args: Any) -> Any:
        """A lease's nonce is drawn for each call, not each worker: after a failover attempt numbers repeat."""
        return self._run_on_group(name, keys, self.worker_id, secrets.token_hex(8), *args)

    def _run_on_group(self, name: str, keys: Sequence[str], *args: Any) -> Any:
        """Runs a script; makes the group anew, once, where FLUSHALL or a failover took it."""
        try:
            return self._scripts.run(name, keys, self.keys.prefix, *args)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
        if (num_held_back := _group_lines.admit()) is not None:
            _log.warning("group_recreated", queue=self.keys.queue, held_back=num_held_back)
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


def _claims(deliveries: Iterable[Delivery]) -> list[str]:
    return [part for job in deliveries for part in (job.job_id, job.lease, job.lane, job.entry_id)]


def _delivery(row: Sequence[Any]) -> Delivery:
    job_id, entry_id, lane, flat, size, attempt, released, lease, seed, n, enqueued_ms, started_ms, source, ending = row
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
    )
