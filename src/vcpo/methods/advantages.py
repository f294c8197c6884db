"""From rewards to the number that multiplies each trajectory's weighted gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from vcpo.methods.baselines import (
    leave_one_out_mean,
    opob_log_weights,
    others_weighted_mean_reward,
    soft_value,
    weighted_mean_reward,
)
from vcpo.methods.groups import group_mean, group_std, has_equal_rewards
from vcpo.methods.spec import MethodSpec


def contributes(spec: MethodSpec, rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, whether its advantage can be other than 0 (bool). Depends on the rewards alone.

    A group of equal rewards contributes exactly nothing if its baseline is its own or its rewards are scaled by their
    standard deviation. Only an absolute reward (no baseline, or one shared by the minibatch, without scaling) lets
    it speak.
    """
    shares_baseline = spec.baseline == "none" or (spec.baseline == "opob" and spec.opob_scope == "minibatch")
    if not shares_baseline or spec.scale_rewards == "group":
        return ~has_equal_rewards(rewards_B, group_B)
    return torch.ones(len(rewards_B), dtype=torch.bool)


def reward_scales(spec: MethodSpec, rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, what its advantage is divided by: the group's population standard deviation, or 1.

    The scale of a group with equal rewards is 1; ``contributes`` takes such a group out.
    """
    ones = torch.ones(len(rewards_B), dtype=torch.float64)
    if spec.scale_rewards == "none":
        return ones
    return torch.where(has_equal_rewards(rewards_B, group_B), ones, group_std(rewards_B, group_B))


def baseline_sets(spec: MethodSpec, group_B: Tensor) -> Tensor:
    """For each trajectory, the set that shares its baseline: its group, or the whole minibatch."""
    if spec.baseline == "opob" and spec.opob_scope == "minibatch":
        return torch.zeros_like(group_B)
    return group_B


def fixed_baselines(spec: MethodSpec, rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """Baselines that depend on the rewards alone."""
    if spec.baseline == "group_mean":
        return group_mean(rewards_B, group_B)
    if spec.baseline == "leave_one_out":
        return leave_one_out_mean(rewards_B, group_B)
    if spec.baseline == "soft_value":
        return soft_value(rewards_B, group_B, spec.value_temperature)
    if spec.baseline == "none":
        return torch.zeros(len(rewards_B), dtype=torch.float64)
    raise ValueError(f"baseline {spec.baseline} depends on more than rewards")


def optimal_baselines(
    spec: MethodSpec,
    rewards_B: Tensor,
    log_ratios_B: Tensor,
    log_weights_B: Tensor,
    squared_norms_B: Tensor,
    factors_B: Tensor,
    set_B: Tensor,
) -> Tensor:
    """The off-policy optimal baseline of each trajectory; arguments as in ``opob_log_weights``.

    Trajectories that do not contribute (``contributes``) are no part of the estimator, so they must not be passed.
    """
    log_values = opob_log_weights(spec.opob_weighting, log_ratios_B, log_weights_B, squared_norms_B, factors_B, set_B)
    if spec.opob_leave_one_out:
        return others_weighted_mean_reward(rewards_B, log_values, set_B)
    return weighted_mean_reward(rewards_B, log_values, set_B)


def length_factors(spec: MethodSpec, lengths_B: Tensor) -> Tensor:
    """What multiplies each trajectory's summed token gradients (float64), the average over trajectories included.

    lengths_B: trained tokens T_i of every scored trajectory, all at least 1. ``trajectory_mean``: 1 / (B T_i);
    ``token_mean``: 1 / sum T; ``trajectory_sum``: 1 / B; ``constant_length``: 1 / (B constant_length).
    """
    lengths = lengths_B.double()
    if spec.loss_aggregation == "trajectory_mean":
        return 1.0 / (len(lengths) * lengths)
    if spec.loss_aggregation == "token_mean":
        return torch.full_like(lengths, 1.0) / lengths.sum()
    constant = 1.0
    if spec.loss_aggregation == "constant_length":
        constant = float(spec.constant_length or 1)
    return torch.full_like(lengths, 1.0 / (constant * max(len(lengths), 1)))
