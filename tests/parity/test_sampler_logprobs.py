"""Log probabilities: those of the logits as the model made them, against torch.log_softmax and a sort."""

import pytest
import torch

from engine import sampler
from engine.messages import TokenLogprobs
from engine.request import SamplingParams
from engine.sampler import SamplerOutput, sample, score
from kernels import sampling as kernel
from tests.support.sampling import EOS_ID, row_of, sampling_of, tied_logits

VOCAB = 50


def expected(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """One row's, by a plain sort."""
    log_probs = logits.float().log_softmax(0).tolist()
    ranked = sorted(range(len(log_probs)), key=lambda i: (-log_probs[i], i))[:count]
    return TokenLogprobs(log_probs[token_id], tuple((i, log_probs[i]) for i in ranked if log_probs[i] > -torch.inf))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.1, "top_k": 3, "min_p": 0.2},
        {"presence_penalty": 2.0, "repetition_penalty": 3.0, "logit_bias": ((5, 9.0),), "min_tokens": 9},
    ],
)
@pytest.mark.parametrize("count", [0, 1, 7, 20, 60])
def test_log_probabilities_are_those_of_the_unmodified_logits(changes, count):
    logits = tied_logits(4, VOCAB)
    output = sample(logits, sampling_of([SamplingParams(logprobs=count, **changes)] * 4))
    assert output.logprobs == {row: expected(logits[row], output.token_ids[row], count) for row in range(4)}


def test_rows_that_do_not_ask_get_none_and_the_others_as_many_as_they_ask_for():
    logits = tied_logits(4, VOCAB)
    output = sample(logits, sampling_of([SamplingParams(logprobs=count) for count in (3, None, 0, 1)]))
    assert {row: len(found.top) for row, found in output.logprobs.items()} == {0: 3, 2: 0, 3: 1}


def test_asking_for_log_probabilities_changes_no_token():
    logits = tied_logits(30, VOCAB)
    with_them, without = (
        sample(logits, sampling_of(SamplingParams(seed=s, logprobs=count, top_p=0.9) for s in range(30))).token_ids
        for count in (5, None)
    )
    assert with_them == without


def test_equal_log_probabilities_rank_by_id_and_impossible_ones_are_left_out():
    logits = torch.tensor([[1.0, 3.0, -torch.inf, 3.0, 1.0, 1.0]])
    top = sample(logits, sampling_of([SamplingParams(logprobs=6)])).logprobs[0].top
    assert [token_id for token_id, _ in top] == [1, 3, 0, 4, 5]


def test_a_certain_token_and_equal_ones_at_the_end_of_the_list_rank_by_id():
    log_probs = torch.tensor([[-torch.inf, 0.0, -0.0, -1.0], [-2.0, -1.0, -2.0, -2.0]])
    assert kernel.top(log_probs, 2)[1].tolist() == [[1, 2], [1, 0]]


def beam(params: SamplingParams, logits: torch.Tensor, outputs: range) -> SamplerOutput:
    return sample(logits, sampling_of([row_of(params, outputs)]))


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (SamplingParams(beam_width=3), 6),
        (SamplingParams(beam_width=3, ignore_eos=True), 6),
        (SamplingParams(beam_width=3, stop_token_ids=(4, 9)), 12),
        (SamplingParams(beam_width=64), VOCAB),
    ],
)
def test_a_row_with_beams_yields_the_likeliest_continuations_and_is_not_drawn(params, count):
    logits = tied_logits(1, VOCAB)
    output = beam(params, logits, range(3))
    token_id = int(logits[0].argmax())
    assert output.token_ids == [token_id]
    assert output.logprobs[0] == expected(logits[0], token_id, count)


def test_continuations_below_min_tokens_hold_no_stop_id_and_keep_their_log_probabilities():
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS_ID] = 5.0
    free, banned = (beam(SamplingParams(beam_width=2, min_tokens=2), logits, range(n)).logprobs[0].top for n in (2, 1))
    assert free[0][0] == EOS_ID
    assert [token_id for token_id, _ in banned] == [0, 1, 3, 4]
    assert banned[0][1] == free[1][1]


def test_a_row_with_beams_that_is_left_no_token_fails():
    output = beam(SamplingParams(beam_width=2, min_tokens=9, stop_token_ids=(0, 1)), torch.zeros(1, 3), range(1))
    assert output.token_ids == [-1]
    assert "min_tokens" in output.failed[0]
    assert not output.logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_is_scored_by_its_tokens(dtype):
    logits = tied_logits(9, VOCAB).to(dtype)
    targets, counts = list(range(9)), [0, 5, 1, 0, 20, 3, 3, 60, 2]
    assert score(logits, targets, counts) == [expected(logits[i], targets[i], counts[i]) for i in range(9)]


@pytest.mark.parametrize("size", [1, 7])
def test_a_prompt_scored_in_pieces_is_scored_the_same(monkeypatch, size):
    logits = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(5))
    counts = [row % 6 for row in range(30)]
    whole = score(logits, range(30), counts)
    monkeypatch.setattr(sampler, "_CHUNK_ELEMENTS", {"cpu": size * VOCAB})
    assert score(logits, range(30), counts) == whole


def test_a_prompt_of_one_token_has_nothing_to_score():
    assert score(torch.empty(0, VOCAB), [], []) == []


def test_memory_of_a_score_is_that_of_a_piece(monkeypatch):
    monkeypatch.setattr(sampler, "_CHUNK_ELEMENTS", {"cpu": 3 * VOCAB})
    heights = []
    ranked = kernel.top
    monkeypatch.setattr(kernel, "top", lambda log_probs, count: heights.append(len(log_probs)) or ranked(log_probs, count))
    score(tied_logits(10, VOCAB), range(10), [1] * 10)
    assert heights == [3, 3, 3, 1]
