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
from vcpo.methods.baselines import token_optimal_baselines
from vcpo.methods.groups import group_std, has_equal_rewards, most_frequent_rewards
from vcpo.methods.ratios import sum_by_trajectory
from vcpo.methods.spec import MethodSpec
from vcpo.records import Group, Trajectory


class Minibatch:
    """All trajectories of a step, in the order of the groups and their members; small vectors on the CPU.

    A trajectory is *scored* if it has a reward and at least one trained token. Only scored trajectories exist for the
    method: they alone make the group statistics, the ESS and the B in every average. A scored trajectory is *judged* if
    its advantage can be other than 0, and *active* if it can have a gradient; the others need no backward pass.

    rewards_B: the graders'. shaped_B: what baselines and scales are made of.
    starts_B: where each trajectory's trained tokens begin in a vector of all trained tokens (``_K``).
    equal_B, std_B, scales_B, factors_B, set_B, common_B (the most frequent reward of the set): see ``vcpo.methods``;
    0 (False) where not scored.
    """

    def __init__(self, groups: Sequence[Group], spec: MethodSpec) -> None:
        self._spec = spec
        self.trajectories: list[Trajectory] = [t for group in groups for t in group.trajectories]
        self.group_B = torch.tensor(
            [index for index, group in enumerate(groups) for _ in group.trajectories], dtype=torch.int64
        )
        self.trained_B = torch.tensor([int(t.mask_T.sum()) for t in self.trajectories], dtype=torch.int64)
        self.starts_B = self.trained_B.cumsum(0) - self.trained_B
        rewards = [t.grade.reward if t.grade is not None else None for t in self.trajectories]
        self.has_reward_B = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool)
        self.scored_B = self.has_reward_B & (self.trained_B > 0)
        self.rewards_B = torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float64)
        self.shaped_B = self.rewards_B

        scored = self.scored_B
        rewards_S, group_S = self.rewards_B[scored], self.group_B[scored]
        self.equal_B = self._spread(has_equal_rewards(rewards_S, group_S))
        self.std_B = self._spread(group_std(rewards_S, group_S))
        self.judged_B = self._spread(contributes(spec, rewards_S, group_S))
        self.active_B = self.judged_B if spec.penalty is None else scored
        self.factors_B = self._spread(length_factors(spec, self.trained_B[scored]))
        self.set_B = baseline_sets(spec, self.group_B)
        self.token_baselines_K: Tensor | None = None
        self._shape()

    def penalize(self, log_ratios_B: Tensor) -> None:
        """Take ``reward_kl`` times the sequence log-ratio off the rewards.

        A group whose rewards are all equal still contributes nothing: differences between its penalties would be blown
        up by the group's standard deviation.
        """
        self.shaped_B = self.rewards_B - self._spec.reward_kl * log_ratios_B
        self._shape()

    def find_token_baselines(self, energies_K: Tensor) -> None:
        """The baselines of ``token_optimal``, from the energies of all trained tokens."""
        scored = self.scored_B
        of_scored_K = scored.repeat_interleave(self.trained_B)
        self.token_baselines_K = torch.zeros_like(energies_K)
        self.token_baselines_K[of_scored_K] = token_optimal_baselines(
            self.shaped_B[scored], energies_K[of_scored_K], self.trained_B[scored], self.group_B[scored]
        )

    def _shape(self) -> None:
        spec, scored = self._spec, self.scored_B
        rewards_S, group_S = self.shaped_B[scored], self.group_B[scored]
        self.scales_B = self._spread(reward_scales(spec, rewards_S, group_S))
        self.common_B = self._spread(most_frequent_rewards(rewards_S, self.set_B[scored]))
        self.baselines_B = torch.full((len(self.trajectories),), torch.nan, dtype=torch.float64)
        if spec.baseline not in ("opob", "token_optimal"):
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
        """(B,) (R - b) / scale of the judged trajectories whose baseline is known, 0 for all others.

        With baselines per token: the mean over the trajectory's tokens.
        """
        if self.token_baselines_K is not None:
            token_advantages_K = self.token_advantages(range(len(self.trajectories)))
            return sum_by_trajectory(token_advantages_K, self.trained_B) / self.trained_B.clamp(min=1)
        advantages = (self.shaped_B - self.baselines_B) / self.scales_B
        return torch.where(self.judged_B & ~self.baselines_B.isnan(), advantages, 0.0)

    def token_advantages(self, members: Sequence[int]) -> Tensor:
        """(k,) the advantage of every trained token of some trajectories."""
        chosen = list(members)
        lengths_B = self.trained_B[chosen]
        if self.token_baselines_K is None:
            return self.advantages()[chosen].repeat_interleave(lengths_B)
        shaped_k, scales_k, judged_k = (
            v[chosen].repeat_interleave(lengths_B) for v in (self.shaped_B, self.scales_B, self.judged_B)
        )
        advantages_k = (shaped_k - self.token_baselines_K[self.tokens_of(chosen)]) / scales_k
        return torch.where(judged_k, advantages_k, 0.0)

    def tokens_of(self, members: Sequence[int]) -> Tensor:
        """Where the trained tokens of some trajectories are among all of the minibatch."""
        parts = [torch.arange(int(self.starts_B[i]), int(self.starts_B[i] + self.trained_B[i])) for i in members]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def _spread(self, values_S: Tensor) -> Tensor:
        values_B = torch.zeros(len(self.trajectories), dtype=values_S.dtype)
        values_B[self.scored_B] = values_S
        return values_B
