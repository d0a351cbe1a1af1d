"""Plain dataclasses that cross the pipe between the queue side and the engine process. No torch here.

queue side -> engine:  Request (engine/request.py), Abort, Shutdown
engine -> queue side:  EngineLoading*, then EngineReady or EngineFailed; StepReport and RequestRejected after that
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import RequestRefused
from engine.request import FinishReason
from engine.stats import MemoryCounts, MemoryRow, StepStats


@dataclass(frozen=True, slots=True)
class Abort:
    """Free a request, or one choice of it, at once. No event follows for it; unknown ids are ignored.

    Until the choices of a prompt have forked the first one stands for all.
    """

    request_id: str
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave after the current step."""


@dataclass(frozen=True, slots=True)
class EngineLoading:
    """What the engine is busy with before it can serve, for logs and probes."""

    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine serves; the numbers it resolved."""

    model_dir: str
    """Directory with tokenizer.json and the chat template."""
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Most tokens a sequence may hold, prompt and output: the model's length, or what the KV cache holds if that is less."""
    max_slots: int
    token_budget: int
    block_size: int
    num_blocks: int
    load_s: float
    memory_rows: tuple[MemoryRow, ...]
    """For people: total, free, weights, peak activations, blocks."""
    block_bytes: int = 0
    memory: MemoryCounts = field(default_factory=MemoryCounts)


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine cannot start, or ends; one line."""

    message: str


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """A request the engine refused (`RequestRefused`), before it took anything."""

    request_id: str
    field: str
    value: str
    limit: str
    remedy: str

    @classmethod
    def of(cls, request_id: str, refusal: RequestRefused) -> "RequestRejected":
        """The refusal of a request, for the pipe."""
        return cls(request_id, refusal.field, str(refusal.value), refusal.limit, refusal.remedy)


@dataclass(frozen=True, slots=True)
class RunsAlone:
    """From the step that begins now on a suspect is computed alone: an end of the process is its doing."""

    request_id: str


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one position, of the distribution before penalties, bias, bans and temperature."""

    logprob: float
    """Of the token that stands there."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest (token id, log probability), likeliest first; as many as were asked for."""


class TokenEvent(NamedTuple):
    """New tokens of one choice of a request, in order and without gaps; a choice's last one carries `finish_reason`."""

    request_id: str
    start: int
    """Output index of the first token in `token_ids`, those of earlier attempts included."""
    token_ids: tuple[int, ...]
    """May be empty in the last event."""
    finish_reason: FinishReason | None = None
    detail: str = ""
    """Why, when the reason alone does not say it: `kv_capacity`, `model_length`, or an error's text."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache when the sequence first started."""
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token of `token_ids`, when they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Once, in the first event, when they were asked for: one per prompt token but the first."""
    score: float | None = None
    """Of a beam: sum of its tokens' log probabilities divided by their number."""
    may_retry: bool = False
    """Of an error: a fault of the engine, which another attempt may not meet, and not of what was asked."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did."""

    events: tuple[TokenEvent, ...]
    stats: StepStats
    rejected: tuple[RequestRejected, ...] = ()
    """Requests refused after they were taken: a grammar that cannot be compiled."""
    cleared: tuple[str, ...] = ()
    """Request ids whose isolated steps are over, all recorded; those that ended before are not among them."""
