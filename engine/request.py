"""What the engine is asked, immutable, in token ids."""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended; the words of the result on the wire."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class GrammarKind(StrEnum):
    """What a grammar is written in; the words of `response_format` on the wire."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must be: any JSON object, JSON that meets the schema `source`, or a match of the regex `source`."""

    kind: GrammarKind
    source: str = ""


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
    min_p: float = 0.0
    """Least probability, as a share of the likeliest token's; 0 is off."""
    seed: int = 0
    """Random numbers depend on (seed, choice, output index) only. Any 64-bit integer."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the output holds."""
    frequency_penalty: float = 0.0
    """Taken from it once for each time that the output holds it."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of every token that prompt or output holds."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    """Choices, sampled independently of each other after one prefill."""
    beam_width: int = 0
    """Beams of a beam search, all returned, the best one as choice 0; 0 samples. Excludes `n` and what changes logits."""
    logprobs: int | None = None
    """Log probability of each chosen token and of so many likeliest ones, from the distribution before anything changes it."""
    prompt_logprobs: int | None = None
    """The same of each prompt token but the first."""
    grammar: Grammar | None = None


NOT_WITH_BEAMS = (
    "n",
    "min_p",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "banned_token_ids",
    "logprobs",
    "grammar",
)
"""Fields of `SamplingParams` that a beam search excludes: what draws, or changes or tells the distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation to run, of one or several choices.

    `output_token_ids` is what an earlier attempt already produced: it is prefilled with the prompt, and sampling goes on at
    index `len(output_token_ids)`. A request of several choices that goes on is sent choice by choice, each with `n` 1, its
    own `choice` and the same `request_id`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    output_token_ids: tuple[int, ...] = ()
    choice: int = 0
    """The first choice that is generated here."""
    priority: int = 0
    """Lower runs first."""
    tenant: int = 0
    """Who shares the engine fairly: each tenant gets admissions in proportion to its `weight`."""
    weight: float = 1.0
    cache_salt: bytes = b""
    """Only requests of the same salt share cached prefixes."""
    isolated_steps: int = 0
    """A suspect runs alone through its prefill and so many steps more, everything else held meanwhile; 0: with the others."""
