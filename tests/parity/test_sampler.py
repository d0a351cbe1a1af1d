"""The sampler: what is drawn follows the meaning of the parameters, whatever stands beside a row or breaks there."""

import dataclasses

import numpy as np
import pytest
import torch

from engine import sampler
from engine.request import SamplingParams
from engine.sampler import Row, launch, sample
from kernels import sampling as kernel
from tests.support.sampling import chi_square, distribution, row_of, sampling_of, tied_logits

GREEDY = SamplingParams(temperature=0.0)
MIXED = [
    row_of(GREEDY),
    row_of(SamplingParams(seed=1)),
    row_of(SamplingParams(seed=-1, temperature=0.3)),
    row_of(SamplingParams(seed=2**63, top_k=1)),
    row_of(SamplingParams(seed=3, top_k=7, temperature=2.0)),
    row_of(SamplingParams(seed=4, top_k=40, top_p=0.7)),
    row_of(SamplingParams(seed=5, top_p=0.2)),
    row_of(SamplingParams(seed=6, top_p=0.99, temperature=3.0)),
    row_of(SamplingParams(seed=7, top_k=100_000)),
    row_of(SamplingParams(seed=8, min_tokens=9, stop_token_ids=(5, 17))),
    row_of(SamplingParams(seed=9, min_p=0.1, logprobs=0)),
    row_of(SamplingParams(seed=10, min_p=0.02, top_p=0.9, logprobs=3)),
    row_of(SamplingParams(seed=11, min_p=0.01, top_k=30, presence_penalty=2.0), outputs=(7, 7, 8)),
    row_of(SamplingParams(seed=12, frequency_penalty=-1.0), outputs=(9,) * 5),
    row_of(SamplingParams(temperature=0.0, repetition_penalty=1.5), prompt=tuple(range(40))),
    row_of(SamplingParams(seed=13, logit_bias=((4, 5.0), (40, -100.0)), logprobs=5)),
    row_of(SamplingParams(seed=14, allowed_token_ids=tuple(range(0, 60, 3)), top_p=0.9)),
    row_of(SamplingParams(seed=15, banned_token_ids=tuple(range(20)))),
    row_of(SamplingParams(seed=16, top_k=50), grammar=range(10, 50)),
    row_of(SamplingParams(beam_width=2, min_tokens=9)),
    row_of(SamplingParams(beam_width=64)),
    row_of(SamplingParams(seed=17), choice=3),
]


def sampled(logits: torch.Tensor, rows: list[Row]) -> list[tuple]:
    """Token and log probabilities of each row."""
    output = sample(logits, sampling_of(rows, logits.shape[1]))
    return [(token_id, output.logprobs.get(row)) for row, token_id in enumerate(output.token_ids)]


@pytest.mark.parametrize("vocab", [151, 50_257])
def test_a_row_alone_in_a_batch_and_shuffled_gives_the_same(vocab):
    logits = tied_logits(len(MIXED), vocab)
    together = sampled(logits, MIXED)
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = sampled(logits[order], [MIXED[row] for row in order])
    alone = [sampled(logits[[row]], [MIXED[row]])[0] for row in range(len(MIXED))]
    assert together == alone == [shuffled[order.index(row)] for row in range(len(MIXED))]


@pytest.mark.parametrize("size", [1, 7])
def test_rows_in_pieces_of_any_size_give_the_same(monkeypatch, size):
    rows = MIXED * 5
    logits = tied_logits(len(rows), 301)
    whole = sampled(logits, rows)
    monkeypatch.setattr(sampler, "_CHUNK_ELEMENTS", {"cpu": size * 301})
    assert sampled(logits, rows) == whole


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=2.0, min_p=0.3, top_k=9, top_p=0.9),
        SamplingParams(frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.25, logit_bias=((5, 2.0),)),
        SamplingParams(allowed_token_ids=tuple(range(12)), banned_token_ids=(3, 4), min_tokens=9, min_p=0.05),
    ],
)
def test_drawn_tokens_follow_the_distribution(params):
    logits = torch.linspace(-2, 2, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(1))]
    rows = [row_of(dataclasses.replace(params, seed=seed), outputs=(5, 5, 6)) for seed in range(8_000)]
    drawn = sample(logits.expand(len(rows), -1), sampling_of(rows))
    statistic, bound = chi_square(drawn.token_ids, distribution(logits.numpy(), rows[0]))
    assert statistic < bound


