"""Which tokens a method leaves out of the gradient: one class per rule. Imports without torch.

A dropped token still counts in every average: the sources divide by all trained tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vcpo.methods.weights import beyond, check_band, outside

if TYPE_CHECKING:
    from torch import Tensor

    from vcpo.methods.ratios import TokenRatios


class Mask:
    """Base of the rules; ``uses_sign``, ``uses_batch`` and ``statistic`` as in ``vcpo.methods.weights``."""

    uses_sign: ClassVar[bool] = False
    uses_batch: ClassVar[bool] = False

    def statistic(self, tokens: TokenRatios) -> float:
        """The number that the rule needs of all tokens of the minibatch."""
        return math.nan

    def drops(self, tokens: TokenRatios, statistic: float) -> Tensor:
        """(N,) True for tokens that get no gradient."""
        raise NotImplementedError

    def clamped(self, tokens: TokenRatios) -> Tensor:
        """(N,) token log-ratios as they enter the ratio of their trajectory."""
        return tokens.log_ratios_N


@dataclass(frozen=True)
class TokenBand(Mask):
    """Drops tokens whose ratio is outside low..high."""

    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        check_band(self.low, self.high)

    def drops(self, tokens: TokenRatios, statistic: float) -> Tensor:
        return outside(tokens.log_ratios_N, self.low, self.high)


@dataclass(frozen=True)
class GeometricBand(Mask):
    """Drops trajectories whose geometric-mean ratio is outside low..high; the token ratios of others stay raw."""

    low: float = 0.999
    high: float = 1.002

    def __post_init__(self) -> None:
        check_band(self.low, self.high)

    def drops(self, tokens: TokenRatios, statistic: float) -> Tensor:
        return tokens.spread(outside(tokens.mean_log_ratios_B, self.low, self.high))


@dataclass(frozen=True)
class SecondMoment(Mask):
    """M2PO (arXiv 2510.01161): drops the largest l^2 until the mean of those that remain is at most ``budget``.

    Only tokens that a step would move further away count and can be dropped: A > 0 with r > 1, and A < 0 with r < 1.
    """

    budget: float = 0.04
    uses_sign: ClassVar[bool] = True
    uses_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.budget >= 0:
            raise ValueError("budget must not be negative")

    def statistic(self, tokens: TokenRatios) -> float:
        """A bound between the largest l^2 that is kept and the smallest that is dropped.

        Not the largest itself, because the pass in which tokens are dropped may round it differently.
        """
        squares_N = tokens.log_ratios_N[_moves_away(tokens)].square().sort().values
        if not len(squares_N):
            return math.inf
        counts_N = squares_N.new_ones(len(squares_N)).cumsum(0)
        kept = int((squares_N.cumsum(0) / counts_N <= self.budget).sum())
        if 0 < kept < len(squares_N) and squares_N[kept] == squares_N[kept - 1]:
            kept = int((squares_N < squares_N[kept]).sum())  # equal ones are all kept or all dropped
        if kept == len(squares_N):
            return math.inf
        largest_kept, smallest_dropped = float(squares_N[kept - 1]) if kept else 0.0, float(squares_N[kept])
        return (largest_kept + min(smallest_dropped, 2 * largest_kept + 1)) / 2

    def drops(self, tokens: TokenRatios, statistic: float) -> Tensor:
        return _moves_away(tokens) & (tokens.log_ratios_N.square() > statistic)


@dataclass(frozen=True)
class DivergentNegatives(Mask):
    """Off-policy sequence masking (DeepSeek-V3.2): drops trajectories with A < 0 and mean(log mu - log pi) > delta.

    The source publishes no delta; 0.5 nats per token is what TRL suggests.
    """

    delta: float = 0.5
    uses_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if math.isnan(self.delta):
            raise ValueError("delta must be a number")

    def drops(self, tokens: TokenRatios, statistic: float) -> Tensor:
        return (tokens.sign_N < 0) & tokens.spread(-tokens.mean_log_ratios_B > self.delta)


@dataclass(frozen=True)
class TotalVariation(Mask):
    """DPPO (arXiv 2602.04879), as in prime-rl: drops A > 0 with pi - mu > high, and A < 0 with pi - mu < -low."""

    low: float = 0.2
    high: float = 0.2
    uses_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_distances(self.low, self.high)

    def drops(self, tokens: TokenRatios, statistic: float) -> Tensor:
        moved_N = tokens.logprobs_N.exp() - (tokens.logprobs_N - tokens.log_ratios_N).exp()
        return beyond(moved_N, tokens.sign_N, -self.low, self.high)


@dataclass(frozen=True)
class LogClip(Mask):
    """GMPO (arXiv 2507.20673): token log-ratios are clipped before their geometric mean is taken.

    Clipped are l > high where A > 0, and l < -low where A < 0; clipped tokens get no gradient.
    """

    low: float = 0.4
    high: float = 0.4
    uses_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_distances(self.low, self.high)

    def drops(self, tokens: TokenRatios, statistic: float) -> Tensor:
        return beyond(tokens.log_ratios_N, tokens.sign_N, -self.low, self.high)

    def clamped(self, tokens: TokenRatios) -> Tensor:
        upper_N = tokens.log_ratios_N.clamp(max=self.high).where(tokens.sign_N > 0, tokens.log_ratios_N)
        return upper_N.clamp(min=-self.low).where(tokens.sign_N < 0, upper_N)


MASKS: dict[str, type[Mask]] = {
    "token_band": TokenBand,
    "geometric_band": GeometricBand,
    "second_moment": SecondMoment,
    "divergent_negatives": DivergentNegatives,
    "total_variation": TotalVariation,
    "log_clip": LogClip,
}


def _check_distances(low: float, high: float) -> None:
    if not (low >= 0 and high >= 0):
        raise ValueError(f"low and high must not be negative: they are {low} and {high}")


def _moves_away(tokens: TokenRatios) -> Tensor:
    return tokens.sign_N * tokens.log_ratios_N > 0
