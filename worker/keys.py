"""What every key of a queue is called and how long it lives; docs/protocol.md lists them for others.

The queue's name stands in braces, so all keys of a queue share one cluster slot and every transition can be one
script. The scripts in worker/scripts build `job:`, `tok:` and `res:` keys from `Keys.prefix`; nothing else spells a
key. Nothing here talks to a server.
"""

import re
import zlib
from typing import Final

from worker.errors import InvalidOption

DEFAULT_QUEUE: Final = "default"
LANES: Final = ("high", "normal", "low")
"""Priorities of jobs, in the order in which they are served."""
GROUP: Final = "workers"
RELEASED: Final = "released"
"""Pseudo consumer that holds what waits to be claimed again; no worker has this name."""
SUSPECTS: Final = "suspects"
"""And the one that holds what is to run alone first."""
PSEUDO_CONSUMERS: Final = (RELEASED, SUSPECTS)

RESULT_TTL_S: Final = 86_400
"""Life of a result, and of an ended job's hash and log, unless the job says otherwise; a running job's log is kept this long
after its last frame."""
JOB_TTL_S: Final = 30 * 86_400
"""Life of the hash of a job that has not ended, from its last change of state: no entry waits for longer."""
IDEMPOTENCY_TTL_S: Final = 86_400
HEARTBEAT_S: Final = 5
WORKER_TTL_S: Final = 3 * HEARTBEAT_S
DONE_MAXLEN: Final = 10_000
DEAD_MAXLEN: Final = 10_000
MAX_PARTITIONS: Final = 64

_QUEUE_NAME: Final = re.compile(r"[^\s{}\x00-\x1f\ud800-\udfff]{1,128}")


def partition_of(queue: str, job_id: str, num_partitions: int) -> str:
    """The queue that a job with this id belongs to: CRC-32 of the id's UTF-8, modulo the number of partitions."""
    return names_of(queue, num_partitions)[zlib.crc32(job_id.encode()) % num_partitions]


def names_of(queue: str, num_partitions: int) -> list[str]:
    """The queues that make up this one. `InvalidOption` for a number that cannot be."""
    if not 1 <= num_partitions <= MAX_PARTITIONS:
        raise InvalidOption(
            f"--partitions: {num_partitions} is outside 1..{MAX_PARTITIONS}; use 1 unless a server is too small"
        )
    return [queue] if num_partitions == 1 else [f"{queue}.{number}" for number in range(num_partitions)]


class Keys:
    """The keys of one queue, as text.

    Raises InvalidOption for a queue name that is empty, longer than 128 characters, or holds braces, white space or
    bytes that are no text.
    """

    def __init__(self, queue: str) -> None:
        if not _QUEUE_NAME.fullmatch(queue):
            limit = "1 to 128 characters of UTF-8, no braces, no white space"
            raise InvalidOption(f"queue: {queue[:64]!r}: {limit}; choose another name, such as 'default'")
        self.queue = queue
        self.prefix = f"slotmill:{{{queue}}}:"
        self.lanes = tuple(self.lane(priority) for priority in LANES)
        self.control = f"{self.prefix}ctl"
        self.look = f"{self.prefix}look"
        self.done = f"{self.prefix}done"
        self.dead = f"{self.prefix}dead"
        self.workers = f"{self.prefix}workers"
        self.cursor = f"{self.prefix}cursor"
        self.config = f"{self.prefix}cfg"
        self.batches = f"{self.prefix}batches"
        self.delayed_lanes = tuple(self.delayed(priority) for priority in LANES)

    def lane(self, priority: str) -> str:
        """The stream of jobs of this priority: high, normal or low."""
        assert priority in LANES, priority
        return f"{self.prefix}jobs:{priority}"

    def delayed(self, priority: str) -> str:
        """Sorted set of the jobs of this priority that are not due yet, by the unix ms at which they are."""
        assert priority in LANES, priority
        return f"{self.prefix}delayed:{priority}"

    def job(self, job_id: str) -> str:
        """Hash with the job's state."""
        return f"{self.prefix}job:{job_id}"

    def log(self, job_id: str) -> str:
        """Stream of the frames made so far, entry ids `<attempt>-<tokens logged>`."""
        return f"{self.prefix}tok:{job_id}"

    def result(self, job_id: str) -> str:
        """The stored result, msgpack."""
        return f"{self.prefix}res:{job_id}"

    def parked(self, job_id: str) -> str:
        """Hash with the entry's fields of a job that is not due yet."""
        return f"{self.prefix}parked:{job_id}"

    def channel(self, job_id: str) -> str:
        """Channel that carries the same frames as the log."""
        return f"{self.prefix}ch:{job_id}"

    def idempotency(self, key: str) -> str:
        """Job id that an idempotency key stands for."""
        return f"{self.prefix}idem:{key}"

    def batch(self, batch_id: str) -> str:
        """Hash with what a batch is, and how many of its jobs were added and have ended."""
        return f"{self.prefix}batch:{batch_id}"

    def scratch(self, trial: str, kind: str) -> str:
        """Key that `worker doctor` tries its rights on; deleted at once."""
        return f"{self.prefix}doctor:{trial}:{kind}"

    def worker(self, worker_id: str) -> str:
        """Hash with what a worker last said of itself."""
        return f"{self.prefix}worker:{worker_id}"
