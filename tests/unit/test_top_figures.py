"""Rates, shares and quantiles of two looks, against values computed by hand."""

import pytest

from tests.support.looks import BOUNDS, request, snapshot
from worker.snapshot import Buckets
from worker.top.figures import between, quantile, tokens_per_s, total

BEFORE = snapshot(
    up_s=100.0,
    counters={"generated_tokens": 1000, "slot_steps.decode": 600, "slot_steps.no_work": 400, "jobs_finished.succeeded.stop": 5},
    latencies={"between_tokens": Buckets(bounds=BOUNDS, counts=(10, 0, 0, 0))},
)
NOW = snapshot(
    up_s=104.0,
    counters={
        "generated_tokens": 1100,
        "slot_steps.decode": 660,
        "slot_steps.prefill": 15,
        "slot_steps.no_work": 425,
        "jobs_finished.succeeded.stop": 6,
        "jobs_finished.failed.error": 1,
    },
    latencies={"between_tokens": Buckets(bounds=BOUNDS, counts=(12, 6, 2, 0))},
)


def test_rates_are_growth_over_the_workers_own_time() -> None:
    figures = between(BEFORE, NOW)
    assert (figures.seconds, figures.rate("generated_tokens"), figures.rate("jobs_finished")) == (4.0, 25.0, 0.5)


def test_shares_are_of_the_slot_steps_between() -> None:
    figures = between(BEFORE, NOW)
    assert figures.shares() == {"decode": 0.6, "prefill": 0.15, "no_work": 0.25}
    assert figures.occupancy == 0.75


def test_quantiles_are_of_what_was_observed_between() -> None:
    # 2 up to 0.1 s, 6 up to 0.2, 2 up to 0.4: rank 5 is the third of six, rank 9.5 three quarters through the last two
    assert between(BEFORE, NOW).quantiles("between_tokens") == pytest.approx((0.15, 0.35))


def test_a_first_look_is_of_the_time_since_the_start() -> None:
    figures = between(None, BEFORE)
    assert (figures.seconds, figures.rate("generated_tokens"), figures.occupancy) == (100.0, 10.0, 0.6)


@pytest.mark.parametrize("changes", [{"pid": 2}, {"host": "other"}, {"up_s": 105.0}])
def test_another_process_under_the_same_name_starts_from_nothing(changes: dict[str, object]) -> None:
    old = snapshot(**{"up_s": 100.0, "counters": {"generated_tokens": 5000.0}} | changes)
    assert between(old, NOW).rate("generated_tokens") == 1100 / 104


def test_nothing_observed_is_no_quantile_and_no_share() -> None:
    figures = between(NOW, snapshot(up_s=105.0, counters=NOW.counters, latencies=NOW.latencies))
    assert (figures.quantiles("between_tokens"), figures.quantiles("queue"), figures.occupancy) == (None, None, None)
    assert figures.prefix_hits is None


def test_several_workers_are_summed() -> None:
    whole = total([between(BEFORE, NOW), between(None, snapshot(up_s=10.0, counters={"generated_tokens": 500}))])
    assert whole.rate("generated_tokens") == 75.0
    assert sum(whole.latencies["between_tokens"].counts) == 20
    assert whole.occupancy == 0.75


def test_histograms_of_another_version_are_left_out_of_the_sum() -> None:
    other = snapshot(up_s=1.0, latencies={"between_tokens": Buckets(bounds=(1.0,), counts=(7, 7))})
    assert sum(total([between(BEFORE, NOW), between(None, other)]).latencies["between_tokens"].counts) == 10


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ((4, 0, 0, 0), 0.5, 0.05),
        ((0, 4, 0, 0), 0.5, 0.15),
        ((1, 1, 2, 0), 0.75, 0.3),
        ((0, 0, 0, 3), 0.5, 0.4),
        ((1, 0, 0, 1), 0.95, 0.4),
        ((1, 0, 0, 0), 1.0, 0.1),
    ],
)
def test_a_quantile_is_interpolated_within_its_bucket(counts: tuple[float, ...], share: float, value: float) -> None:
    assert quantile(Buckets(bounds=BOUNDS, counts=counts), share) == pytest.approx(value)


def test_the_rate_of_a_request_is_of_the_same_request_before() -> None:
    before = snapshot([request("a", tokens=50, age_s=2.0)], up_s=100.0)
    now = request("a", tokens=90, age_s=6.0)
    assert tokens_per_s(now, before, snapshot([now], up_s=104.0)) == 10.0


@pytest.mark.parametrize("earlier", [request("b"), request("a", lane="high"), request("a", engine=1), request("a", age_s=9.0)])
def test_the_rate_of_a_new_request_is_since_it_was_taken(earlier: object) -> None:
    now = request("a", tokens=90, resumed=60, age_s=6.0)
    assert tokens_per_s(now, snapshot([earlier]), snapshot([now], up_s=104.0)) == 5.0  # type: ignore[list-item]


def test_figures_are_plain_data() -> None:
    data = between(BEFORE, NOW).data()
    assert (data["tokens_per_s"], data["jobs_per_s"], data["occupancy"]) == (25.0, 0.5, 0.75)
    assert data["latencies_s"] == {"between_tokens": {"p50": pytest.approx(0.15), "p95": pytest.approx(0.35)}}
