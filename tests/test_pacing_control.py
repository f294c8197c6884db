"""The staleness limit follows the effective sample size: lower when it is low, higher when it recovers, never above."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacing_cases import VirtualRun, pacing_of
from run_cases import InterruptAfter, assert_equal_weights, final_weights, timeless_metrics, tiny_config
from vcpo.pipeline.run import train
from vcpo.pipeline.staleness_control import StalenessControl

LOW, HIGH = {"ess": 0.2}, {"ess": 0.9}


def limits(control: StalenessControl, *steps: dict[str, float]) -> list[int]:
    seen = []
    for metrics in steps:
        control.observe(metrics)
        seen.append(control.limit)
    return seen


def test_low_halves_and_high_adds_one_up_to_the_bound() -> None:
    control = StalenessControl(8, target_ess=0.5, in_flight=False)
    assert limits(control, HIGH, LOW, LOW, LOW, LOW, LOW) == [8, 4, 2, 1, 0, 0]
    assert limits(control, *[HIGH] * 10) == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_the_target_itself_is_enough_and_no_number_is_not() -> None:
    control = StalenessControl(4, target_ess=0.5, in_flight=False)
    assert limits(control, {"ess": 0.5}, {"ess": math.nan}, {}, {"ess": 0.5}) == [4, 2, 2, 3]


def test_steps_whose_groups_were_started_under_the_old_limit_are_not_judged() -> None:
    control = StalenessControl(4, target_ess=0.5, in_flight=True)
    # after the change from 4, four low steps say nothing; the fifth halves again; from then on two
    assert limits(control, LOW, LOW, LOW, LOW, LOW, LOW, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH) == [
        2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 3,
    ]  # fmt: skip


def test_without_a_target_the_limit_stays_and_is_no_metric() -> None:
    control = StalenessControl(3, target_ess=None, in_flight=True)
    assert limits(control, LOW, {"ess": math.nan}, {}) == [3, 3, 3]
    assert control.metrics() == {}
    assert StalenessControl(3, target_ess=0.5, in_flight=True).metrics() == {"staleness_limit": 3.0}


@given(st.lists(st.floats(0, 1) | st.just(math.nan), max_size=60), st.integers(0, 9), st.booleans(), st.data())
def test_the_limit_stays_within_its_bounds_and_continues_from_its_state(
    ess: list[float], max_staleness: int, in_flight: bool, data: Any
) -> None:
    whole, before, after = (StalenessControl(max_staleness, 0.5, in_flight) for _ in range(3))
    cut = data.draw(st.integers(0, len(ess)))
    seen = limits(whole, *({"ess": value} for value in ess))
    assert all(0 <= limit <= max_staleness for limit in seen)
    first = limits(before, *({"ess": value} for value in ess[:cut]))
    after.load_state(before.state())
    assert first + limits(after, *({"ess": value} for value in ess[cut:])) == seen


@pytest.mark.parametrize("pacing", ["bounded", "drop_stale"])
def test_the_limit_settles_where_the_ess_is_held_and_recovers_when_lag_does_no_more_harm(pacing: str) -> None:
    """Lags over 2 make the ESS low until step 100; after that nothing does."""
    steps = 0

    def ess(lags: list[int]) -> float:
        nonlocal steps
        steps += 1
        return 0.1 if steps <= 100 and max(lags) > 2 else 0.9

    run = VirtualRun(
        pacing_of(pacing), 8, 2, 200, token_counts=[3], step_ticks=[6], slots=64, target_ess=0.5, ess=ess
    ).run()
    assert max(run.limits) <= 8
    settled = run.limits[40:100]
    assert max(settled) <= 3
    assert sum(settled) / len(settled) >= 1
    assert run.limits[-1] == 8
    # with a low limit the lags themselves are low
    assert max(max(lags) for lags in run.lags[60:100]) <= 3


@given(st.integers(0, 6), st.lists(st.sampled_from([0.1, 0.9]), min_size=1, max_size=12), st.integers(1, 20))
@settings(deadline=None)
def test_groups_started_under_a_limit_are_trained_within_it(
    max_staleness: int, ess: list[float], step_ticks: int
) -> None:
    step = 0

    def next_ess(lags: list[int]) -> float:
        nonlocal step
        step += 1
        return ess[step % len(ess)]

    run = VirtualRun(
        pacing_of("bounded"), max_staleness, 2, 30, [4, 9, 2], [step_ticks], slots=9, target_ess=0.5, ess=next_ess
    ).run()
    # in force when the group of a step was started: limits[v - 1] at version v
    for trained_at, lags in enumerate(run.lags):
        for lag in lags:
            started_at = trained_at - lag
            in_force = [max_staleness, *run.limits][: started_at + 1]
            assert lag <= max(in_force)


def test_lockstep_samples_the_next_minibatch_at_the_limit(tmp_path: Path) -> None:
    """The rule written out once more, over the effective sample sizes that the run has logged."""
    config = tiny_config(
        tmp_path, "runtime.max_staleness=5", "runtime.target_ess=0.97", "training.max_steps=16", "method=tis"
    )
    lines = timeless_metrics(train(config, make_report=False))
    limit, seen = 5, set()
    for step, line in enumerate(lines):
        assert line["lag_max"] == line["lag_mean"] == min(limit, step)
        limit = min(limit + 1, 5) if line["ess"] >= 0.97 else limit // 2
        assert line["staleness_limit"] == limit
        seen.add(limit)
    assert len(seen) > 1


def test_lockstep_continues_a_controlled_run_bit_for_bit(tmp_path: Path) -> None:
    changes = ("runtime.max_staleness=4", "runtime.target_ess=0.97", "training.max_steps=8", "runtime.lag=mixed")
    whole = train(tiny_config(tmp_path / "whole", *changes), make_report=False)
    config = tiny_config(tmp_path / "halves", *changes)
    with pytest.raises(KeyboardInterrupt):
        train(config, make_report=False, progress=InterruptAfter(3))
    halves = train(config, mode="resume", make_report=False)
    assert_equal_weights(final_weights(whole), final_weights(halves))
    assert timeless_metrics(whole) == timeless_metrics(halves)
