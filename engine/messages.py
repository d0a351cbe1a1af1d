"""Plain dataclasses that cross the pipe between the queue side and the engine process. No torch here.

queue side -> engine:  Request (engine/request.py), Abort, Shutdown
engine -> queue side:  EngineLoading*, then EngineReady or EngineFailed; StepReport and RequestRejected after that
"""

from dataclasses import dataclass

from engine.request import FinishReason
from engine.stats import StepStats


@dataclass(frozen=True, slots=True)
class Abort:
    """Free the sequence at once. No event follows for it; unknown ids are ignored."""

    request_id: str


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
    memory_table: str
    """Human-readable lines: total, free, weights, peak activations, blocks."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New tokens of one request, in order and without gaps; the last one carries `finish_reason`."""

    request_id: str
    index: int
    """Output index of the first token in `token_ids`, those of earlier attempts included."""
    token_ids: tuple[int, ...]
    """May be empty in the last event."""
    finish_reason: FinishReason | None = None
    detail: str = ""
    """Why, when the reason alone does not say it: `kv_capacity`, `model_length`, or an error's text."""
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did."""

    events: tuple[TokenEvent, ...]
    stats: StepStats
