"""Intervals against full enumeration and against the equations that define them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.report.bootstrap import bootstrap_mean, wilson_share


def enumerated(values: Sequence[float], tail: float) -> tuple[float, float]:
    """The smallest and largest mean with at least ``tail`` of all n^n resamples at or beyond it, each drawn once."""
    means = sorted(math.fsum(drawn) / len(values) for drawn in itertools.product(values, repeat=len(values)))
    position = math.ceil(tail * len(means)) - 1
    return means[position], means[-1 - position]


@pytest.mark.parametrize("values", [[0.2, 0.31, 0.55, 0.56], [0.5, 0.61, 0.58, 0.2, 0.66], [0.1, 0.2, 0.4, 0.8, 0.1]])
def test_the_interval_is_that_of_all_resamples(values: list[float]) -> None:
    interval = bootstrap_mean(values)
    assert interval is not None
    # neighbouring means of the enumeration lie about a hundredth apart
    assert (interval.low, interval.high) == pytest.approx(enumerated(values, 0.025), abs=0.012)


def test_two_and_three_values_give_their_range() -> None:
    for values in ([0.4, 0.1], [0.3, 0.4, 0.1]):
        interval = bootstrap_mean(values)
        assert interval is not None
        assert (interval.low, interval.high) == pytest.approx((0.1, 0.4))


def test_one_value_gives_no_interval_and_equal_values_one_without_width() -> None:
    assert bootstrap_mean([0.7]) is None
    interval = bootstrap_mean([0.0] * 5)
    assert interval is not None
    assert (interval.low, interval.high) == (0.0, 0.0)
    assert 0.0 in interval


def test_a_normal_sample_of_fifty_has_the_textbook_width() -> None:
    # a standard normal's quantiles: mean 0, interval +- 1.96 standard errors
    from statistics import NormalDist, pstdev

    values = [NormalDist().inv_cdf((i + 0.5) / 50) for i in range(50)]
    interval = bootstrap_mean(values)
    assert interval is not None
    half = 1.96 * pstdev(values) / math.sqrt(50)
    assert (interval.low, interval.high) == pytest.approx((-half, half), rel=0.05)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.randoms())
def test_the_order_of_seeds_does_not_matter_and_the_range_bounds_the_interval(
    values: list[float], random: object
) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    interval = bootstrap_mean(values)
    assert interval == bootstrap_mean(shuffled)
    assert interval is not None
    assert min(values) - 1e-12 <= interval.low <= interval.high <= max(values) + 1e-12


@pytest.mark.parametrize("values", [[], [0.1, math.nan], [0.1, math.inf]])
def test_what_has_no_mean_has_no_interval(values: list[float]) -> None:
    with pytest.raises(ValueError, match="has no interval"):
        bootstrap_mean(values)


@pytest.mark.parametrize(("count", "total"), [(1, 5), (3, 5), (1, 2), (7, 10), (99, 100)])
def test_the_ends_of_a_share_lie_1_96_standard_errors_from_it(count: int, total: int) -> None:
    interval = wilson_share(count, total)
    assert interval is not None
    for end in (interval.low, interval.high):
        # the score test's own equation, with the standard error at the end of the interval
        assert abs(count / total - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / total))
    assert interval.low < count / total < interval.high


def test_none_and_all_of_five() -> None:
    nothing, everything = wilson_share(0, 5), wilson_share(5, 5)
    assert nothing is not None
    assert everything is not None
    # z^2 / (n + z^2) with z = 1.96
    assert (nothing.low, nothing.high) == (0.0, pytest.approx(3.8415 / 8.8415, abs=1e-4))
    assert (everything.low, everything.high) == (pytest.approx(5 / 8.8415, abs=1e-4), 1.0)


def test_a_share_of_nothing() -> None:
    assert wilson_share(0, 0) is None
    with pytest.raises(ValueError, match="6 of 5 is no share"):
        wilson_share(6, 5)
