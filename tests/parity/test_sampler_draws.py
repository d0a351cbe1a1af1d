"""Random numbers against published vectors, draws by inverse CDF against a naive filter."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler
from kernels import sampling as kernel
from tests.support.sampling import rank, tied_logits

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


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = kernel.philox4x32(torch.tensor(counter).unsqueeze(1), torch.tensor(key).unsqueeze(1))
    assert tuple(words.squeeze(1).tolist()) == expected


def test_uniform_numbers_fill_the_unit_interval_evenly():
    index = torch.arange(100_000)
    numbers = kernel.uniform(torch.zeros_like(index), torch.zeros_like(index), index)
    counts = torch.histc(numbers.float(), bins=50, min=0, max=1)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * 98**0.5


def test_the_largest_uniform_number_stays_below_one(monkeypatch):
    monkeypatch.setattr(kernel, "philox4x32", lambda counter, key: torch.full_like(counter, 0xFFFFFFFF))
    assert kernel.uniform(*torch.zeros(3, 1, dtype=torch.int64)).item() == ALMOST_ONE


def test_seeds_choices_and_indices_differ_in_all_their_bits():
    seeds = (0, 1, 2**32, 2**63 - 1, -(2**63), -1)
    triples = list(itertools.product(seeds, (0, 1, 2**31), (0, 1, 2**32)))
    assert len(set(kernel.uniform(*torch.tensor(triples).T).tolist())) == len(triples)


def test_choice_0_draws_what_a_counter_of_the_index_alone_gives():
    words = kernel.philox4x32(torch.tensor([[5], [0], [0], [0]]), torch.tensor([[7], [0]])).squeeze(1).tolist()
    drawn = kernel.uniform(torch.tensor([7]), torch.tensor([0]), torch.tensor([5])).item()
    assert drawn == ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


@pytest.mark.parametrize(("seed", "same"), [(-1, 2**64 - 1), (2**63, -(2**63)), (5, 5 + 2**64)])
def test_seeds_of_the_same_64_bits_are_the_same(seed, same):
    assert sampler.signed64(seed) == sampler.signed64(same)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda n: n / 3), min_size=1, max_size=20),
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.just(0) | st.integers(1, 25),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
    width=st.integers(1, 25),
)
def test_truncation_keeps_exactly_what_a_naive_filter_keeps(logits, temperature, top_k, top_p, min_p, width):
    values = np.array(logits, dtype=np.float32)
    kept, probabilities = rank(values, temperature, top_k, top_p, min_p)
    middles = np.append(np.cumsum(probabilities) - probabilities / 2, ALMOST_ONE)  # one inside every kept token, one at the end
    rows = len(middles)
    chosen = kernel.draw_truncated(
        torch.tensor(values).repeat(rows, 1),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.tensor(middles),
        min_p=torch.full((rows,), min_p),
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


@pytest.mark.parametrize("vocab", [1, 7, 255, 256, 257, 1000, 1024])
def test_the_largest_logit_is_the_first_of_equal_ones(vocab):
    logits = tied_logits(200, vocab).clamp(max=4)
    values, ids = kernel.largest(logits)
    assert torch.equal(values, logits.amax(1))
    assert ids.tolist() == [row.index(max(row)) for row in logits.tolist()]


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
