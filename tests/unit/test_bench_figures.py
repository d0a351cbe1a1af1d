"""What benchmarks make of their measurements."""

import random
import statistics

import pytest

from bench.figures import arrivals, is_growing, percentiles, ratio, spread


def test_a_spread_is_median_least_and_most() -> None:
    assert spread([3.0, 1.0, 10.0]) == {"median": 3.0, "min": 1.0, "max": 10.0}


def test_a_ratio_is_that_of_the_medians_and_ranges_over_the_turns() -> None:
    # the machine slowed down in the second turn: each turn says 2, though the runs alone differ by four
    assert ratio([8.0, 2.0, 6.0], [4.0, 1.0, 2.0]) == {"median": 3.0, "min": 2.0, "max": 3.0}


def test_turns_that_one_side_did_not_take_part_in_have_no_ratio() -> None:
    assert ratio([8.0, 8.0, 80.0], [4.0]) == {"median": 2.0, "min": 2.0, "max": 2.0}


def test_percentiles_lie_between_neighbours() -> None:
    found = percentiles([float(value) for value in range(101)][::-1])
    assert found == {"p50": 50.0, "p90": 90.0, "p99": pytest.approx(99.0)}
    assert percentiles([1.0, 2.0])["p50"] == 1.5


def test_no_values_have_no_percentiles() -> None:
    assert percentiles([]) == {}


def test_arrivals_are_the_same_for_a_seed_and_in_order() -> None:
    times = arrivals(2.0, 50, seed=7)
    assert times == arrivals(2.0, 50, seed=7) == sorted(times)
    assert times != arrivals(2.0, 50, seed=8)


def test_arrivals_come_at_their_rate_and_as_unevenly_as_a_poisson_process() -> None:
    times = arrivals(4.0, 20_000, seed=0)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)


def test_waits_that_build_up_grow() -> None:
    assert is_growing([0.1 * place for place in range(30)])


def test_waits_that_keep_to_a_level_do_not_grow() -> None:
    draw = random.Random(0)
    assert not is_growing([0.2 + draw.random() for _ in range(60)])


def test_waits_that_double_by_a_few_milliseconds_do_not_grow() -> None:
    assert not is_growing([0.01] * 10 + [0.02] * 10 + [0.03] * 10)


def test_two_waits_are_too_few_to_grow() -> None:
    assert not is_growing([0.1, 9.0])
