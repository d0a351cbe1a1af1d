"""The sampler: random numbers against published vectors, draws against a naive filter, rows against themselves alone."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler
from engine.request import Request, SamplingParams
from engine.sampler import SamplingInput, sample
from engine.sequence import Sequence
from kernels import sampling as kernel

CPU = torch.device("cpu")
ALMOST_ONE = 1 - 2.0**-53

# Known answers published with Random123 (kat_vectors, philox4x32 10): counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=-1, temperature=0.3),
    SamplingParams(seed=2**63, top_k=1),
    SamplingParams(seed=3, top_k=7, temperature=2.0),
    SamplingParams(seed=4, top_k=40, top_p=0.7),
    SamplingParams(seed=5, top_p=0.2),
    SamplingParams(seed=6, top_p=0.99, temperature=3.0),
    SamplingParams(seed=7, top_k=100_000),
    SamplingParams(seed=8, min_tokens=9, stop_token_ids=(5, 17)),
]


def sequence_of(params: SamplingParams, num_output_tokens: int = 3) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=(1, 2), params=params, output_token_ids=tuple(range(num_output_tokens)))
    return Sequence(request, 0, frozenset({2}))


def sampling_of(params: Iterable[SamplingParams]) -> SamplingInput:
    return SamplingInput.of([sequence_of(p) for p in params], CPU)


def tied_logits(rows: int, vocab: int) -> torch.Tensor:
    """Random logits in steps of 1/4: many are equal, as they are in low precision."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    return (logits * 4).round() / 4


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = kernel.philox4x32(torch.tensor(counter).unsqueeze(1), torch.tensor(key).unsqueeze(1))
    assert tuple(words.squeeze(1).tolist()) == expected


def test_uniform_numbers_fill_the_unit_interval_evenly():
    index = torch.arange(100_000)
    numbers = kernel.uniform(torch.zeros_like(index), index)
    counts = torch.histc(numbers.float(), bins=50, min=0, max=1)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * 98**0.5


def test_the_largest_uniform_number_stays_below_one(monkeypatch):
    monkeypatch.setattr(kernel, "philox4x32", lambda counter, key: torch.full_like(counter, 0xFFFFFFFF))
    assert kernel.uniform(torch.tensor([0]), torch.tensor([0])).item() == ALMOST_ONE


def test_seeds_and_indices_differ_in_all_their_bits():
    pairs = [(seed, index) for seed in (0, 1, 2**32, 2**63 - 1, -(2**63), -1) for index in (0, 1, 2**32)]
    seeds, indices = torch.tensor(pairs).T
    assert len(set(kernel.uniform(seeds, indices).tolist())) == len(pairs)


@pytest.mark.parametrize(("seed", "same"), [(-1, 2**64 - 1), (2**63, -(2**63)), (5, 5 + 2**64)])
def test_seeds_of_the_same_64_bits_are_the_same(seed, same):
    assert sampler.signed64(seed) == sampler.signed64(same)


