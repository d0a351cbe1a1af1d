"""A queue in several partitions, for the worker's threads and for producers as if it were one: `{queue.0}`, `{queue.1}`, ...

A queue lives in one slot of a cluster, so one node serves it; a queue that outgrows a node is split. Each partition is a queue
of its own, with a `Broker` or `Client` of its own; the calls are the same, and what comes from one partition goes back to it.
Which one a job belongs to is said in `keys`; all else is left to `Broker` and `Client`.
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, TypeVar

import redis

from worker.broker import Broker, LaneCounts
from worker.claims import Blame, Delivery, Emission, EmitReply, Finish, RenewReply
from worker.client import Client, JobStream, OnSilence, refuse_unwritable
from worker.frames import Result
from worker.keys import names_of, partition_of

T = TypeVar("T")
R = TypeVar("R")


class Partitions:
    """Several brokers as one. Reads, claims and waits go around, so that none of them is served before the others."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = list(brokers)
        self._by_queue = {broker.keys.queue: broker for broker in brokers}
        self._turn = 0
        self.worker_id = brokers[0].worker_id

    @property
    def is_paused(self) -> bool:
        """Whether every partition was paused at the last fetch."""
        return all(broker.is_paused for broker in self._brokers)

    @property
    def next_due_s(self) -> float | None:
        """Seconds until the next delayed job of any partition is due."""
        return min((broker.next_due_s for broker in self._brokers if broker.next_due_s is not None), default=None)

    def close(self) -> None:
        """See `Broker`, as for all that follows."""
        self._each(Broker.close)

    def ensure_group(self) -> None:
        self._each(Broker.ensure_group)

    def leave(self) -> None:
        self._each(Broker.leave)

    def clean_up(self) -> int:
        return sum(self._each(Broker.clean_up))

    def heartbeat(self, about: Mapping[str, str | int | float]) -> None:
        self._each(lambda broker: broker.heartbeat(about))

    def queue_counts(self) -> dict[str, LaneCounts]:
        """Sums over the partitions; of ages the greatest."""
        counts = self._each(Broker.queue_counts)
        return {lane: summed([each[lane] for each in counts]) for lane in counts[0]}

    def paused_and_dead(self) -> tuple[bool, int]:
        paused, dead = zip(*self._each(Broker.paused_and_dead), strict=True)
        return all(paused), sum(dead)

    def fetch(self, free: int, *, aging: int = 64, may_take_suspect: bool = True) -> list[Delivery]:
        """Claims up to `free` jobs, beginning with another partition each time. What one gave is kept when the next fails."""
        taken: list[Delivery] = []
        for broker in self._in_turn():
            has_suspect = any(job.is_suspect for job in taken)
            try:
                taken += broker.fetch(free - len(taken), aging=aging, may_take_suspect=may_take_suspect and not has_suspect)
            except redis.RedisError:
                if not taken:
                    raise
                break
        return taken

    def wait_for_entry(self, block_s: float) -> None:
        """Waits at one partition after another: they may be on different nodes."""
        awake = [broker for broker in self._in_turn() if not broker.is_paused]
        awake[0].wait_for_entry(block_s / len(self._brokers))

    def reclaim(self, in_hand: Iterable[Delivery]) -> int:
        mine = self._parted(in_hand, lambda job: job.queue)
        return sum(broker.reclaim(mine.get(queue, [])) for queue, broker in self._by_queue.items())

    def adopt(self, delivery: Delivery, job_id: str) -> Delivery | None:
        return self._by_queue[delivery.queue].adopt(delivery, job_id)

    def log_of(self, delivery: Delivery) -> list[bytes]:
        return self._by_queue[delivery.queue].log_of(delivery)

    def renew(self, deliveries: Sequence[Delivery]) -> RenewReply:
        parted = self._parted(deliveries, lambda job: job.queue)
        replies = [self._by_queue[queue].renew(jobs) for queue, jobs in parted.items()]
        lost, cancelled = (set().union(*ids) for ids in ([r.lost for r in replies], [r.cancelled for r in replies]))
        return RenewReply(lost, cancelled)

    def emit(self, emissions: Sequence[Emission]) -> list[EmitReply]:
        return self._gathered(emissions, lambda emission: emission.queue, Broker.emit)

    def finish(self, finishes: Sequence[Finish]) -> list[Any]:
        return self._gathered(finishes, lambda finish: finish.delivery.queue, Broker.finish)

    def retry(self, retries: Sequence[tuple[Delivery, float]]) -> list[Any]:
        return self._gathered(retries, lambda retry: retry[0].queue, Broker.retry)

    def release(self, deliveries: Sequence[Delivery], blame: Blame = "none") -> None:
        for queue, jobs in self._parted(deliveries, lambda job: job.queue).items():
            self._by_queue[queue].release(jobs, blame)

    def acquit(self, deliveries: Sequence[Delivery]) -> None:
        for queue, jobs in self._parted(deliveries, lambda job: job.queue).items():
            self._by_queue[queue].acquit(jobs)

    def _each(self, call: Callable[[Broker], R]) -> list[R]:
        return [call(broker) for broker in self._brokers]

    def _in_turn(self) -> list[Broker]:
        self._turn = (self._turn + 1) % len(self._brokers)
        return self._brokers[self._turn :] + self._brokers[: self._turn]

    @staticmethod
    def _parted(items: Iterable[T], queue_of: Callable[[T], str]) -> dict[str, list[T]]:
        parted = defaultdict(list)
        for item in items:
            parted[queue_of(item)].append(item)
        return parted

    def _gathered(
        self, items: Sequence[T], queue_of: Callable[[T], str], call: Callable[[Broker, Sequence[T]], Sequence[R]]
    ) -> list[R]:
        """One call to each partition that is meant; the answers in the order of the items."""
        answers = {queue: iter(call(self._by_queue[queue], part)) for queue, part in self._parted(items, queue_of).items()}
        return [next(answers[queue_of(item)]) for item in items]


