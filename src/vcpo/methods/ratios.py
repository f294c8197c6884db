"""Importance ratios between the learner's policy pi and the sampler's policy mu, kept as logarithms.

Sums over the tokens of a trajectory are float64: a sequence log-ratio adds thousands of small float32 numbers of both
signs. Packed token vectors (``_N``) hold the trained tokens of trajectory 0, then those of trajectory 1, and so on.
Other tokens are left out before anything is exponentiated: a mask that multiplies a ratio afterwards turns an overflow
into 0 * inf = NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.methods.spec import RatioLevel


@dataclass(frozen=True)
class TokenRatios:
    """What the rules of a method may look at, for the trained tokens of some trajectories; float64.

    log_ratios_N: l = log pi - log mu. logprobs_N: log pi. lengths_B: trained tokens of each trajectory, at least 1.
    sign_N: of each token's advantage (-1, 0, 1); 0 everywhere where it is not known yet.
    """

    log_ratios_N: Tensor
    logprobs_N: Tensor
    lengths_B: Tensor
    sign_N: Tensor

    @property
    def sum_log_ratios_B(self) -> Tensor:
        """(B,) sequence log-ratios."""
        return sum_by_trajectory(self.log_ratios_N, self.lengths_B)

    @property
    def mean_log_ratios_B(self) -> Tensor:
        """(B,) logarithms of the geometric-mean ratios."""
        return self.sum_log_ratios_B / self.lengths_B

    @property
    def sign_B(self) -> Tensor:
        """(B,) the sign of each trajectory's advantage, which all of its tokens share."""
        return self.sign_N[self.lengths_B.cumsum(0) - 1]

    def spread(self, values_B: Tensor) -> Tensor:
        """(N,) one value per trajectory, repeated for each of its tokens."""
        return values_B.repeat_interleave(self.lengths_B)


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