def rank(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[list[int], np.ndarray]:
    """The naive filter: kept ids, likeliest first and equal ones by id, and their probabilities."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    order = order[: top_k or None]
    weights = np.exp(((logits[order] - logits[order[0]]) / np.float32(temperature)).astype(np.float32)).astype(np.float64)
    kept, mass = 0, 0.0
    while kept < len(order) and (top_p >= 1 or kept == 0 or mass < np.float64(np.float32(top_p)) * weights.sum()):
        mass += weights[kept]
        kept += 1
    return order[:kept], weights[:kept] / mass


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda n: n / 3), min_size=1, max_size=20),
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.just(0) | st.integers(1, 25),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    width=st.integers(1, 25),
)
def test_truncation_keeps_exactly_what_a_naive_filter_keeps(logits, temperature, top_k, top_p, width):
    values = np.array(logits, dtype=np.float32)
    kept, probabilities = rank(values, temperature, top_k, top_p)
    middles = np.append(np.cumsum(probabilities) - probabilities / 2, ALMOST_ONE)  # one inside every kept token, one at the end
    rows = len(middles)
    chosen = kernel.draw_truncated(
        torch.tensor(values).repeat(rows, 1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.tensor(middles),
        width=width,
    )
    assert chosen.tolist() == [*kept, kept[-1]]


@pytest.mark.parametrize("width", [1, 2, 7, 20])
def test_how_many_tokens_are_ranked_at_first_never_changes_the_result(width):
    generator = torch.Generator().manual_seed(3)
    numbers = torch.rand(4, 500, generator=generator)
    top_k = torch.where(numbers[0] < 0.5, 0, numbers[1] * 50).long()
    rows = (tied_logits(500, 50), numbers[2] + 0.5, top_k, numbers[3], torch.rand(500, generator=generator).double())
    assert torch.equal(kernel.draw_truncated(*rows, width=width), kernel.draw_truncated(*rows))


def chi_square(token_ids: list[int], probabilities: torch.Tensor) -> tuple[float, float]:
    """The statistic and a bound five standard deviations above its mean."""
    expected = probabilities * len(token_ids)
    observed = torch.bincount(torch.tensor(token_ids), minlength=len(probabilities)).double()
    possible = expected > 0
    assert not observed[~possible].any()
    freedom = int(possible.sum()) - 1
    return ((observed - expected)[possible] ** 2 / expected[possible]).sum().item(), freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=6), SamplingParams(top_p=0.8)]
)
def test_drawn_tokens_follow_the_filtered_softmax(params):
    logits = torch.linspace(-2, 2, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(1))]
    drawn = sample(logits.repeat(20_000, 1), sampling_of(dataclasses.replace(params, seed=seed) for seed in range(20_000)))
    kept, share = rank(logits.numpy(), params.temperature, params.top_k, params.top_p)
    probabilities = torch.zeros(24, dtype=torch.float64).index_put((torch.tensor(kept),), torch.tensor(share))
    statistic, bound = chi_square(drawn.token_ids, probabilities)
    assert statistic < bound


@pytest.mark.parametrize("vocab", [151, 50_257])
def test_a_row_alone_in_a_batch_and_shuffled_gives_the_same_token(vocab):
    logits = tied_logits(len(MIXED), vocab)
    together = sample(logits, sampling_of(MIXED)).token_ids
    order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = sample(logits[order], sampling_of(MIXED[row] for row in order)).token_ids
    alone = [sample(logits[[row]], sampling_of([params])).token_ids[0] for row, params in enumerate(MIXED)]
    assert together == alone == [shuffled[order.index(row)] for row in range(len(MIXED))]


def test_rows_drawn_in_several_chunks_give_the_same_tokens(monkeypatch):
    logits, sampling = tied_logits(len(MIXED), 301), sampling_of(MIXED)
    whole = sample(logits, sampling).token_ids
    monkeypatch.setattr(sampler, "_CHUNK_ELEMENTS", {"cpu": 1})
    assert sample(logits, sampling).token_ids == whole


def test_the_next_index_draws_another_number():
    logits = torch.zeros(8, 1000)
    rows = [sequence_of(SamplingParams(seed=7), num_output_tokens=n) for n in range(8)]
    assert len(set(sample(logits, SamplingInput.of(rows, CPU)).token_ids)) > 5


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


@pytest.mark.parametrize("number", [0.0, 0.5, ALMOST_ONE])
def test_extreme_uniform_numbers_never_choose_a_masked_id(number):
    logits = torch.tensor([[-torch.inf, -1.0, 2.0, -torch.inf, 1e-3, -torch.inf]]).repeat(2, 1)
    numbers, ones = torch.full((2,), number, dtype=torch.float64), torch.ones(2)
    plain = kernel.draw(logits, ones, numbers)
    truncated = kernel.draw_truncated(logits, ones, torch.tensor([5, 0]), torch.tensor([1.0, 0.999]), numbers)
    assert set(plain.tolist() + truncated.tolist()) <= {1, 2, 4}


def test_a_tail_of_tokens_too_small_for_float32_sums_can_be_reached():
    logits = torch.full((1, 200_000), -25.0)
    logits[0, 0] = 0.0
    number = torch.tensor([ALMOST_ONE], dtype=torch.float64)
    assert kernel.draw(logits, torch.ones(1), number).item() == 199_999


def test_stop_ids_are_banned_below_min_tokens_and_free_from_there_on():
    logits = torch.tensor([[0.0, 1.0, 9.0, 5.0]])  # 2 is EOS
    rows = [sequence_of(SamplingParams(temperature=0.0, min_tokens=2), n) for n in (0, 1, 2)]
    assert sample(logits.repeat(3, 1), SamplingInput.of(rows, CPU)).token_ids == [3, 3, 2]


def test_banning_leaves_the_logits_as_they_were():
    logits = tied_logits(1, 64)
    before = logits.clone()
    sample(logits, sampling_of([SamplingParams(min_tokens=9)]))
    assert torch.equal(logits, before)


def test_a_banned_id_outside_the_vocabulary_is_no_concern():
    sampling = sampling_of([SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(10**9, -4))])
    assert sample(torch.eye(4)[[3]], sampling).token_ids == [3]


@pytest.mark.parametrize("damage", [{0: torch.nan}, {63: torch.nan}, {6: torch.inf}, dict.fromkeys(range(64), -torch.inf)])
@pytest.mark.parametrize("row", range(len(MIXED)))
def test_a_broken_row_fails_alone(damage, row):
    logits, sampling = tied_logits(len(MIXED), 64), sampling_of(MIXED)
    expected = sample(logits, sampling).token_ids
    logits[row, list(damage)] = torch.tensor(list(damage.values()))
    output = sample(logits, sampling)
    expected[row] = -1
    assert output.token_ids == expected
    assert list(output.failed) == [row]


def test_a_batch_without_rows_is_no_error():
    assert sample(torch.empty(0, 64), SamplingInput.of([], CPU)).token_ids == []
