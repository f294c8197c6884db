"""The groups of one optimizer step as flat vectors, and what their rewards alone decide."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vcpo.methods.advantages import (
    baseline_sets,
    contributes,
    fixed_baselines,
    length_factors,
    reward_scales,
)
from vcpo.methods.groups import group_std, has_equal_rewards, most_frequent_rewards
from vcpo.methods.spec import MethodSpec
from vcpo.records import Group, Trajectory


class Minibatch:
    """All trajectories of a step, in the order of the groups and their members; small vectors on the CPU.

    A trajectory is *scored* if it has a reward and at least one trained token. Only scored trajectories exist for the
    method: they alone make the group statistics, the ESS and the B in every average. A scored trajectory is *active*
    if its advantage can be other than 0; the others need no backward pass.

    rewards_B, equal_B, std_B, scales_B, factors_B, set_B, common_B (the most frequent reward of the set): see
    ``vcpo.methods``; 0 (False) where not scored.
    """

    def __init__(self, groups: Sequence[Group], spec: MethodSpec) -> None:
        self.trajectories: list[Trajectory] = [t for group in groups for t in group.trajectories]
        count = len(self.trajectories)
        self.group_B = torch.tensor(
            [index for index, group in enumerate(groups) for _ in group.trajectories], dtype=torch.int64
        )
        self.trained_B = torch.tensor([int(t.mask_T.sum()) for t in self.trajectories], dtype=torch.int64)
        rewards = [t.grade.reward if t.grade is not None else None for t in self.trajectories]
        self.has_reward_B = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool)
        self.scored_B = self.has_reward_B & (self.trained_B > 0)
        self.rewards_B = torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float64)

        scored = self.scored_B
        rewards_S, group_S = self.rewards_B[scored], self.group_B[scored]
        self.equal_B = self._spread(has_equal_rewards(rewards_S, group_S))
        self.std_B = self._spread(group_std(rewards_S, group_S))
        self.active_B = self._spread(contributes(spec, rewards_S, group_S))
        self.scales_B = self._spread(reward_scales(spec, rewards_S, group_S))
        self.factors_B = self._spread(length_factors(spec.loss_aggregation, self.trained_B[scored]))
        self.set_B = baseline_sets(spec, self.group_B)
        self.common_B = self._spread(most_frequent_rewards(rewards_S, self.set_B[scored]))
        self.baselines_B = torch.full((count,), torch.nan, dtype=torch.float64)
        if spec.baseline != "opob":
            self.baselines_B[scored] = fixed_baselines(spec, rewards_S, group_S)

    def problem(self) -> str | None:
        """Why these rewards cannot make an update, or ``None``."""
        if not self.scored_B.any():
            return "no trajectory has both a reward and a trained token"
        for trajectory, reward in zip(self.trajectories, self.rewards_B.tolist(), strict=True):
            if not math.isfinite(reward):
                return f"the reward of {trajectory.name} is not a finite number"
        return None

    def advantages(self) -> Tensor:
        """(B,) (R - b) / scale of the active trajectories whose baseline is known, 0 for all others."""
        advantages = (self.rewards_B - self.baselines_B) / self.scales_B
        return torch.where(self.active_B & ~self.baselines_B.isnan(), advantages, 0.0)

    def _spread(self, values_S: Tensor) -> Tensor:
        values_B = torch.zeros(len(self.trajectories), dtype=values_S.dtype)
        values_B[self.scored_B] = values_S
        return values_B
