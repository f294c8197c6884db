from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.methods.advantages import (
    baseline_sets,
    contributes,
    fixed_baselines,
    length_factors,
    optimal_baselines,
    reward_scales,
)
from vcpo.methods.baselines import leave_one_out_mean, opob_log_weights, weighted_mean_reward
from vcpo.methods.groups import group_mean, group_std, has_equal_rewards
from vcpo.methods.spec import METHODS, MethodSpec

VCPO = METHODS["vcpo"]
GROUPS = torch.tensor([0, 0, 0, 2, 2, 2])


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def capped(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(max=math.log(8.0))


def test_group_statistics_by_hand() -> None:
    rewards = f64(1, 0, 2, 5, 5, 2)
    assert group_mean(rewards, GROUPS).tolist() == [1, 1, 1, 4, 4, 4]
    assert group_std(rewards, GROUPS).tolist() == pytest.approx([math.sqrt(2 / 3)] * 3 + [math.sqrt(2)] * 3)
    assert leave_one_out_mean(rewards, GROUPS).tolist() == [1, 1.5, 0.5, 3.5, 3.5, 5]


def test_a_trajectory_alone_is_its_own_leave_one_out_mean() -> None:
    assert leave_one_out_mean(f64(3.0), torch.tensor([0])).tolist() == [3.0]


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3, 1e-9, 1e9])
def test_rewards_that_differ_by_float_noise_are_equal(value: float) -> None:
    noisy = f64(value, value * (1 + 2e-16), value * (1 - 1e-7))
    assert has_equal_rewards(noisy, torch.zeros(3, dtype=torch.int64)).all()
    assert not contributes(VCPO, noisy, torch.zeros(3, dtype=torch.int64)).any()


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_small_rewards_that_differ_are_not_noise(scale: float) -> None:
    assert not has_equal_rewards(scale * f64(0, 0, 1), torch.zeros(3, dtype=torch.int64)).any()
    assert not has_equal_rewards(scale * f64(1, 1, 1.001), torch.zeros(3, dtype=torch.int64)).any()


def test_equality_is_judged_group_by_group() -> None:
    assert has_equal_rewards(f64(1, 1, 1, 0, 0, 1), GROUPS).tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("name", ["vcpo", "tis", "tis_token", "grpo", "rloo"])
def test_equal_rewards_do_not_contribute(name: str) -> None:
    expected = [False] * 3 + [True] * 3
    assert contributes(METHODS[name], f64(1, 1, 1, 0, 0, 1), GROUPS).tolist() == expected


def test_equal_rewards_speak_only_where_rewards_are_absolute() -> None:
    rewards = f64(1, 1, 1, 0, 0, 1)
    assert contributes(METHODS["reinforce"], rewards, GROUPS).all()
    shared = replace(VCPO, opob_scope="minibatch", scale_rewards="none")
    assert contributes(shared, rewards, GROUPS).all()
    assert contributes(replace(shared, scale_rewards="group"), rewards, GROUPS).tolist() == [False] * 3 + [True] * 3


def slow_opob(weights: list[float], rewards: list[float]) -> float:
    return sum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights)


@pytest.mark.parametrize("weighting", ["paper", "applied", "reference"])
def test_opob_weightings_against_plain_floats(weighting) -> None:  # type: ignore[no-untyped-def]
    ratios, norms, rewards = [0.5, 20.0, 3.0], [2.0, 0.1, 7.0], [1.0, 0.0, 2.0]
    factors, cap = [0.1, 0.3, 0.2], 8.0
    by_hand = []
    for w, n, a in zip(ratios, norms, factors, strict=True):
        truncated = min(w, cap)
        by_hand.append(
            {"paper": w**2 * n, "applied": (truncated * a) ** 2 * n, "reference": truncated**2 * w**2 * n}[weighting]
        )
    spec = replace(VCPO, opob_weighting=weighting)
    sets = torch.zeros(3, dtype=torch.int64)
    baselines = optimal_baselines(
        spec, f64(*rewards), f64(*ratios).log(), capped(f64(*ratios).log()), f64(*norms), f64(*factors), sets
    )
    assert baselines.tolist() == pytest.approx([slow_opob(by_hand, rewards)] * 3, rel=1e-12)


def test_opob_is_taken_within_each_set() -> None:
    rewards, norms = f64(1, 0, 2, 5, 5, 2), f64(1, 2, 3, 4, 5, 6)
    zeros, ones = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    baselines = optimal_baselines(VCPO, rewards, zeros, zeros, norms, ones, baseline_sets(VCPO, GROUPS))
    assert baselines.tolist() == pytest.approx([7 / 6] * 3 + [57 / 15] * 3, rel=1e-12)
    shared = replace(VCPO, opob_scope="minibatch")
    baselines = optimal_baselines(shared, rewards, zeros, zeros, norms, ones, baseline_sets(shared, GROUPS))
    assert baselines.tolist() == pytest.approx([64 / 21] * 6, rel=1e-12)


def test_opob_with_equal_weights_is_the_group_mean() -> None:
    rewards = f64(1, 0, 2, 5, 5, 2)
    baselines = weighted_mean_reward(rewards, torch.full((6,), -900.0, dtype=torch.float64), GROUPS)
    assert baselines.tolist() == pytest.approx(group_mean(rewards, GROUPS).tolist(), rel=1e-12)


