"""How much each baseline would leave of the gradient's variance, from the norms at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from vcpo.methods.baselines import leave_one_out_mean, opob_log_weights, weighted_mean_reward
from vcpo.methods.groups import group_mean
from vcpo.methods.spec import OpobWeighting

_WEIGHTINGS: tuple[OpobWeighting, ...] = ("paper", "applied", "reference")


def second_moments(
    rewards_B: Tensor,
    log_ratios_B: Tensor,
    log_weights_B: Tensor,
    squared_norms_B: Tensor,
    factors_B: Tensor,
    set_B: Tensor,
) -> dict[str, float]:
    """sum_i |g_i|^2 of the single gradients g_i = wbar_i factor_i (R_i - b) s_i, for every baseline b.

    For independent trajectories the variance of their sum is this, less the squared norms of their means, which
    baselines change little. Arguments as in ``opob_log_weights``, of the trajectories that contribute. Keys: ``none``,
    ``mean``, ``leave_one_out``, ``opob_paper``, ``opob_applied`` (the minimum among baselines per set),
    ``opob_reference``.
    """
    rewards = rewards_B.double()
    baselines_B = {
        "none": torch.zeros_like(rewards),
        "mean": group_mean(rewards, set_B),
        "leave_one_out": leave_one_out_mean(rewards, set_B),
    }
    for weighting in _WEIGHTINGS:
        log_values = opob_log_weights(weighting, log_ratios_B, log_weights_B, squared_norms_B, factors_B, set_B)
        baselines_B[f"opob_{weighting}"] = weighted_mean_reward(rewards, log_values, set_B)
    scales_B = (2 * log_weights_B).exp() * factors_B.double().square() * squared_norms_B.double()
    return {name: float((scales_B * (rewards - b).square()).sum()) for name, b in baselines_B.items()}
