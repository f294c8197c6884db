"""Effective sample size of a minibatch, the signal that VCPO's step size follows."""

from __future__ import annotations

import torch
from torch import Tensor


def effective_sample_size(log_ratios_B: Tensor) -> Tensor:
    """rho = (1/B) (sum_i w_i)^2 / sum_i w_i^2, a float64 scalar in [1/B, 1] (arXiv 2602.17616, eq. 5).

    log_ratios_B: un-truncated sequence log-ratios of the *whole* minibatch. Truncated weights hide a collapse, and
    the mean of the rho of parts is not the rho of the whole.

    Equal weights give exactly 1 whatever their size. Infinite ratios count as equal among themselves and outweigh
    every finite one: m of them give m / B. The result is NaN if any log-ratio is NaN, if all are -inf (no weight at
    all), or for an empty batch; a caller must treat NaN as "unknown", never as 1.
    """
    log_ratios = log_ratios_B.double()
    if not len(log_ratios):
        return torch.tensor(torch.nan, dtype=torch.float64)
    infinite = log_ratios == torch.inf
    if infinite.any() and not log_ratios.isnan().any():
        return infinite.double().mean()
    # dividing by the largest weight keeps the sums in range and makes equal weights exactly 1
    weights = (log_ratios - log_ratios.max()).exp()
    return (weights.sum().square() / weights.square().sum() / len(log_ratios)).clamp(max=1.0)


def largest_weight_share(log_ratios_B: Tensor) -> Tensor:
    """max_i w_i / sum_i w_i, a float64 scalar; the same conventions for infinite and NaN log-ratios."""
    log_ratios = log_ratios_B.double()
    if not len(log_ratios):
        return torch.tensor(torch.nan, dtype=torch.float64)
    infinite = log_ratios == torch.inf
    if infinite.any() and not log_ratios.isnan().any():
        return 1.0 / infinite.double().sum()
    return 1.0 / (log_ratios - log_ratios.max()).exp().sum()
