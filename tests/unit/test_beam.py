"""Beam search decides as transformers does."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.beam import BeamSearch, Hypothesis, Survivor, num_candidates
from engine.request import FinishReason
from tests.support.scheduler_world import Tied, candidates_after, naive_beam_search

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def search(prompt: list[int], width: int, stops: frozenset[int], max_new: int, rng: random.Random) -> list[Hypothesis]:
    """The beams stand in any order, as they do in a batch."""
    found = BeamSearch(width, stops)
    beams: list[tuple[int, ...]] = [()]
    for length in range(1, max_new + 1):
        rows = [candidates_after([*prompt, *beam], num_candidates(width, len(stops))) for beam in beams]
        survivors = found.advance(rows, beams, is_last=length == max_new)
        if not survivors:
            break
        assert len(survivors) == width
        places = rng.sample(range(width), width)
        found.arrange(places)
        following = [(*beams[survivor.parent], survivor.token_id) for survivor in survivors]
        beams = [following[places.index(place)] for place in range(width)]
    return found.hypotheses


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.integers(2, 6),
    st.frozensets(st.integers(2, 12), max_size=3),
    st.integers(1, 12),
    st.integers(0, 100),
)
def test_hypotheses_and_scores_are_those_of_a_search_on_lists(
    prompt: list[int], width: int, stops: frozenset[int], max_new: int, seed: int
) -> None:
    try:
        expected = naive_beam_search(prompt, width, stops, max_new)
    except Tied:
        assume(False)

    hypotheses = search(prompt, width, stops, max_new, random.Random(seed))

    assert [(found.score, found.token_ids) for found in hypotheses] == expected
    assert all(found.reason is (STOP if found.token_ids[-1] in stops else LENGTH) for found in hypotheses)


def test_a_stop_token_below_the_best_width_ends_nothing() -> None:
    found = BeamSearch(2, frozenset({9}))

    survivors = found.advance([[(1, -0.1), (2, -0.2), (9, -0.3), (3, -0.4)]], [()], is_last=False)

    assert (survivors, found.hypotheses) == ([Survivor(0, 1), Survivor(0, 2)], [])


def test_a_stop_token_among_the_best_width_becomes_a_hypothesis_and_another_beam_takes_its_place() -> None:
    found = BeamSearch(2, frozenset({9}))

    survivors = found.advance([[(9, -0.1), (1, -0.2), (2, -0.3), (3, -0.4)]], [()], is_last=False)

    assert survivors == [Survivor(0, 1), Survivor(0, 2)]
    assert found.hypotheses == [Hypothesis(pytest.approx(-0.1), (9,), STOP)]


def test_a_full_set_that_no_beam_can_beat_ends_the_search() -> None:
    found = BeamSearch(2, frozenset({8, 9}))

    survivors = found.advance([[(8, -0.1), (9, -0.2), (1, -3.0), (2, -4.0), (3, -5.0), (4, -6.0)]], [()], is_last=False)

    assert survivors == []
    assert [hypothesis.token_ids for hypothesis in found.hypotheses] == [(8,), (9,)]


def test_a_longer_output_is_judged_by_its_mean() -> None:
    found = BeamSearch(2, frozenset({9}))
    found.advance([[(1, -1.0), (9, -1.2), (2, -1.5), (3, -2.0)]], [()], is_last=False)

    found.advance([[(4, -0.2), (5, -9.0)], [(6, -9.0), (7, -9.5)]], [(1,), (2,)], is_last=True)

    assert [hypothesis.token_ids for hypothesis in found.hypotheses] == [(1, 4), (9,)]
    assert [hypothesis.score for hypothesis in found.hypotheses] == [pytest.approx(-0.6), pytest.approx(-1.2)]
    assert [hypothesis.reason for hypothesis in found.hypotheses] == [LENGTH, STOP]


def test_restarting_forgets_everything() -> None:
    found = BeamSearch(2, frozenset({9}))
    rows = [[(9, -0.1), (1, -0.2), (2, -0.3), (3, -0.4)]]
    first = found.advance(rows, [()], is_last=False)

    found.restart()

    assert found.hypotheses == []
    assert found.advance(rows, [()], is_last=False) == first


@pytest.mark.parametrize(("width", "num_stop_ids", "count"), [(3, 0, 6), (3, 1, 6), (3, 2, 9), (2, 5, 12)])
def test_so_many_candidates_that_width_go_on_whichever_end(width: int, num_stop_ids: int, count: int) -> None:
    assert num_candidates(width, num_stop_ids) == count
