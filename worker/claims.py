"""What passes between a worker and the server about a job that it has claimed, as plain data.

A `Delivery` comes from `fetch`; frames, renewals and ends go back with it, and the blame of a claim that came to no end. Relies
on the names of states and keys alone; leaves sending to worker/broker.py.
"""

from dataclasses import dataclass
from typing import Literal

from worker.frames import FinalState
from worker.keys import RESULT_TTL_S

Blame = Literal["none", "bystander", "batch", "solo"]
"""What the end of a claim says of its job: nothing; that another ran alone when the engine died; that the engine died with
this one in the batch; that it died while this one ran alone. All but the first make a suspect of it, the last two count as an
attempt."""


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
    is_suspect: bool = False
    """A worker or engine died while it ran: it runs alone first (`Broker.acquit` ends that)."""
    num_crashes: int = 0
    """How many died while it ran alone."""
    queue: str = ""
    """The queue, or the partition of one, that it came from."""


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
    queue: str = ""


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
    result_ttl_s: int = RESULT_TTL_S
    expected_n: int | None = None
    batch_id: str | None = None
    error: str = ""
