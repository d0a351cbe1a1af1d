"""What the engine is asked, immutable, in token ids."""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended; the words of the result on the wire."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to end. Meaning and order as in docs/protocol.md."""

    max_tokens: int = 256
    """Most output tokens, those of earlier attempts included; 0 computes the prompt only."""
    min_tokens: int = 0
    """EOS and stop ids cannot be sampled before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    seed: int = 0
    """Random numbers depend on (seed, output index) only. Any 64-bit integer."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation to run.

    `output_token_ids` is what an earlier attempt already produced: it is prefilled with the prompt, and sampling goes on at
    index `len(output_token_ids)`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Lower runs first."""
