"""Intervals that say what a handful of runs can tell: a mean's by bootstrap, a share's by Wilson's formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """Both ends belong to it."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def bootstrap_mean(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Percentile bootstrap interval of the mean of independent values, one per seed; ``None`` for a single value.

    The values are drawn with replacement 10,000 times; the ends are quantiles of the means. Always the same for the
    same values, in whatever order they come (Efron & Tibshirani 1993, chapter 13).

    With few values it is narrower than it says. At 95% it is the range from the smallest to the largest value for two
    and for three values. For normally distributed values it covers the true mean in about 50, 75, 80, 84 and 90% of all
    cases with 2, 3, 4, 5 and 10 values.
    Raises ValueError without a value, and for one that is not finite.
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"the mean of {list(values)} has no interval")
    if len(values) == 1:
        return None
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    drawn = np.random.default_rng(0).integers(len(ordered), size=(RESAMPLES, len(ordered)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(ordered[drawn].mean(axis=1), [tail, 1 - tail])
    return Interval(float(low), float(high))


def wilson_share(count: int, total: int, confidence: float = CONFIDENCE) -> Interval | None:
    """Wilson's score interval of a share (J. Am. Stat. Assoc. 22, 1927); ``None`` when there is nothing to count.

    All of five runs is [0.57, 1]: five runs without a collapse do not show that none would. Raises ValueError for a
    count outside [0, total].
    """
    if not 0 <= count <= total:
        raise ValueError(f"{count} of {total} is no share")
    if total == 0:
        return None
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    share = count / total
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = math.sqrt(z2 * (share * (1 - share) / total + z2 / (4 * total**2))) / (1 + z2 / total)
    # exact at the edges, where rounding would leave the unit interval
    return Interval(0.0 if count == 0 else centre - half, 1.0 if count == total else centre + half)
