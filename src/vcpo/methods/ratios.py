"""Importance ratios between the learner's policy pi and the sampler's policy mu, kept as logarithms.

Sums over the tokens of a trajectory are float64: a sequence log-ratio adds thousands of small float32 numbers of both
signs. Packed token vectors (``_N``) hold the trained tokens of trajectory 0, then those of trajectory 1, and so on.
Other tokens are left out before anything is exponentiated: a mask that multiplies a ratio afterwards turns an overflow
into 0 * inf = NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vcpo.methods.spec import RatioLevel


def sum_by_trajectory(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Sums over each trajectory's stretch of a packed vector; 0 for a trajectory of length 0."""
    total: Tensor = torch.segment_reduce(values_N.double(), "sum", lengths=lengths_B, initial=0)
    return total


def trajectory_log_ratios(level: RatioLevel, log_ratios_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Logarithm of the one ratio that weights each trajectory's gradient, before truncation.

    log_ratios_B: sequence log-ratios L_i = sum of the token log-ratios.
    ``sequence``: L_i; ``geometric``: L_i / T_i; ``none`` and ``token``: 0, because the trajectory has no weight of its
    own (at ``token`` level the weights are inside the trajectory's gradient).
    """
    if level == "sequence":
        return log_ratios_B
    if level == "geometric":
        return log_ratios_B / lengths_B.clamp(min=1)
    return torch.zeros_like(log_ratios_B)


def truncated_log_weights(log_ratios: Tensor, cap: float | None) -> Tensor:
    """log min(w, c), taken in log space so that an infinite ratio gives the cap. NaN stays NaN."""
    return log_ratios if cap is None else log_ratios.clamp(max=math.log(cap))


def truncated_weights(log_ratios: Tensor, cap: float | None) -> Tensor:
    """min(w, c); ``cap=None`` leaves the ratio as it is. No gradient flows through a weight: detach the log-ratios."""
    if cap is None:
        return log_ratios.exp()
    # exp(log c) may miss c by a rounding; the weight of a truncated ratio is the cap itself
    return torch.where(log_ratios >= math.log(cap), cap, log_ratios.exp())
