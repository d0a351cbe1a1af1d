"""The largest logit, uniform numbers and draws in Triton equal their twins, under the interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import sampling as twin
from kernels.triton import sampling as kernel
from tests.support.sampling import tied_logits

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")  # numpy interprets, and warns of inf - inf

ALMOST_ONE = 1 - 2.0**-53
WIDTHS = [1, 2, 31, 32, 33, 151]
INT64 = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short row then has as many tiles as a real vocabulary."""
    monkeypatch.setattr(kernel, "_TILE", 32)


def assert_largest_equal(logits: Tensor) -> None:
    values, ids = kernel.largest(logits)
    expected_values, expected_ids = twin.largest(logits)
    assert values.dtype == expected_values.dtype
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ids, expected_ids)


def parameters(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Temperature, uniform and min_p of rows."""
    generator = torch.Generator().manual_seed(3)
    shares = torch.rand(2, rows, generator=generator)
    return shares[0] * 2 + 0.1, torch.rand(rows, generator=generator, dtype=torch.float64), shares[1] * 0.2


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.usefixtures("small_tiles")
def test_the_largest_is_that_of_the_twin_and_the_first_of_equal_ones(vocab: int) -> None:
    assert_largest_equal(tied_logits(7, vocab))


@pytest.mark.parametrize("vocab", [50_257, 262_144])
def test_the_largest_is_found_in_a_whole_vocabulary(vocab: int) -> None:
    logits = tied_logits(2, vocab)
    logits[0, vocab - 1] = 99
    assert_largest_equal(logits)


@pytest.mark.usefixtures("small_tiles")
def test_nan_spreads_and_infinities_count() -> None:
    logits = tied_logits(8, 53)
    logits[0, 40] = logits[0, 50] = logits[1, 0] = torch.nan
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4, 33] = torch.inf
    logits[5, [3, 52]] = torch.tensor([torch.inf, torch.nan])
    logits[6, :52] = -torch.inf
    assert_largest_equal(logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("small_tiles")
def test_the_largest_is_found_in_16_bits(dtype: torch.dtype) -> None:
    assert_largest_equal(tied_logits(3, 53).to(dtype))


@pytest.mark.parametrize("logits", [tied_logits(6, 90)[::2, 7:60], tied_logits(53, 4).T], ids=["slice", "transposed"])
@pytest.mark.usefixtures("small_tiles")
def test_rows_of_a_larger_tensor_are_taken(logits: Tensor) -> None:
    assert_largest_equal(logits)
    temperature, uniform, _ = parameters(len(logits))
    assert torch.equal(kernel.draw(logits, temperature, uniform), twin.draw(logits.contiguous(), temperature, uniform))


def test_no_rows_give_nothing() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert [len(part) for part in kernel.largest(torch.empty(0, 9))] == [0, 0]
    assert len(kernel.uniform(none, none, none)) == len(kernel.draw(torch.empty(0, 9), none.float(), none.double())) == 0


def test_uniform_numbers_are_those_of_the_twin_bit_by_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (300, 3), generator=generator)
    seed, choice, index = torch.cat((torch.cartesian_prod(*[torch.tensor(INT64)] * 3), drawn)).T.contiguous()
    assert torch.equal(kernel.uniform(seed, choice, index), twin.uniform(seed, choice, index))


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("has_min_p", [False, True])
@pytest.mark.usefixtures("small_tiles")
def test_draws_are_those_of_the_twin(vocab: int, has_min_p: bool) -> None:
    logits = tied_logits(5, vocab)
    temperature, uniform, min_p = parameters(5)
    least = min_p if has_min_p else None
    assert torch.equal(
        kernel.draw(logits, temperature, uniform, min_p=least), twin.draw(logits, temperature, uniform, min_p=least)
    )


@pytest.mark.parametrize("vocab", [50_257, 262_144])
def test_draws_from_a_whole_vocabulary_are_those_of_the_twin(vocab: int) -> None:
    logits = tied_logits(2, vocab)
    temperature, uniform, min_p = parameters(2)
    drawn = kernel.draw(logits, temperature, uniform, min_p=min_p)
    assert torch.equal(drawn, twin.draw(logits, temperature, uniform, min_p=min_p))


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.none() | st.integers(-400, 12), min_size=1, max_size=40).filter(
        lambda steps: steps != [None] * len(steps)
    ),
    temperature=st.sampled_from([1e-30, 0.25, 1.0, 3.0]),
    min_p=st.none() | st.sampled_from([0.0, 0.3, 1.0]),
)
def test_the_middle_of_each_share_draws_its_token_and_the_ends_the_first_and_last(steps, temperature, min_p) -> None:
    logits = torch.tensor([-torch.inf if step is None else step / 3 for step in steps])
    weights = ((logits - logits.max()) / temperature).exp().double()
    weights *= weights >= (min_p or 0)
    ids = weights.nonzero().squeeze(1)
    shares = weights[ids] / weights.sum()
    middles = shares.cumsum(0) - shares / 2
    seen = shares > 1e-6  # float32 rounds the edges of the others away
    uniform = torch.cat((middles[seen], torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_TILE", 16)
        drawn = kernel.draw(
            logits.repeat(len(uniform), 1),
            torch.full((len(uniform),), temperature),
            uniform,
            min_p=None if min_p is None else torch.full((len(uniform),), min_p),
        )
    assert drawn[:-1].tolist() == [*ids[seen].tolist(), ids[0].item()]
    assert weights[drawn[-1]] > 0


@triton.jit
def _first_above(running_ptr, weights_ptr, target, found_ptr, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(found_ptr, kernel._first_above(tl.load(running_ptr + index), tl.load(weights_ptr + index), target))


@pytest.mark.parametrize(("target", "expected"), [(0.0, 1), (0.9, 1), (1.0, 3), (1.05, 3), (2.0, 3)])
def test_rounding_of_running_sums_lets_no_id_without_weight_be_found(target: float, expected: int) -> None:
    running, weights = torch.tensor([0.5, 1.0, 1.1, 2.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    found = torch.zeros(1, dtype=torch.int32)
    _first_above[(1,)](running, weights, target, found, 4)
    assert found.item() == expected


@pytest.mark.usefixtures("small_tiles")
def test_a_uniform_number_at_the_edge_of_two_ids_draws_the_later_one() -> None:
    logits, uniform = torch.zeros(64, 64), torch.arange(64).double() / 64
    assert kernel.draw(logits, torch.ones(64), uniform).tolist() == list(range(64))


@pytest.mark.usefixtures("small_tiles")
def test_what_has_no_weight_is_never_drawn() -> None:
    logits = torch.full((16, 151), -torch.inf)
    logits[:, [20, 70, 149]] = 0
    uniform = torch.cat((torch.arange(14).double() / 14, torch.tensor([1 / 3, ALMOST_ONE], dtype=torch.float64)))
    assert set(kernel.draw(logits, torch.ones(16), uniform).tolist()) == {20, 70, 149}


@pytest.mark.usefixtures("small_tiles")
def test_a_row_alone_and_shuffled_draws_the_same() -> None:
    logits = tied_logits(5, 151)
    temperature, uniform, min_p = parameters(5)
    together = kernel.draw(logits, temperature, uniform, min_p=min_p)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1))
    shuffled = kernel.draw(logits[order], temperature[order], uniform[order], min_p=min_p[order])
    alone = [kernel.draw(logits[[i]], temperature[[i]], uniform[[i]], min_p=min_p[[i]]) for i in range(5)]
    assert together.tolist() == torch.cat(alone).tolist() == shuffled[order.argsort()].tolist()


@pytest.mark.usefixtures("small_tiles")
def test_a_broken_row_draws_the_last_id_as_with_the_twin_and_spoils_no_other() -> None:
    logits = tied_logits(4, 53)
    logits[0, 40] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    temperature, uniform, _ = parameters(4)
    drawn = kernel.draw(logits, temperature, uniform)
    assert drawn[:3].tolist() == [52] * 3
    assert torch.equal(drawn, twin.draw(logits, temperature, uniform))
