"""Statistics of rewards within groups. ``group_B`` holds each trajectory's group as any small integer."""

from __future__ import annotations

import torch
from torch import Tensor

EQUAL_TOLERANCE = 1e-6
"""Rewards count as equal when their spread is at most this part of the largest of them: float noise, not a signal."""


def group_sum(values_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, the float64 sum of the values over its group."""
    return _totals(values_B, group_B)[group_B]


def group_size(group_B: Tensor) -> Tensor:
    """For each trajectory, the number of trajectories in its group (float64)."""
    return group_sum(torch.ones(len(group_B), dtype=torch.float64), group_B)


def group_max(values_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, the largest value in its group; NaN if one is NaN."""
    largest = torch.full((_count(group_B),), -torch.inf, dtype=torch.float64)
    return largest.scatter_reduce(0, group_B, values_B.double(), "amax")[group_B]


def group_mean(values_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, the mean of the values over its group; exact when they are all the same number."""
    # taken around the group's largest value: equal values have exactly their value as mean
    largest = group_max(values_B, group_B)
    return largest + group_sum(values_B - largest, group_B) / group_size(group_B)


def group_std(values_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, the population standard deviation of its group."""
    deviations = values_B - group_mean(values_B, group_B)
    return (group_sum(deviations.square(), group_B) / group_size(group_B)).sqrt()


def has_equal_rewards(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, whether the rewards of its group are all equal but for float noise (bool).

    Such a group says nothing about which response is better. Dividing its noise by its standard deviation, or by that
    plus a small constant, would make a gradient of nothing.
    """
    spread = group_max(rewards_B, group_B) + group_max(-rewards_B, group_B)
    return spread <= EQUAL_TOLERANCE * group_max(rewards_B.abs(), group_B)


def most_frequent_rewards(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, the reward that occurs most often in its group."""
    common_B = torch.zeros_like(rewards_B)
    for group in group_B.unique().tolist():
        values, counts = rewards_B[group_B == group].unique(return_counts=True)
        common_B[group_B == group] = values[counts.argmax()]
    return common_B


def _totals(values_B: Tensor, group_B: Tensor) -> Tensor:
    return torch.zeros(_count(group_B), dtype=torch.float64).index_add(0, group_B, values_B.double())


def _count(group_B: Tensor) -> int:
    return int(group_B.max()) + 1 if len(group_B) else 0
