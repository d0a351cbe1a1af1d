"""Rows to sample, a matcher that allows what it is told, and the sampler's meaning written out row by row in numpy."""

from collections.abc import Iterable

import numpy as np
import torch

from engine.request import Request, SamplingParams
from engine.sampler import Row, SamplingInput
from engine.sequence import Sequence
from engine.staging import Staging

CPU = Staging(torch.device("cpu"))
EOS_ID = 2
PROMPT = (1, 3, 3)


class FakeMatcher:
    """Allows the same ids always, where a grammar's matcher would go on."""

    def __init__(self, allowed: Iterable[int]) -> None:
        self.allowed = frozenset(allowed)

    def fill(self, row: torch.Tensor) -> None:
        bits = np.zeros(32 * len(row), np.uint8)
        bits[[token_id for token_id in self.allowed if token_id < len(bits)]] = 1
        row.copy_(torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32)))


def row_of(
    params: SamplingParams,
    outputs: Iterable[int] = (0, 1, 2),
    *,
    prompt: tuple[int, ...] = PROMPT,
    grammar: Iterable[int] | None = None,
    choice: int = 0,
) -> Row:
    """The next token of a sequence that has `outputs`, of a grammar that allows the ids of `grammar`."""
    request = Request(request_id="r", prompt_token_ids=prompt, params=params, output_token_ids=tuple(outputs), choice=choice)
    sequence = Sequence(request, (0, 0, 0), frozenset({EOS_ID}))
    sequence.matcher = None if grammar is None else FakeMatcher(grammar)
    return Row(sequence, sequence.choice, sequence.num_output_tokens)


def sampling_of(rows: Iterable[Row | SamplingParams], vocab_size: int | None = None) -> SamplingInput:
    return SamplingInput.of([row if isinstance(row, Row) else row_of(row) for row in rows], CPU, vocab_size)


def tied_logits(rows: int, vocab: int) -> torch.Tensor:
    """Random logits in steps of 1/4: many are equal, as they are in low precision."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    return (logits * 4).round() / 4


def rank(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> tuple[list[int], np.ndarray]:
    """The naive filter: kept ids, likeliest first and equal ones by id, and their probabilities."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    scaled = ((logits[order] - logits[order[0]]) / np.float32(temperature)).astype(np.float32)
    weights = np.exp(scaled).astype(np.float64)
    weights = weights[weights >= np.float32(min_p)][: top_k or None]
    kept, mass = 0, 0.0
    while kept < len(weights) and (top_p >= 1 or kept == 0 or mass < np.float64(np.float32(top_p)) * weights.sum()):
        mass += weights[kept]
        kept += 1
    return order[:kept], weights[:kept] / mass


def changed(logits: np.ndarray, row: Row) -> np.ndarray:
    """What becomes of one row of logits before its temperature, token id by token id."""
    sequence, params = row.sequence, row.sequence.request.params
    prompt, outputs = sequence.token_ids[: sequence.num_prompt_tokens], sequence.token_ids[sequence.num_prompt_tokens :]
    result = logits.astype(np.float64)
    for token_id in range(len(logits)):
        value = result[token_id] + sum(bias for biased, bias in params.logit_bias if biased == token_id)
        if token_id in prompt or token_id in outputs:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * outputs.count(token_id)
        value -= params.presence_penalty * (token_id in outputs)
        is_stopped = row.index < params.min_tokens and token_id in sequence.stop_token_ids
        is_excluded = bool(params.allowed_token_ids) and token_id not in params.allowed_token_ids
        is_ungrammatical = sequence.matcher is not None and token_id not in sequence.matcher.allowed
        if is_stopped or is_excluded or is_ungrammatical or token_id in params.banned_token_ids:
            value = -np.inf
        result[token_id] = value
    return result.astype(np.float32)


def distribution(logits: np.ndarray, row: Row) -> np.ndarray:
    """Probability of each id, [vocab]; all on one id where the row is greedy."""
    params = row.sequence.request.params
    values = changed(logits, row)
    shares = np.zeros(len(values))
    if params.temperature == 0:
        shares[values.argmax()] = 1
    else:
        kept, probabilities = rank(values, params.temperature, params.top_k, params.top_p, params.min_p)
        shares[kept] = probabilities
    return shares


def chi_square(token_ids: list[int], probabilities: np.ndarray) -> tuple[float, float]:
    """The statistic and a bound five standard deviations above its mean; an id of no probability must not be drawn."""
    expected = probabilities * len(token_ids)
    observed = np.bincount(token_ids, minlength=len(probabilities))
    possible = expected > 0
    assert not observed[~possible].any()
    freedom = int(possible.sum()) - 1
    return float(((observed - expected)[possible] ** 2 / expected[possible]).sum()), freedom + 5 * (2 * freedom) ** 0.5
