"""What is made of repeated measurements: medians with their spread, ratios of interleaved runs, percentiles, arrivals."""

import random
import statistics
from collections.abc import Sequence

import numpy as np

PERCENTILES = (50, 90, 99)
LEAST_GROWTH_S = 0.2
"""Waits that grow by less may have grown by chance."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ratio of the medians; least and most of the ratios of runs that followed each other, so that both met the same machine.

    `ours[i]` and `theirs[i]` are one turn. Where turns differ in number, the last ones of the longer side have no partner.
    """
    pairs = [own / other for own, other in zip(ours, theirs, strict=False)]
    return {"median": statistics.median(ours) / statistics.median(theirs), "min": min(pairs), "max": max(pairs)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99, interpolated between neighbours; none of no values."""
    if not values:
        return {}
    return {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests of a Poisson process of `rate` per second arrive, in order."""
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def is_growing(waits: Sequence[float]) -> bool:
    """Whether waits, in order of arrival, grow: the median of the last third is over twice that of the first, and more.

    So it is when requests come faster than they are served; below that rate the waits of a long enough run keep to a level.
    """
    third = len(waits) // 3
    if not third:
        return False
    return statistics.median(waits[-third:]) > 2 * statistics.median(waits[:third]) + LEAST_GROWTH_S