def test_choices_of_one_prompt_are_drawn_independently():
    sequence = row_of(SamplingParams(n=8_000, seed=4)).sequence
    logits = torch.linspace(-1, 1, 8)
    rows = [Row(sequence, choice, 0) for choice in range(8_000)]
    token_ids = sample(logits.expand(len(rows), -1), sampling_of(rows)).token_ids
    pairs = [first * 8 + second for first, second in zip(token_ids[::2], token_ids[1::2], strict=True)]
    shares = logits.double().softmax(0).numpy()
    statistic, bound = chi_square(pairs, np.outer(shares, shares).flatten())
    assert statistic < bound


def test_a_choice_gives_the_same_token_as_a_fork_and_alone():
    params = SamplingParams(n=4, seed=7)
    logits = torch.zeros(4, 1000)
    prompt = row_of(params, outputs=()).sequence
    forked = sample(logits, sampling_of(Row(prompt, choice, 0) for choice in range(4))).token_ids
    alone = sample(logits, sampling_of(row_of(params, outputs=(), choice=choice) for choice in range(4))).token_ids
    assert forked == alone
    assert len(set(forked)) == 4


def test_the_next_index_draws_another_number():
    rows = [row_of(SamplingParams(seed=7), outputs=range(n)) for n in range(8)]
    assert len(set(sample(torch.zeros(8, 1000), sampling_of(rows)).token_ids)) > 5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-50),  # 0 in float32
        SamplingParams(temperature=1e-50, top_k=3),
        SamplingParams(top_k=1, seed=11),
        SamplingParams(top_p=1e-6),
    ],
)
def test_greedy_and_its_limits_take_the_first_of_the_largest(params):
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0]])
    assert sample(logits, sampling_of([params])).token_ids == [1]


def test_an_all_greedy_batch_draws_no_random_number(monkeypatch):
    monkeypatch.setattr(kernel, "uniform", None)
    assert sample(torch.eye(3), sampling_of([SamplingParams(temperature=0.0)] * 3)).token_ids == [0, 1, 2]


def test_neither_plain_greedy_rows_nor_those_with_beams_are_in_a_group():
    params = (GREEDY, SamplingParams(temperature=0.0, min_tokens=9), GREEDY, SamplingParams(beam_width=2, min_tokens=9))
    sampling = sampling_of(params)
    assert [group.rows.tolist() for group in sampling.groups] == [[1]]
    assert [ranking.rows.tolist() for ranking in sampling.rankings] == [[3]]


def test_logits_stay_as_they_were():
    logits = tied_logits(len(MIXED), 64)
    before = logits.clone()
    sampled(logits, MIXED)
    assert torch.equal(logits, before)


def test_ids_stand_on_the_device_before_they_are_read():
    logits = tied_logits(len(MIXED), 64)
    logits[1, 5] = torch.nan
    pending = launch(logits, sampling_of(MIXED, 64))
    assert pending.token_ids.dtype == torch.int64
    assert pending.token_ids[1] == -1
    assert pending.token_ids.tolist() == pending.read().token_ids


@pytest.mark.parametrize("damage", [{0: torch.nan}, {299: torch.nan}, {6: torch.inf}, dict.fromkeys(range(300), -torch.inf)])
@pytest.mark.parametrize("row", range(len(MIXED)))
def test_a_broken_row_fails_alone(damage, row):
    logits, sampling = tied_logits(len(MIXED), 300), sampling_of(MIXED, 300)
    expected = sampled(logits, MIXED)
    logits[row, list(damage)] = torch.tensor(list(damage.values()))
    output = sample(logits, sampling)
    expected[row] = (-1, None)
    assert [(token_id, output.logprobs.get(i)) for i, token_id in enumerate(output.token_ids)] == expected
    assert list(output.failed) == [row]


def test_a_batch_without_rows_is_no_error():
    assert sample(torch.empty(0, 64), sampling_of([])).token_ids == []
