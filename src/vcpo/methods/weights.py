"""From importance ratios to the weights of the gradient: one class per rule. Imports without torch.

A rule gets the logarithms of ratios r = pi/mu (one per token or one per trajectory, as the method's ``ratio_level``
says) and gives what multiplies the advantage and the score: u in ``u A grad log pi``. No gradient flows through a
weight. Everything stays in log space until the end, so that an infinite ratio that a rule drops is not 0 * inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class Weight:
    """Base of the rules.

    uses_sign: whether the rule looks at the sign of the advantage, which must then be known before the weight is: not
        with an optimal baseline. uses_batch: whether it needs a number of all ratios of the minibatch (``statistic``),
        which costs one more forward pass.
    """

    uses_sign: ClassVar[bool] = False
    uses_batch: ClassVar[bool] = False

    def statistic(self, log_ratios: Tensor) -> float:
        """The number that the rule needs of all ratios of the minibatch."""
        return math.nan

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        """Weights of the ratios. sign: of each ratio's advantage; statistic: see there. Both may be unused."""
        raise NotImplementedError


@dataclass(frozen=True)
class Truncate(Weight):
    """min(r, cap); ``cap: null`` leaves the ratio as it is. Truncated importance sampling."""

    cap: float | None = 8.0

    def __post_init__(self) -> None:
        if self.cap is not None and not self.cap > 0:
            raise ValueError("cap must be positive, or null for no truncation")

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        weights = log_ratios.exp()
        return weights if self.cap is None else weights.clamp(max=self.cap)


@dataclass(frozen=True)
class Band(Weight):
    """r where low <= r <= high, else 0. Masked importance sampling; IcePop with 0.5 to 5."""

    low: float = 0.0
    high: float = 8.0

    def __post_init__(self) -> None:
        check_band(self.low, self.high)

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        return _dropped(log_ratios, outside(log_ratios, self.low, self.high)).exp()


@dataclass(frozen=True)
class Clamp(Weight):
    """r clamped to low..high: no ratio is dropped (CISPO, arXiv 2506.13585)."""

    low: float = 0.0
    high: float = 5.0

    def __post_init__(self) -> None:
        check_band(self.low, self.high)

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        return log_ratios.clamp(_log(self.low), _log(self.high)).exp()


@dataclass(frozen=True)
class PpoClip(Weight):
    """The gradient of PPO's clipped surrogate: r, but 0 where a step would move r further out of 1-low..1+high.

    dual: for a negative advantage also 0 where r is above it (dual clip, arXiv 1912.09729); ``null`` for none.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = 3.0
    uses_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_clip(self.low, self.high)
        if self.dual is not None and not self.dual > 1:
            raise ValueError("dual must be above 1, or null for no dual clip")

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        drop = _clipped(log_ratios, sign, self.low, self.high)
        if self.dual is not None:
            drop = drop | ((sign < 0) & (log_ratios > math.log(self.dual)))
        return _dropped(log_ratios, drop).exp()


@dataclass(frozen=True)
class SelfNormalized(Weight):
    """r over the mean r of the minibatch: self-normalised importance sampling, sum_i w_i g_i / sum_i w_i.

    Infinite ratios count as equal among themselves and outweigh every finite one, as in the ESS.
    """

    uses_batch: ClassVar[bool] = True

    def statistic(self, log_ratios: Tensor) -> float:
        return float(_bounded(log_ratios).logsumexp(0)) - math.log(max(len(log_ratios), 1))

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        return (_bounded(log_ratios) - statistic).exp()


@dataclass(frozen=True)
class TaperNegatives(Weight):
    """1 for an advantage that is not negative, else min(r, 1): TOPR, arXiv 2503.14286."""

    uses_sign: ClassVar[bool] = True

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        return log_ratios.clamp(max=0).masked_fill(sign >= 0, 0.0).exp()


@dataclass(frozen=True)
class FlipPositives(Weight):
    """ASPO (arXiv 2510.06062): 1/r instead of r for a positive advantage, both at most ``cap``, clipped as in PPO.

    Positive: min(1/r, cap) where r <= 1 + high, else 0. Negative: min(r, cap) where r >= 1 - low, else 0.
    """

    low: float = 0.2
    high: float = 0.2
    cap: float = 3.0
    uses_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_clip(self.low, self.high)
        if not self.cap > 0:
            raise ValueError("cap must be positive")

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        flipped = log_ratios.where(sign <= 0, -log_ratios).clamp(max=math.log(self.cap))
        return _dropped(flipped, _clipped(log_ratios, sign, self.low, self.high)).exp()


@dataclass(frozen=True)
class SoftGate(Weight):
    """SAPO (arXiv 2511.20347): the gradient 4 p (1 - p) r of the gate 4 p / tau with p = sigmoid(tau (r - 1))."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    uses_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            raise ValueError("tau_positive and tau_negative must be positive")

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        # beyond e^30 the weight is 0, and an infinite ratio would make inf - inf
        log_ratios = log_ratios.clamp(max=30)
        tau = log_ratios.new_full(log_ratios.shape, self.tau_negative).masked_fill(sign > 0, self.tau_positive)
        x = tau * log_ratios.expm1()
        return (math.log(4) + x.sigmoid().log() + (-x).sigmoid().log() + log_ratios).exp()


