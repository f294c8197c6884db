"""Numbers that are watched beside the ESS, which is blind to a drift that all trajectories share."""

from __future__ import annotations

import torch
from torch import Tensor


def k3_terms(log_ratios_N: Tensor) -> Tensor:
    """r - 1 - log r with r = pi / mu: never negative; its mean over tokens sampled from mu is KL(mu || pi)."""
    log_ratios = log_ratios_N.double()
    # an infinite ratio would be inf - inf
    return torch.where(log_ratios == torch.inf, torch.inf, torch.expm1(log_ratios) - log_ratios)
