"""Slow prompts are not starved: what is trained is what was sampled, with response times that differ 100-fold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacing_cases import VirtualRun, finished_group, pacing_of
from vcpo.learner.metrics import staleness_metrics
from vcpo.learner.minibatch import Minibatch
from vcpo.methods.spec import MethodSpec

SLOW = 100  # ticks of the slowest response; the quickest takes one


def lengths_of(seed: int, groups: int, slow_share: float) -> list[int]:
    """Ticks of each group's responses: most of them a few, some of them nearly or fully ``SLOW``."""
    rng = np.random.default_rng(seed)
    quick, slow = rng.integers(1, 6, groups), rng.integers(SLOW - 20, SLOW + 1, groups)
    lengths = np.where(rng.random(groups) < slow_share, slow, quick)
    lengths[:2] = 1, SLOW
    return [int(length) for length in lengths]


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Kolmogorov-Smirnov: the largest distance of the two distribution functions, in units of its spread by chance."""
    places = np.unique([*one, *other])
    functions = [np.searchsorted(np.sort(sample), places, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(functions[0] - functions[1]).max() * sqrt(len(one) * len(other) / (len(one) + len(other))))


def of_trained(run: VirtualRun) -> list[tuple[int, int]]:
    """Prompt and length of every group that was trained on, in order."""
    return [(number, run.token_counts[number % len(run.token_counts)]) for step in run.trained for number in step]


speeds = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(0, 8),
        "groups_per_step": st.integers(1, 4),
        "step_ticks": st.lists(st.integers(0, 60), min_size=1, max_size=5),
        "slots": st.integers(1, 32),
    }
)


@given(speeds, st.integers(0, 1000), st.floats(0, 0.5), st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_the_first_groups_trained_are_the_first_groups_sampled(
    speed: dict[str, Any], seed: int, slow_share: float, steps: int
) -> None:
    """At every step and at any speeds: the same prompts with the same lengths, each as often."""
    count = speed["groups_per_step"]
    lengths = lengths_of(seed, steps * count + 2, slow_share)
    run = VirtualRun(pacing_of("bounded"), last_step=steps, token_counts=lengths, **speed).run()
    for step in range(1, steps + 1):
        trained = of_trained(run)[: step * count]
        assert Counter(trained) == Counter(enumerate(lengths[: step * count]))
    assert max(lag for lags in run.lags for lag in lags) <= speed["max_staleness"]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("slots", [16, 64])
def test_lengths_are_trained_as_they_are_sampled_where_stale_groups_are_dropped_they_are_not(
    seed: int, slots: int
) -> None:
    """The contrast: what most systems do trains on quick responses, and what it drops is slow, counted and named."""
    lengths = lengths_of(seed, 4000, slow_share=0.2)
    common: dict[str, Any] = {
        "max_staleness": 4,
        "groups_per_step": 4,
        "last_step": 300,
        "token_counts": lengths,
        "step_ticks": [5, 9, 2],
        "slots": slots,
    }
    waits = VirtualRun(pacing_of("bounded"), **common).run()
    trained = [length for _, length in of_trained(waits)]
    assert waits.dropped == []
    assert distance(trained, lengths) < 1.63  # beyond which come one of 100 pairs of equal distributions
    assert np.mean(trained) == pytest.approx(np.mean(lengths), rel=0.1)

    drops = VirtualRun(pacing_of({"name": "drop_stale", "max_ahead": 8}), **common).run()
    quick = [length for _, length in of_trained(drops)]
    dropped = [lengths[number] for number in drops.dropped]
    assert len(dropped) == drops.pool.metrics()["dropped_groups/stale"] > 0
    assert distance(quick, lengths) > 2.69  # one of a million
    assert np.mean(quick) < 0.7 * np.mean(lengths)
    # nothing is hidden: together they are what was sampled
    assert Counter(quick) + Counter(dropped) == Counter(lengths[: len(quick) + len(dropped)])
    assert np.mean(dropped) > np.mean(quick)


@pytest.mark.parametrize(
    "pacing", ["bounded", {"name": "drop_stale", "max_ahead": 8}, {"name": "pace", "max_ahead": 8}]
)
def test_nothing_that_started_before_the_bound_is_trained_on(pacing: Any) -> None:
    """However slow: 100-fold differences between responses, and a learner that is sometimes slower still."""
    for seed in range(5):
        run = VirtualRun(
            pacing_of(pacing),
            max_staleness=3,
            groups_per_step=2,
            last_step=150,
            token_counts=lengths_of(seed, 1000, slow_share=0.3),
            step_ticks=[1, 1, 150, 3],
            slots=12,
        ).run()
        assert max(lag for lags in run.lags for lag in lags) <= 3


def test_a_slow_group_is_trained_at_the_latest_when_the_bound_says() -> None:
    """The slow one starts with version 0 and may be 2 steps old; two quick minibatches come before it."""
    run = VirtualRun(
        pacing_of("bounded"),
        max_staleness=2,
        groups_per_step=1,
        last_step=5,
        token_counts=[1, 1, SLOW, 1, 1],
        step_ticks=[1],
        slots=8,
    ).run()
    assert run.trained == [[0], [1], [2], [3], [4]]
    # 3 and 4 start with versions 1 and 2, when the learner waits for 2, and are trained by steps 3 and 4
    assert run.lags == [[0], [1], [2], [2], [2]]


def test_the_ages_of_tokens_are_counted_one_by_one() -> None:
    """By hand: two responses whose weights changed while they were decoded, and a token that was given, not sampled."""
    group = finished_group(0, [2, 2, 3, 5], [4, 5])
    group.trajectories[0].mask_T[1] = False
    metrics = staleness_metrics(Minibatch([group], MethodSpec()), version=6)
    # ages 4, 3, 1 and 2, 1; the given token (age 4) is not trained and does not count
    assert metrics["staleness_mean"] == pytest.approx(11 / 5)
    assert metrics["staleness_max"] == 4
    # by classes 1, 2-3 and 4-7
    shares = {name: share for name, share in metrics.items() if name.startswith("staleness_share/")}
    assert shares == {"staleness_share/1": 2 / 5, "staleness_share/2": 2 / 5, "staleness_share/4": 1 / 5}
    # lags are those of whole responses, from the version that started them
    assert (metrics["lag_mean"], metrics["lag_max"]) == (3.0, 4.0)
