"""What is subtracted from a reward before it multiplies a trajectory's gradient. All results are float64."""

from __future__ import annotations

import torch
from torch import Tensor

from vcpo.methods.groups import group_max, group_mean, group_size, group_sum
from vcpo.methods.spec import OpobWeighting


def leave_one_out_mean(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, the mean reward of the *others* of its group; its own reward if it is alone."""
    others = group_size(group_B) - 1
    mean = (group_sum(rewards_B, group_B) - rewards_B) / others.clamp(min=1)
    return torch.where(others > 0, mean, rewards_B.double())


def opob_log_weights(
    weighting: OpobWeighting,
    log_ratios_B: Tensor,
    log_weights_B: Tensor,
    squared_norms_B: Tensor,
    factors_B: Tensor,
    set_B: Tensor,
) -> Tensor:
    """Logarithms of the weights of the rewards in the off-policy optimal baseline, up to a constant of each set.

    log_ratios_B: the un-truncated ratio w that the trajectory's weight is made of (``trajectory_log_ratios``).
    log_weights_B: the weight wbar that is applied, min(w, c) for truncation.
    squared_norms_B: n_i, the squared norm of the gradient that (weight * factor * advantage) multiplies.
    factors_B: what else multiplies the trajectory's gradient: the length normalisation over the reward scale.
    set_B: the trajectories that share one baseline.

    ``paper``: w^2 n (arXiv 2602.17616, eq. 7); ``applied``: (wbar * factor)^2 n, the squared norm of what in fact
    multiplies (R - b), which minimises the second moment of the estimator that is applied; ``reference``:
    wbar^2 w^2 n, as the authors' code computes it.

    At token level the weights are inside the gradient, so that n is already the squared norm of the weighted
    sum of token gradients and w = wbar = 1: ``paper`` and ``reference`` are n, ``applied`` is factor^2 n.

    Infinite ratios outweigh every finite one of their set and count as equal among themselves, as in the ESS.
    """
    ratios = _limit(log_ratios_B, set_B)
    log_norms = squared_norms_B.double().log()
    if weighting == "paper":
        return 2 * ratios + log_norms
    applied = _limit(log_weights_B, set_B)
    if weighting == "reference":
        return 2 * ratios + 2 * applied + log_norms
    return 2 * applied + 2 * factors_B.double().log() + log_norms


def weighted_mean_reward(rewards_B: Tensor, log_weights_B: Tensor, set_B: Tensor) -> Tensor:
    """For each trajectory, sum(v R) / sum(v) over its set, with v = exp(log_weights_B) (arXiv 2602.17616, eq. 7).

    Exact when all rewards of the set are the same number, and always between the smallest and the largest reward. A
    set without any weight has no gradient that a baseline could matter to; its baseline is the plain mean.
    """
    rewards = rewards_B.double()
    largest_weight = group_max(log_weights_B, set_B)
    weightless = largest_weight == -torch.inf
    weights = torch.where(weightless, 1.0, (log_weights_B - largest_weight).exp())
    # around the largest reward, so that equal rewards are their own baseline without rounding
    top = group_max(rewards, set_B)
    return top + group_sum(weights * (rewards - top), set_B) / group_sum(weights, set_B)


def others_weighted_mean_reward(rewards_B: Tensor, log_weights_B: Tensor, set_B: Tensor) -> Tensor:
    """As ``weighted_mean_reward``, but over the *others* of the set, so that no reward is part of its own baseline.

    The plain mean of the others where they have no weight; the own reward of a trajectory that is alone.
    """
    rewards = rewards_B.double()
    is_other = (set_B[:, None] == set_B[None, :]) & ~torch.eye(len(set_B), dtype=torch.bool)
    log_weights = torch.where(is_other, log_weights_B[None, :], -torch.inf)
    # around the largest reward, so that equal rewards are their own baseline without rounding
    top = group_max(rewards, set_B)
    mean = top + (log_weights.softmax(dim=1) * (rewards[None, :] - top[:, None])).sum(dim=1)
    weightless = log_weights.max(dim=1).values == -torch.inf
    return torch.where(weightless, leave_one_out_mean(rewards, set_B), mean)


def soft_value(rewards_B: Tensor, group_B: Tensor, temperature: float) -> Tensor:
    """For each trajectory, temperature * log mean exp(R / temperature) over its group (arXiv 2602.19362)."""
    rewards = rewards_B.double()
    top = group_max(rewards, group_B)
    return top + temperature * group_mean(((rewards - top) / temperature).exp(), group_B).log()


def token_optimal_baselines(rewards_B: Tensor, energies_N: Tensor, lengths_B: Tensor, group_B: Tensor) -> Tensor:
    """(N,) the optimal token baseline B_t = sum_i R_i W_it / sum_i W_it (arXiv 2602.07078) for packed tokens.

    energies_N: 1 - 2 pi(a) + sum_v pi(v)^2 of each trained token, the squared norm of the score by the logits;
    W_it = sum over the tokens of trajectory i up to position t. The sums over i are over the group's trajectories that
    are that long. Where only one is, B_t is its own reward: the source's option to use 0 there is not taken.
    """
    rewards = rewards_B.double()
    starts_B = lengths_B.cumsum(0) - lengths_B
    owner_N = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
    position_N = torch.arange(len(energies_N)) - starts_B[owner_N]
    total_N = energies_N.double().cumsum(0)
    before_B = torch.cat([total_N.new_zeros(1), total_N])[starts_B]
    weights_N = (total_N - before_B[owner_N]).clamp(min=0)
    cell_N = group_B[owner_N] * (int(lengths_B.max()) if len(lengths_B) else 1) + position_N
    cell_N = torch.unique(cell_N, return_inverse=True)[1]
    return weighted_mean_reward(rewards[owner_N], weights_N.log(), cell_N)


def _limit(log_ratios_B: Tensor, set_B: Tensor) -> Tensor:
    infinite = log_ratios_B == torch.inf
    in_infinite_set = group_max(log_ratios_B, set_B) == torch.inf
    finite = torch.where(in_infinite_set, -torch.inf, log_ratios_B)
    return torch.where(infinite, 0.0, finite)
