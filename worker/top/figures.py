"""What happened at one worker, or at several, between two looks: rates, shares, quantiles.

Relies on snapshots alone and is pure; the clock is each worker's own (`up_s`), so no two clocks are compared. Leaves which
looks to compare to `watch`, and how a figure is written to `view`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from worker.snapshot import Buckets, RequestView, Snapshot

BUSY = ("decode", "prefill")
"""States of a slot that does something."""
QUANTILES = (0.5, 0.95)


@dataclass(frozen=True, slots=True)
class Figures:
    """`seconds` is the time they are of, of several workers the longest."""

    seconds: float = 0.0
    counts: Mapping[str, float] = field(default_factory=dict)
    """What the counters grew by."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """The same a second; of several workers the sum of their rates."""
    latencies: Mapping[str, Buckets] = field(default_factory=dict)

    def rate(self, name: str) -> float:
        """A second, of this counter and of all those with its name before a dot."""
        return _sum(self.rates, name)

    def count(self, name: str) -> float:
        """The same, not a second."""
        return _sum(self.counts, name)

    def shares(self) -> dict[str, float]:
        """Slot-steps by state as shares of all; empty without a step."""
        steps = {name.partition(".")[2]: count for name, count in self.counts.items() if name.startswith("slot_steps.")}
        whole = sum(steps.values())
        return {state: count / whole for state, count in steps.items()} if whole else {}

    @property
    def occupancy(self) -> float | None:
        """The share of slot-steps in which a slot did something; None without a step."""
        shares = self.shares()
        return sum(shares.get(state, 0.0) for state in BUSY) if shares else None

    @property
    def prefix_hits(self) -> float | None:
        """The share of looked-up prompt tokens that the prefix cache had; None when none were."""
        asked = self.count("prefix_cache_queried_tokens")
        return self.count("prefix_cache_hit_tokens") / asked if asked else None

    def quantiles(self, name: str) -> tuple[float, ...] | None:
        """The `QUANTILES` of a latency in seconds."""
        buckets = self.latencies.get(name, Buckets())
        return tuple(quantile(buckets, share) for share in QUANTILES) if sum(buckets.counts) else None

    def data(self) -> dict[str, object]:
        """As plain data."""
        return {
            "seconds": round(self.seconds, 3),
            "tokens_per_s": self.rate("generated_tokens"),
            "prompt_tokens_per_s": self.rate("prompt_tokens"),
            "jobs_per_s": self.rate("jobs_finished"),
            "preemptions": self.count("preemptions"),
            "wasted_tokens": self.count("wasted_tokens"),
            "prefix_hit_share": self.prefix_hits,
            "occupancy": self.occupancy,
            "slot_shares": self.shares(),
            "latencies_s": {
                name: dict(zip((f"p{round(100 * share)}" for share in QUANTILES), found, strict=True))
                for name in self.latencies
                if (found := self.quantiles(name))
            },
        }


def between(before: Snapshot | None, now: Snapshot) -> Figures:
    """From one look to another; since the worker's start where there is no earlier one, or it is of another process."""
    if before is None or before.pid != now.pid or before.host != now.host or before.up_s >= now.up_s:
        before = Snapshot()
    seconds = now.up_s - before.up_s
    counts = {name: max(0.0, value - before.counters.get(name, 0.0)) for name, value in now.counters.items()}
    return Figures(
        seconds=seconds,
        counts=counts,
        rates={name: count / seconds for name, count in counts.items()} if seconds else {},
        latencies={name: _less(buckets, before.latencies.get(name)) for name, buckets in now.latencies.items()},
    )


def total(figures: Iterable[Figures]) -> Figures:
    """Of several workers together. Histograms of other bounds than the first one's (another version) are left out."""
    counts, rates, latencies, seconds = dict[str, float](), dict[str, float](), dict[str, Buckets](), 0.0
    for each in figures:
        seconds = max(seconds, each.seconds)
        for into, values in ((counts, each.counts), (rates, each.rates)):
            for name, value in values.items():
                into[name] = into.get(name, 0.0) + value
        for name, buckets in each.latencies.items():
            first = latencies.setdefault(name, buckets)
            if first is not buckets and first.bounds == buckets.bounds:
                added = tuple(a + b for a, b in zip(first.counts, buckets.counts, strict=True))
                latencies[name] = Buckets(bounds=first.bounds, counts=added)
    return Figures(seconds, counts, rates, latencies)


def quantile(buckets: Buckets, share: float) -> float:
    """The value that `share` of the observations do not exceed, even within a bucket, as Prometheus has it.

    At least one observation.
    """
    upto = list(accumulate(buckets.counts))
    rank = share * upto[-1]
    number = next(number for number, count in enumerate(upto) if count >= rank)
    if number == len(buckets.bounds):
        return buckets.bounds[-1] if buckets.bounds else 0.0
    low = buckets.bounds[number - 1] if number else 0.0
    inside = rank - (upto[number] - buckets.counts[number])
    return low + (buckets.bounds[number] - low) * inside / buckets.counts[number]


def tokens_per_s(request: RequestView, before: Snapshot | None, now: Snapshot) -> float:
    """Of one request between two looks, or, where the earlier one did not have it, since this worker took it."""
    same = [each for each in before.requests if _is_same(each, request)] if before else []
    if before and same and now.up_s > before.up_s and request.age_s > same[0].age_s:
        return max(0, request.tokens - same[0].tokens) / (now.up_s - before.up_s)
    return max(0, request.tokens - request.resumed) / request.age_s if request.age_s else 0.0


def _is_same(one: RequestView, other: RequestView) -> bool:
    return one.id == other.id and one.lane == other.lane and one.engine == other.engine


def _sum(values: Mapping[str, float], name: str) -> float:
    return sum(value for each, value in values.items() if each == name or each.startswith(f"{name}."))


def _less(buckets: Buckets, before: Buckets | None) -> Buckets:
    if before is None or before.bounds != buckets.bounds:
        return buckets
    return Buckets(
        bounds=buckets.bounds, counts=tuple(max(0.0, a - b) for a, b in zip(buckets.counts, before.counts, strict=True))
    )