@pytest.mark.parametrize("reward", [0.1, -7.3, 1e-30, 123456.789])
def test_opob_of_equal_rewards_is_that_reward_without_rounding(reward: float) -> None:
    log_weights = f64(-3.0, 11.7, 0.2)
    baselines = weighted_mean_reward(f64(reward, reward, reward), log_weights, torch.zeros(3, dtype=torch.int64))
    assert baselines.tolist() == [reward] * 3


def test_opob_weights_that_overflow_every_float_are_handled_in_log_space() -> None:
    one_set = torch.zeros(2, dtype=torch.int64)
    log_weights = opob_log_weights(
        "paper", f64(1000.0, 1000.0), capped(f64(1000.0, 1000.0)), f64(1, 3), f64(1, 1), one_set
    )
    assert weighted_mean_reward(f64(0, 1), log_weights, one_set).tolist() == pytest.approx([0.75] * 2, rel=1e-12)


@pytest.mark.parametrize("weighting", ["paper", "reference"])
def test_infinite_ratios_outweigh_finite_ones_and_are_equal_among_themselves(weighting) -> None:  # type: ignore[no-untyped-def]
    log_ratios = f64(math.inf, math.inf, 600.0, 0.0, 0.0, 0.0)
    log_weights = opob_log_weights(
        weighting, log_ratios, capped(log_ratios), f64(1, 3, 9, 1, 1, 1), torch.ones(6), GROUPS
    )
    baselines = weighted_mean_reward(f64(0, 1, 9, 3, 3, 0), log_weights, GROUPS)
    assert baselines.tolist() == pytest.approx([0.75] * 3 + [2.0] * 3, rel=1e-12)


def test_a_set_without_any_weight_has_the_plain_mean() -> None:
    one_set = torch.zeros(2, dtype=torch.int64)
    log_weights = opob_log_weights("paper", f64(-math.inf, 0.0), f64(-math.inf, 0.0), f64(1, 0), f64(1, 1), one_set)
    assert weighted_mean_reward(f64(0, 1), log_weights, one_set).tolist() == [0.5, 0.5]


positive = st.floats(1e-3, 1e3)
trajectories = st.lists(st.tuples(st.floats(-5, 5), positive, positive, st.floats(-2, 2)), min_size=2, max_size=12)


@given(trajectories, st.floats(-1, 1))
@settings(max_examples=60, deadline=None)
def test_applied_weighting_minimises_the_second_moment_of_the_applied_estimator(  # type: ignore[no-untyped-def]
    entries, offset: float
) -> None:
    log_ratios, norms, factors, rewards = (f64(*column) for column in zip(*entries, strict=True))
    spec = replace(VCPO, opob_weighting="applied")
    sets = torch.zeros(len(rewards), dtype=torch.int64)
    best = optimal_baselines(spec, rewards, log_ratios, capped(log_ratios), norms, factors, sets)
    squared = (log_ratios.exp().clamp(max=8.0) * factors).square() * norms

    def second_moment(baseline: torch.Tensor) -> float:
        return float((squared * (rewards - baseline).square()).sum())

    assert second_moment(best) <= second_moment(best + offset) + 1e-9 * float(squared.sum())


@given(trajectories, st.floats(-20, 20), st.randoms())
@settings(max_examples=60, deadline=None)
def test_opob_ignores_order_and_common_factors(entries, shift: float, random) -> None:  # type: ignore[no-untyped-def]
    def baseline(entries, shift: float) -> float:  # type: ignore[no-untyped-def]
        log_ratios, norms, factors, rewards = (f64(*column) for column in zip(*entries, strict=True))
        sets = torch.zeros(len(rewards), dtype=torch.int64)
        shifted = log_ratios + shift
        return float(optimal_baselines(VCPO, rewards, shifted, capped(shifted), norms, factors, sets)[0])

    shuffled = list(entries)
    random.shuffle(shuffled)
    assert baseline(shuffled, shift) == pytest.approx(baseline(entries, 0.0), rel=1e-7, abs=1e-9)


def test_reward_scales_are_population_deviations_or_one() -> None:
    rewards = f64(1, 1, 1, 0, 0, 3)
    assert reward_scales(VCPO, rewards, GROUPS).tolist() == pytest.approx([1.0] * 3 + [math.sqrt(2)] * 3)
    assert reward_scales(METHODS["rloo"], rewards, GROUPS).tolist() == [1.0] * 6


def test_fixed_baselines_do_not_know_the_optimal_one() -> None:
    with pytest.raises(ValueError, match="more than rewards"):
        fixed_baselines(VCPO, f64(1.0), torch.tensor([0]))
    assert fixed_baselines(METHODS["reinforce"], f64(1.0), torch.tensor([0])).tolist() == [0.0]


def test_length_factors_by_hand() -> None:
    lengths = torch.tensor([1, 4, 5])
    assert length_factors(MethodSpec(), lengths).tolist() == pytest.approx([1 / 3, 1 / 12, 1 / 15])
    assert length_factors(MethodSpec(loss_aggregation="token_mean"), lengths).tolist() == pytest.approx([0.1] * 3)
    assert length_factors(MethodSpec(loss_aggregation="trajectory_sum"), lengths).tolist() == pytest.approx([1 / 3] * 3)
    constant = MethodSpec(loss_aggregation="constant_length", constant_length=10)
    assert length_factors(constant, lengths).tolist() == pytest.approx([1 / 30] * 3)


def test_the_two_parts_of_vcpo_can_be_switched_off() -> None:
    assert replace(VCPO, step_size="constant", baseline="group_mean") == METHODS["tis"] == MethodSpec()
    assert VCPO.needs_norms
    assert not METHODS["tis"].needs_norms
