"""What is subtracted from a reward before it multiplies a trajectory's gradient. All results are float64."""

from __future__ import annotations

import torch
from torch import Tensor

from vcpo.methods.groups import group_max, group_size, group_sum
from vcpo.methods.ratios import truncated_log_weights
from vcpo.methods.spec import OpobWeighting


def leave_one_out_mean(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """For each trajectory, the mean reward of the *others* of its group; its own reward if it is alone."""
    others = group_size(group_B) - 1
    mean = (group_sum(rewards_B, group_B) - rewards_B) / others.clamp(min=1)
    return torch.where(others > 0, mean, rewards_B.double())


def opob_log_weights(
    weighting: OpobWeighting,
    log_ratios_B: Tensor,
    cap: float | None,
    squared_norms_B: Tensor,
    factors_B: Tensor,
    set_B: Tensor,
) -> Tensor:
    """Logarithms of the weights of the rewards in the off-policy optimal baseline, up to a constant of each set.

    log_ratios_B: un-truncated ratio that weights the trajectory's gradient (``trajectory_log_ratios``).
    cap: the truncation c of the weight wbar = min(w, c) that is applied.
    squared_norms_B: n_i, the squared norm of the gradient that (weight * factor * advantage) multiplies.
    factors_B: what else multiplies the trajectory's gradient: the length normalisation over the reward scale.
    set_B: the trajectories that share one baseline.

    ``paper``: w^2 n (arXiv 2602.17616, eq. 7); ``applied``: (wbar * factor)^2 n, the squared norm of what in fact
    multiplies (R - b), which minimises the second moment of the estimator that is applied; ``reference``:
    wbar^2 w^2 n, as the authors' code computes it.

    At token level the truncated ratios are inside the gradient, so that n is already the squared norm of the weighted
    sum of token gradients and w = wbar = 1: ``paper`` and ``reference`` are n, ``applied`` is factor^2 n.

    Infinite ratios outweigh every finite one of their set and count as equal among themselves, as in the ESS.
    """
    ratios = _limit(log_ratios_B, set_B)
    truncated = truncated_log_weights(log_ratios_B, cap)
    log_norms = squared_norms_B.double().log()
    if weighting == "paper":
        return 2 * ratios + log_norms
    if weighting == "reference":
        return 2 * ratios + 2 * truncated_log_weights(ratios, cap) + log_norms
    if cap is None:
        truncated = ratios
    return 2 * truncated + 2 * factors_B.double().log() + log_norms


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


def _limit(log_ratios_B: Tensor, set_B: Tensor) -> Tensor:
    infinite = log_ratios_B == torch.inf
    in_infinite_set = group_max(log_ratios_B, set_B) == torch.inf
    finite = torch.where(in_infinite_set, -torch.inf, log_ratios_B)
    return torch.where(infinite, 0.0, finite)