class PartitionedClient:
    """A queue in several partitions: each job is put into, and looked for in, the one that its id belongs to.

    Calls are those of `Client`, and it stands in for one. Operators' commands take one partition at a time, as `--queue q.1`.
    """

    def __init__(self, url: str, queue: str, partitions: int, *, patience_s: float = 30.0) -> None:
        """`partitions` is what the workers were told with `--partitions`; each may be on another node of a cluster."""
        self._queue = queue
        self._clients = {name: Client(url, name, patience_s=patience_s) for name in names_of(queue, partitions)}

    def __enter__(self) -> "PartitionedClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    def of(self, job_id: str) -> Client:
        """The client of the partition that this job belongs to."""
        refuse_unwritable(job_id)
        return self._clients[partition_of(self._queue, job_id, len(self._clients))]

    def enqueue(
        self,
        prompt: str | None = None,
        *,
        id: str | None = None,  # noqa: A002  the name of the field
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> str:
        """See `Client.enqueue`. Without an id an idempotency key decides it, so that a repeat meets the same partition."""
        drawn = uuid.uuid4() if idempotency_key is None else uuid.uuid5(uuid.NAMESPACE_OID, idempotency_key)
        job_id = drawn.hex if id is None else id
        return self.of(job_id).enqueue(prompt, id=job_id, idempotency_key=idempotency_key, **fields)

    def stream(self, job_id: str, timeout_s: float | None = None, *, on_silence: OnSilence | None = None) -> JobStream:
        """See `Client.stream`."""
        return self.of(job_id).stream(job_id, timeout_s, on_silence=on_silence)

    def result(
        self, job_id: str, timeout_s: float | None = None, *, check: bool = False, on_silence: OnSilence | None = None
    ) -> Result:
        """See `Client.result`."""
        return self.of(job_id).result(job_id, timeout_s, check=check, on_silence=on_silence)

    def generate(self, prompt: str | None = None, *, timeout_s: float | None = None, **fields: Any) -> Result:
        """See `Client.generate`."""
        return self.result(self.enqueue(prompt, **fields), timeout_s, check=True)

    def cancel(self, job_id: str) -> str:
        """See `Client.cancel`."""
        return self.of(job_id).cancel(job_id)

    def state(self, job_id: str) -> str:
        """See `Client.state`."""
        return self.of(job_id).state(job_id)


def summed(counts: Sequence[LaneCounts]) -> LaneCounts:
    """The counts of a lane in several partitions as one; of ages the greatest."""
    columns = {field.name: [getattr(each, field.name) for each in counts] for field in fields(LaneCounts) if field.compare}
    return LaneCounts(**{name: max(column) if name.endswith("age_s") else sum(column) for name, column in columns.items()})
