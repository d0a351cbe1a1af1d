"""One handing-over of a job to this worker: what was delivered, what came out of it, how far the log has it, how it ends.

Relies on `wire` for jobs, on `frames` for results, on `output` for tokens and text, on `order` for the log of several choices.
Leaves who may change it to `inflight`. All of it is plain data; an attempt is equal to itself alone.
"""

import logging
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from engine.messages import TokenLogprobs
from worker.claims import Blame, Delivery
from worker.frames import Choice, FinalState, Result, Timings, Usage
from worker.order import LogOrder
from worker.output import Output
from worker.wire import Job

State = FinalState | Literal["released", "delayed"]

DEAD_LETTER = "dead_letter"
"""Code of a job that is not tried again."""
PUBLISH_TOKENS = 16
PUBLISH_S = 0.025
LOG_TOKENS = 64
"""Tokens of a job without a stream that are logged together, for a resume."""
TOLD_ATTEMPTS = 2
"""Attempts at a job that the worker's log tells of, beside the one that ends it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ends. `released` gives the job back, `delayed` after `delay_s`; every other state is its last."""

    state: State
    finish_reason: str = ""
    code: str = ""
    error: str = ""
    """One line for the result, without prompt text."""
    why: str = ""
    """Label of the metric that counts it, where the code does not say it."""
    blame: Blame = "none"
    """Of a release: what the job had to do with it."""
    delay_s: float = 0.0

    @property
    def is_final(self) -> bool:
        """Whether the job ends with it."""
        return self.state not in ("released", "delayed")


CANCELLED = Ending("cancelled", "cancelled", "cancelled")
EXPIRED = Ending("expired", "expired", "expired")
RELEASED_BY_DRAIN = Ending("released", why="drain")
MISSED_BY_ENGINE = Ending("released", why="engine")
"""The engine was gone before it had the job."""


