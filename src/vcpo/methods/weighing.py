"""What multiplies the score of every token and trajectory, besides advantage and average."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.methods.ratios import TokenRatios, sum_by_trajectory, trajectory_log_ratios
from vcpo.methods.spec import MethodSpec


@dataclass(frozen=True)
class Statistics:
    """The numbers that the parts of a method need of the whole minibatch; NaN where none is needed."""

    weight: float = math.nan
    mask: float = math.nan
    penalty: float = math.nan


@dataclass(frozen=True)
class Weighing:
    """The weights of some trajectories, float64.

    outer_B: weight of each trajectory's gradient. inner_N: weights inside the gradient, the mask included.
    log_ratios_B: logarithm of the ratio that ``outer_B`` is made of; 0 where the ratios are inside.
    penalty_N: added to the coefficients of the tokens, or ``None``.
    weights_B: outer times the mean of inner: what the trajectory's gradient is worth.
    reduced_B: how many of the trajectory's ratios got a smaller weight than they are.
    dropped_B: how many of its tokens got the weight 0.
    """

    outer_B: Tensor
    inner_N: Tensor
    log_ratios_B: Tensor
    penalty_N: Tensor | None
    weights_B: Tensor
    reduced_B: Tensor
    dropped_B: Tensor


def batch_statistics(spec: MethodSpec, tokens: TokenRatios) -> Statistics:
    """tokens: of every scored trajectory of the minibatch."""
    weight = mask = penalty = math.nan
    if spec.ratio_level != "none" and spec.weight.uses_batch:
        weight = spec.weight.statistic(_ratios(spec, tokens))
    if spec.mask is not None and spec.mask.uses_batch:
        mask = spec.mask.statistic(tokens)
    if spec.penalty is not None and spec.penalty.uses_batch:
        penalty = spec.penalty.statistic(tokens)
    return Statistics(weight, mask, penalty)


def weigh(spec: MethodSpec, tokens: TokenRatios, statistics: Statistics) -> Weighing:
    """The weights of some trajectories of a minibatch."""
    count = len(tokens.lengths_B)
    outer_B = torch.ones(count, dtype=torch.float64)
    inner_N = torch.ones_like(tokens.log_ratios_N)
    log_ratios_B = torch.zeros(count, dtype=torch.float64)
    reduced_B = torch.zeros(count, dtype=torch.float64)
    if spec.ratio_level == "token":
        log_ratios = _ratios(spec, tokens)
        inner_N = spec.weight(log_ratios, tokens.sign_N, statistics.weight)
        reduced_B = sum_by_trajectory(_is_reduced(inner_N, log_ratios), tokens.lengths_B)
    elif spec.ratio_level != "none":
        log_ratios_B = _ratios(spec, tokens)
        outer_B = spec.weight(log_ratios_B, tokens.sign_B, statistics.weight)
        reduced_B = _is_reduced(outer_B, log_ratios_B)
    if spec.residual_band is not None:
        low, high = spec.residual_band
        outer_B = outer_B * tokens.mean_log_ratios_B.clamp(math.log(low), math.log(high)).exp()
    if spec.mask is not None:
        # a dropped token's weight may be infinite: it is replaced, not multiplied by 0
        inner_N = inner_N.masked_fill(spec.mask.drops(tokens, statistics.mask), 0.0)
    penalty_N = None if spec.penalty is None else spec.penalty(tokens, statistics.penalty)
    is_dropped_N = (inner_N == 0) | tokens.spread(outer_B == 0)
    return Weighing(
        outer_B=outer_B,
        inner_N=inner_N,
        log_ratios_B=log_ratios_B,
        penalty_N=penalty_N,
        weights_B=outer_B * sum_by_trajectory(inner_N, tokens.lengths_B) / tokens.lengths_B,
        reduced_B=reduced_B,
        dropped_B=sum_by_trajectory(is_dropped_N.double(), tokens.lengths_B),
    )


def _ratios(spec: MethodSpec, tokens: TokenRatios) -> Tensor:
    """Log-ratios at the method's level: (N,) for tokens, else (B,)."""
    log_ratios_N = tokens.log_ratios_N if spec.mask is None else spec.mask.clamped(tokens)
    if spec.ratio_level == "token":
        return log_ratios_N
    sums_B = sum_by_trajectory(log_ratios_N, tokens.lengths_B)
    return trajectory_log_ratios(spec.ratio_level, sums_B, tokens.lengths_B)


def _is_reduced(weights: Tensor, log_ratios: Tensor) -> Tensor:
    # a weight that is its ratio may differ from it by a rounding
    return (weights.log() < log_ratios - 1e-9).double()