@dataclass(frozen=True)
class GammaKernel(Weight):
    """VESPO (arXiv 2602.10693): r^k exp(lambda (1 - r)), 1 at r = 1; k and lambda by the sign of the advantage."""

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    uses_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        options = (self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative)
        if not all(option > 0 for option in options):
            raise ValueError("k_positive, lambda_positive, k_negative and lambda_negative must be positive")

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        # beyond e^20 the weight is 0, and an infinite ratio would make inf - inf
        log_ratios = log_ratios.clamp(max=20)
        k = log_ratios.new_full(log_ratios.shape, self.k_positive).masked_fill(sign < 0, self.k_negative)
        rate = log_ratios.new_full(log_ratios.shape, self.lambda_positive).masked_fill(sign < 0, self.lambda_negative)
        return (k * log_ratios - rate * log_ratios.expm1()).exp()


@dataclass(frozen=True)
class CapByEss(Weight):
    """min(r, e) with the effective sample size e in (0, 1] of all ratios of the minibatch (P3O, arXiv 2605.12380)."""

    uses_batch: ClassVar[bool] = True

    def statistic(self, log_ratios: Tensor) -> float:
        from vcpo.methods.ess import effective_sample_size

        return float(effective_sample_size(log_ratios))

    def __call__(self, log_ratios: Tensor, sign: Tensor, statistic: float) -> Tensor:
        return log_ratios.clamp(max=_log(statistic)).exp()


WEIGHTS: dict[str, type[Weight]] = {
    "truncate": Truncate,
    "band": Band,
    "clamp": Clamp,
    "ppo_clip": PpoClip,
    "self_normalized": SelfNormalized,
    "taper_negatives": TaperNegatives,
    "flip_positives": FlipPositives,
    "soft_gate": SoftGate,
    "gamma_kernel": GammaKernel,
    "cap_by_ess": CapByEss,
}


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _bounded(log_ratios: Tensor) -> Tensor:
    # far beyond what any float can hold, and finite: inf - inf is NaN
    return log_ratios.clamp(-1e4, 1e4)


def outside(log_ratios: Tensor, low: float, high: float) -> Tensor:
    """Whether ratios are outside low..high."""
    return (log_ratios < _log(low)) | (log_ratios > _log(high))


def beyond(values: Tensor, sign: Tensor, low: float, high: float) -> Tensor:
    """Whether a value is out on the side to which a step by its advantage moves it: above high, or below low."""
    return ((sign > 0) & (values > high)) | ((sign < 0) & (values < low))


def _clipped(log_ratios: Tensor, sign: Tensor, low: float, high: float) -> Tensor:
    return beyond(log_ratios, sign, _log(1 - low), math.log1p(high))


def _dropped(log_weights: Tensor, drop: Tensor) -> Tensor:
    return log_weights.masked_fill(drop, -math.inf)


def check_band(low: float, high: float) -> None:
    """Raises ValueError if low..high is no range of ratios."""
    if not 0 <= low <= high:
        raise ValueError(f"low and high must satisfy 0 <= low <= high, not {low} and {high}")


def _check_clip(low: float, high: float) -> None:
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"low must be in 0..1 and high not negative, not {low} and {high}")
