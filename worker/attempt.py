"""One handing-over of a job to this worker: what was delivered, what came out of it, how far the log has it, how it ends.

Relies on `wire` for jobs, on `frames` for results and on `output` for tokens and text. Leaves who may change it to `inflight`.
All of it is plain data; an attempt is equal to itself alone.
"""

import time
from dataclasses import dataclass, field
from typing import Literal

from engine.request import FinishReason
from worker.broker import Delivery
from worker.frames import Choice, FinalState, Result, Timings, Usage
from worker.output import Output
from worker.wire import Job

State = FinalState | Literal["released"]

PUBLISH_TOKENS = 16
PUBLISH_S = 0.025
LOG_TOKENS = 64
"""Tokens of a job without a stream that are logged together, for a resume."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ends. `released` gives the job back; every other state is the job's last."""

    state: State
    finish_reason: str = ""
    code: str = ""
    error: str = ""
    """One line for the result, without prompt text."""
    detail: str = ""
    """Why, where the finish reason alone does not say it."""
    why: str = ""
    """Label of the metric that counts it, where the code does not say it."""
    is_counted: bool = False
    """Of a release: the attempt counts against the job's limit, since the job may be what ended it."""


STOPPED = Ending("succeeded", FinishReason.STOP.value)
CANCELLED = Ending("cancelled", "cancelled", "cancelled")
EXPIRED = Ending("expired", "expired", "expired")
RELEASED_BY_DRAIN = Ending("released", why="drain")
MISSED_BY_ENGINE = Ending("released", why="engine")
"""The engine was gone before it had the job."""
LOST_WITH_ENGINE = Ending("released", why="engine", is_counted=True)
"""The engine died with the job inside: an attempt, as when a whole worker dies."""


def internal_error(error: Exception) -> Ending:
    """The end of a job that met a fault of ours: what kind of fault, nothing of what it was about."""
    return Ending("failed", "error", "internal", f"internal: {type(error).__name__}; the worker's log at --verbose says where")


@dataclass(slots=True, eq=False)
class Attempt:
    """One delivery in our hands, from the claim until the server has acknowledged its end."""

    delivery: Delivery
    job: Job | None = None
    """None when the body could not be read."""
    prompt_token_ids: tuple[int, ...] = ()
    output: Output | None = None
    """None until the prompt is known to be good."""
    asked: Ending | None = field(init=False)
    """The end that was asked for before it started; the consumer carries it out once it knows what the log holds."""
    ending: Ending | None = None
    is_announced: bool = False
    """The start frame is in the log."""
    num_logged: int = 0
    """Tokens that the log is known to hold."""
    flushed_at: float = 0.0
    """`time.monotonic` of the last frame of this attempt, 0 before any."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.asked = {"cancelled": CANCELLED, "expired": EXPIRED}.get(self.delivery.ending)

    @property
    def request_id(self) -> str:
        """The engine's name for it: a lease is drawn for each claim, so two attempts at one job never meet in the engine."""
        return f"{self.delivery.job_id}:{self.delivery.lease}"

    @property
    def priority(self) -> str:
        """Lane the job came from; label of the latency metrics."""
        return self.delivery.lane

    @property
    def queued_s(self) -> float:
        """Seconds from the enqueue to the first claim, by whichever worker; both by the server's clock."""
        return max(0, self.delivery.started_ms - self.delivery.enqueued_ms) / 1000

    @property
    def is_going_on(self) -> bool:
        """Whether no end is set or asked for."""
        return not (self.ending or self.asked)

    @property
    def is_streamed(self) -> bool:
        """Whether frames are published; without a stream they are logged only."""
        return self.job is not None and self.job.stream

    @property
    def num_unlogged(self) -> int:
        """Settled tokens that are not in the log yet."""
        return self.output.num_settled - self.num_logged if self.output else 0

    @property
    def num_in_vain(self) -> int:
        """Tokens made here that nobody will see, should the job be dropped now."""
        return len(self.output.token_ids) - max(self.num_logged, self.delivery.num_logged) if self.output else 0

    def due_at(self) -> float | None:
        """`time.monotonic` from which there is something to write, None while there is not."""
        if self.ending or (self.output and not self.is_announced):
            return 0.0
        waiting = self.num_unlogged
        if not self.is_streamed:
            return 0.0 if waiting >= LOG_TOKENS else None
        if waiting <= 0:
            return None
        return 0.0 if waiting >= PUBLISH_TOKENS or not self.flushed_at else self.flushed_at + PUBLISH_S

    def result(self, ending: Ending, worker_id: str, model: str) -> Result:
        """What is stored when the job ends in `ending`."""
        output = self.output
        completion = len(output.token_ids) if output else 0
        reason, detail = ending.finish_reason, ending.detail or None
        enqueued_at = self.delivery.enqueued_ms / 1000
        return Result(
            id=self.delivery.job_id,
            state=ending.state,
            code=ending.code or None,
            error=ending.error or None,
            choices=(Choice(0, output.text, tuple(output.token_ids), reason, detail),) if output else (),
            usage=Usage(
                prompt_tokens=len(self.prompt_token_ids),
                completion_tokens=completion,
                cached_tokens=self.num_cached_tokens,
                resumed_tokens=self.delivery.num_logged if output else 0,
            ),
            timings=Timings(
                queued_s=self.queued_s,
                ttft_s=max(0.0, self.first_token_at - enqueued_at) if self.first_token_at else None,
                e2e_s=max(0.0, time.time() - enqueued_at),
            ),
            attempts=self.delivery.counted_attempts,
            worker=worker_id,
            model=model,
            metadata=self.job.metadata if self.job else {},
        )