def completed(attempt: "Attempt") -> Ending:
    """The end of a job whose choices have all ended by themselves; it goes by the reason of the first."""
    return Ending("succeeded", attempt.outputs[0].finish_reason or "")


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
    outputs: tuple[Output, ...] = ()
    """One for each choice; none until the prompt is known to be good."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    is_prompt_pending: bool = False
    """A request of its own computes the prompt's log probabilities."""
    order: LogOrder = field(init=False)
    """Which tokens the log's numbers mean."""
    asked: Ending | None = field(init=False)
    """The end that was asked for before it started; the consumer carries it out once it knows what the log holds."""
    ending: Ending | None = None
    is_announced: bool = False
    """The start frame is in the log."""
    num_logged: int = 0
    """Tokens that the log is known to hold."""
    flushed_at: float = 0.0
    """`time.monotonic` of the last frame of this attempt, 0 before any."""
    traceparent: str | None = None
    """Of the job, well formed; also of one whose body is refused."""
    trace_id: str = ""
    """The trace that its lines and spans belong to; empty when there is none, or the body was not looked at yet."""
    span_id: str = ""
    """Of its span, once that is made."""
    is_known: bool = False
    """Its body was looked at."""
    claimed_at: float = field(default_factory=time.time)
    """Unix time by our clock, as those that follow."""
    entered_at: float | None = None
    """When the engine was handed it."""
    ended_at: float | None = None
    """When its ending was set."""
    first_token_at: float | None = None
    """Unix time of the first token that this attempt made."""
    last_token_at: float = 0.0
    num_cached_tokens: int = 0
    taken_at: float = field(default_factory=time.monotonic)
    engine: int = 0
    """Which of the worker's engines has it, while one does."""
    is_alone: bool = field(init=False)
    """A suspect whose time alone is not over."""
    has_begun_alone: bool = False
    """The engine computes nothing else since. Before that a crash is somebody else's doing."""
    is_acquitted: bool = False
    """A suspect no longer, as the server knows."""

    def __post_init__(self) -> None:
        self.is_alone = self.delivery.is_suspect
        self.expect(max(1, len(self.outputs)))
        self.asked = {"cancelled": CANCELLED, "expired": EXPIRED}.get(self.delivery.ending)

    def expect(self, num_choices: int) -> LogOrder:
        """An empty order for so many choices, from now on this attempt's."""
        self.order = LogOrder(num_choices)
        return self.order

    @property
    def request_id(self) -> str:
        """The engine's name for it: a lease is drawn for each claim, so two attempts at one job never meet in the engine."""
        return f"{self.delivery.job_id}:{self.delivery.lease}"

    @property
    def about(self) -> dict[str, object]:
        """What names it in a line of the log."""
        ids = {"trace_id": self.trace_id, "span_id": self.span_id}
        return {
            "job": self.delivery.job_id,
            "attempt": self.delivery.attempt,
            **{name: id_ for name, id_ in ids.items() if id_},
        }

    def level(self, level: int = logging.INFO) -> int:
        """Of a line that is not its last: from the third attempt on only the end is told, so that a job leaves four at most."""
        return level if self.delivery.attempt <= TOLD_ATTEMPTS else logging.DEBUG

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
    def is_suspect(self) -> bool:
        """Whether a crash now would be charged to it, as far as the server knows."""
        return self.delivery.is_suspect and not self.is_acquitted

    @property
    def owes_acquittal(self) -> bool:
        """Whether the server is still to be told that it is no suspect any more."""
        return self.is_suspect and not self.is_alone

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended and nothing else is waited for."""
        return not self.is_prompt_pending and all(output.finish_reason for output in self.outputs)

    @property
    def width(self) -> int:
        """Slots that it takes, or will when it starts, as far as we know."""
        return sum([not output.finish_reason for output in self.outputs]) or 1

    @property
    def is_streamed(self) -> bool:
        """Whether frames are published; without a stream they are logged only."""
        return self.job is not None and self.job.stream

    @property
    def is_logged(self) -> bool:
        """Whether tokens go to the log: a beam search has none before its end, and starts over after a crash."""
        return self.job is not None and not self.job.beam_width

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices, those of earlier attempts included."""
        return sum([len(output.token_ids) for output in self.outputs])

    @property
    def num_unlogged(self) -> int:
        """Settled tokens that are not in the log yet."""
        return sum([output.num_settled for output in self.outputs]) - self.num_logged if self.is_logged else 0

    @property
    def num_in_vain(self) -> int:
        """Tokens made here that nobody will see, should the job be dropped now."""
        return max(0, self.num_tokens - max(self.num_logged, self.delivery.num_logged))

    def due_at(self) -> float | None:
        """`time.monotonic` from which there is something to write, None while there is not."""
        if self.ending or self.owes_acquittal or (self.outputs and not self.is_announced):
            return 0.0
        job, planned = self.job, self.order.planned
        waiting, is_resent = 0, self.order.n > self.num_logged
        for choice, output in enumerate(self.outputs):  # a plain loop: this runs for every token
            num_new = output.num_settled - planned[choice]
            waiting = max(waiting, num_new)
        if not (waiting or is_resent) or job is None or job.beam_width:
            return None
        if not job.stream:
            return 0.0 if waiting >= LOG_TOKENS or is_resent else None
        return 0.0 if waiting >= PUBLISH_TOKENS or is_resent or not self.flushed_at else self.flushed_at + PUBLISH_S

    def unlogged(self) -> list[tuple[int, int, int]]:
        """(choice, start, stop) of the tokens to log next, in order: what has a place in the log first, then what is new."""
        order = self.order
        stretches: list[tuple[int, int, int]] = []
        assert order.n >= self.num_logged or not self.is_logged, "the log has more than anybody wrote"
        if order.n > self.num_logged:
            return list(islice(order.after(self.num_logged), len(self.outputs)))
        for choice, output in enumerate(self.outputs if self.is_logged else ()):
            start, stop = order.planned[choice], output.num_settled
            if stop > start:
                order.add(choice, stop)
                stretches.append((choice, start, stop))
        return stretches

    def timings(self) -> Timings:
        """Until now, should it end now."""
        enqueued_at = self.delivery.enqueued_ms / 1000
        first_at = None if self.delivery.num_logged else self.first_token_at  # or an earlier attempt made it
        return Timings(
            queued_s=self.queued_s,
            ttft_s=None if first_at is None else max(0.0, first_at - enqueued_at),
            e2e_s=max(0.0, time.time() - enqueued_at),
        )

    def usage(self) -> Usage:
        """Tokens until now."""
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=self.num_tokens,
            cached_tokens=self.num_cached_tokens,
            resumed_tokens=self.delivery.num_logged if self.outputs else 0,
        )

    def num_attempts(self, ending: Ending) -> int:
        """Attempts that counted, when it ends so."""
        return self.delivery.counted_attempts - (ending.code == DEAD_LETTER)  # it is claimed once more for its end

    def result(self, ending: Ending, worker_id: str, model: str) -> Result:
        """What is stored when the job ends in `ending`."""
        return Result(
            id=self.delivery.job_id,
            state=ending.state,
            code=ending.code or None,
            error=ending.error or None,
            choices=tuple([self._choice(index, output) for index, output in enumerate(self.outputs)]),
            prompt_logprobs=self.prompt_logprobs,
            usage=self.usage(),
            timings=self.timings(),
            attempts=self.num_attempts(ending),
            worker=worker_id,
            model=model,
            metadata=self.job.metadata if self.job else {},
            traceparent=self.traceparent,
        )

    def _choice(self, index: int, output: Output) -> Choice:
        has_logprobs = self.job is not None and self.job.logprobs is not None
        return Choice(
            index=index,
            text=output.text,
            token_ids=tuple(output.token_ids),
            finish_reason=output.finish_reason,
            detail=output.detail,
            logprobs=tuple(output.logprobs) if has_logprobs else None,
            score=output.score,
        )
