"""Pulls of the learner towards the sampler, whatever the reward says: one class per rule. Imports without torch.

A rule gives, per token, what is added to the coefficient of grad log pi: minus the derivative of its penalty. It is
averaged as the policy gradient is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from vcpo.methods.ratios import TokenRatios


class Penalty:
    """Base of the rules; ``uses_batch`` and ``statistic`` as in ``vcpo.methods.weights``."""

    uses_batch: ClassVar[bool] = False

    def statistic(self, tokens: TokenRatios) -> float:
        """The number that the rule needs of all tokens of the minibatch."""
        return math.nan

    def __call__(self, tokens: TokenRatios, statistic: float) -> Tensor:
        """(N,) added coefficients."""
        raise NotImplementedError


@dataclass(frozen=True)
class SquaredLogRatio(Penalty):
    """scale * l^2 per token, as in prime-rl's default loss: adds -2 scale l."""

    scale: float = 1e-3

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def __call__(self, tokens: TokenRatios, statistic: float) -> Tensor:
        return -2 * self.scale * tokens.log_ratios_N


@dataclass(frozen=True)
class SquaredRegret(Penalty):
    """OAPL (arXiv 2602.19362): the square (scale L - A)^2 pulls the sequence log-ratio L towards A / scale.

    Its gradient is that of A minus scale L, up to a factor of 2 scale, which is left out: AdamW is invariant to it, and
    clipping by norm then means the same as for other methods.
    """

    scale: float = 1e-3

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def __call__(self, tokens: TokenRatios, statistic: float) -> Tensor:
        return tokens.spread(-self.scale * tokens.sum_log_ratios_B)


@dataclass(frozen=True)
class KlByEss(Penalty):
    """(1 - e) KL(pi, mu) by the estimator l + 1/r - 1, with the ESS e of all token ratios (P3O, arXiv 2605.12380).

    Adds -(1 - e)(1 - 1/r). 1/r is bounded by e^20, which the source leaves unbounded.
    """

    uses_batch: ClassVar[bool] = True

    def statistic(self, tokens: TokenRatios) -> float:
        from vcpo.methods.ess import effective_sample_size

        return float(effective_sample_size(tokens.log_ratios_N))

    def __call__(self, tokens: TokenRatios, statistic: float) -> Tensor:
        return (1 - statistic) * (-tokens.log_ratios_N).clamp(max=20).expm1()


PENALTIES: dict[str, type[Penalty]] = {
    "squared_log_ratio": SquaredLogRatio,
    "squared_regret": SquaredRegret,
    "kl_by_ess": KlByEss,
}


def _check_scale(scale: float) -> None:
    if not scale >= 0:
        raise ValueError("scale must not be negative")
