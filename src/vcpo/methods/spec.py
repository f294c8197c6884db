"""A method as a choice of parts, and the named methods. Imports without torch: a configuration is checked fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from vcpo.methods.gradient_control import GradientControl, LimitAlignment
from vcpo.methods.masks import (
    DivergentNegatives,
    GeometricBand,
    LogClip,
    Mask,
    SecondMoment,
    TokenBand,
    TotalVariation,
)
from vcpo.methods.penalties import KlByEss, Penalty, SquaredLogRatio, SquaredRegret
from vcpo.methods.weights import (
    Band,
    CapByEss,
    Clamp,
    FlipPositives,
    GammaKernel,
    PpoClip,
    SelfNormalized,
    SoftGate,
    TaperNegatives,
    Truncate,
    Weight,
)

RatioLevel = Literal["none", "token", "sequence", "geometric"]
Baseline = Literal["none", "group_mean", "leave_one_out", "soft_value", "token_optimal", "opob"]
OpobWeighting = Literal["paper", "applied", "reference"]
Scope = Literal["group", "minibatch"]
Scale = Literal["group", "none"]
Aggregation = Literal["trajectory_mean", "token_mean", "trajectory_sum", "constant_length"]
StepSize = Literal["constant", "sqrt_ess", "linear_ess"]


_TRUNCATE = Truncate()


@dataclass(frozen=True)
class MethodSpec:
    """One update rule: G = sum_i factor_i sum_t (phi_t A_t + penalty_t) grad log pi(a_t), then a step.

    ratio_level: which importance ratio pi/mu the weight phi is made of: ``none`` (phi = 1, as if on-policy), one per
        ``token``, one per ``sequence`` (the product), or the ``geometric`` mean over a sequence's tokens.
    weight: the rule that makes phi of a ratio (``vcpo.methods.weights``).
    mask: which tokens get no gradient (``vcpo.methods.masks``), or ``None``.
    penalty: a pull towards the sampler (``vcpo.methods.penalties``), or ``None``.
    residual_band: clip range (low, high) of the geometric-mean ratio that weights the advantage beside phi (CoPC), or
        ``None``.
    baseline: what is subtracted from the reward. ``opob`` is the minimum-variance off-policy baseline,
        ``token_optimal`` the one of arXiv 2602.07078 per token position, ``soft_value`` log mean exp of OAPL.
    opob_weighting: which squared quantity weights the rewards in ``opob`` (docs/methods.md).
    opob_scope: whether ``opob`` is computed per prompt group or once for the minibatch.
    opob_leave_one_out: leave each trajectory's own reward out of its ``opob``.
    value_temperature: of ``soft_value``.
    reward_kl: beta of R - beta L, which takes the place of the reward before baselines and scales.
    scale_rewards: divide by the population standard deviation of the group's rewards, or not.
    loss_aggregation: ``trajectory_mean`` averages tokens within a trajectory, then trajectories; ``token_mean``
        averages over all tokens of the minibatch; ``trajectory_sum`` sums tokens, then averages trajectories;
        ``constant_length`` divides that by ``constant_length``.
    constant_length: tokens; a run takes ``None`` as its ``sampling.max_completion_length``, a lone learner as 1.
    step_size: how this step's learning rate follows the effective sample size rho: lr * sqrt(rho / rho_on),
        lr * rho / rho_on (never above lr), or constant.
    ess_on_policy: rho_on, the effective sample size of an on-policy batch on this setup, in (0, 1].
    learning_rate_factor: on every step's learning rate.
    gradient_control: a rule on the whole gradient (``vcpo.methods.gradient_control``), or ``None``.
    """

    ratio_level: RatioLevel = "sequence"
    weight: Weight = _TRUNCATE
    mask: Mask | None = None
    penalty: Penalty | None = None
    residual_band: tuple[float, float] | None = None
    baseline: Baseline = "group_mean"
    opob_weighting: OpobWeighting = "paper"
    opob_scope: Scope = "group"
    opob_leave_one_out: bool = False
    value_temperature: float = 1.0
    reward_kl: float = 0.0
    scale_rewards: Scale = "group"
    loss_aggregation: Aggregation = "trajectory_mean"
    constant_length: int | None = None
    step_size: StepSize = "constant"
    ess_on_policy: float = 1.0
    learning_rate_factor: float = 1.0
    gradient_control: GradientControl | None = None

    def __post_init__(self) -> None:
        uses_sign = (self.ratio_level != "none" and self.weight.uses_sign) or (self.mask and self.mask.uses_sign)
        if self.baseline == "opob" and uses_sign:
            raise ValueError("baseline opob needs a weight and a mask that do not look at the sign of the advantage")
        if self.baseline == "opob" and self.penalty is not None:
            raise ValueError("baseline opob cannot be combined with a penalty: it is optimal for the rewards alone")
        if self.baseline == "token_optimal" and self.ratio_level in ("sequence", "geometric") and self.weight.uses_sign:
            raise ValueError(
                "baseline token_optimal has an advantage per token, so a weight by its sign needs token level"
            )
        if not 0 < self.ess_on_policy <= 1:
            raise ValueError("ess_on_policy must be in (0, 1]")
        numbers = (self.value_temperature, self.learning_rate_factor, self.reward_kl)
        if not all(map(math.isfinite, numbers)) or min(numbers[:2]) <= 0 or self.reward_kl < 0:
            raise ValueError(
                "value_temperature and learning_rate_factor must be positive and reward_kl not negative, all finite"
            )
        if self.residual_band is not None and not 0 < self.residual_band[0] <= self.residual_band[1]:
            raise ValueError("residual_band must be (low, high) with 0 < low <= high")
        if self.constant_length is not None and self.constant_length < 1:
            raise ValueError("constant_length must be at least 1")

    @property
    def needs_norms(self) -> bool:
        """Whether the update needs per-trajectory gradient norms."""
        return self.baseline == "opob"

    @property
    def needs_preview(self) -> bool:
        """Whether something of all trajectories must be known before any gradient is: one more forward pass."""
        parts = [self.mask, self.penalty, self.weight if self.ratio_level != "none" else None]
        return (
            self.baseline == "token_optimal"
            or self.reward_kl > 0
            or any(part is not None and part.uses_batch for part in parts)
        )


_TIS = MethodSpec()
_TOKEN = MethodSpec(ratio_level="token", weight=Truncate(2.0))
_CLIP = MethodSpec(ratio_level="token", weight=PpoClip(), loss_aggregation="token_mean")
_RAW = Truncate(None)

METHODS: dict[str, MethodSpec] = {
    "vcpo": MethodSpec(baseline="opob", step_size="sqrt_ess"),
    "reinforce": MethodSpec(ratio_level="none", baseline="none", scale_rewards="none"),
    "rloo": MethodSpec(ratio_level="none", baseline="leave_one_out", scale_rewards="none"),
    "grpo": MethodSpec(ratio_level="none"),
    "dr_grpo": MethodSpec(ratio_level="none", scale_rewards="none", loss_aggregation="constant_length"),
    "ppo": _CLIP,
    "grpo_clip": replace(_CLIP, loss_aggregation="trajectory_mean"),
    "tis": _TIS,
    "tis_token": _TOKEN,
    "tis_geometric": replace(_TIS, ratio_level="geometric", weight=Truncate(2.0)),
    "mis": replace(_TIS, weight=Band(0.0, 8.0)),
    "mis_token": replace(_TOKEN, weight=Band(0.0, 2.0)),
    "mis_geometric": replace(_TIS, ratio_level="geometric", weight=Band(0.0, 2.0)),
    "icepop": replace(_TOKEN, weight=Band(0.5, 5.0), loss_aggregation="token_mean"),
    "seq_mask_tis": replace(_TOKEN, weight=_RAW, mask=GeometricBand(), loss_aggregation="token_mean"),
    "snis": replace(_TIS, weight=SelfNormalized()),
    "gspo": replace(_TIS, ratio_level="geometric", weight=PpoClip(3e-4, 4e-4, None)),
    "gmpo": replace(_TIS, ratio_level="geometric", weight=_RAW, mask=LogClip()),
    "cispo": replace(_TOKEN, weight=Clamp(), loss_aggregation="token_mean"),
    "decoupled_ppo": replace(_TOKEN, weight=Band(0.0, 5.0), loss_aggregation="token_mean"),
    "topr": replace(_TIS, weight=TaperNegatives(), loss_aggregation="trajectory_sum"),
    "aspo": replace(_TOKEN, weight=FlipPositives(), loss_aggregation="token_mean"),
    "m2po": replace(_TOKEN, weight=_RAW, mask=SecondMoment(), loss_aggregation="token_mean"),
    "opsm": replace(_CLIP, mask=DivergentNegatives(), loss_aggregation="trajectory_mean"),
    "dppo_tv": replace(
        _TOKEN, weight=_RAW, mask=TotalVariation(), penalty=SquaredLogRatio(), loss_aggregation="token_mean"
    ),
    "sapo": replace(_TOKEN, weight=SoftGate()),
    "vespo": replace(_TIS, weight=GammaKernel(), loss_aggregation="token_mean"),
    "oapl": MethodSpec(
        ratio_level="none",
        penalty=SquaredRegret(),
        baseline="soft_value",
        scale_rewards="none",
        loss_aggregation="trajectory_sum",
    ),
    "kl_in_reward": replace(_TIS, reward_kl=1e-3),
    "low_lr_tis": replace(_TIS, learning_rate_factor=0.1),
    "otb": replace(_TOKEN, baseline="token_optimal", scale_rewards="none"),
    "trust_the_batch": replace(_TOKEN, weight=CapByEss(), penalty=KlByEss(), loss_aggregation="token_mean"),
    "gac": MethodSpec(ratio_level="none", gradient_control=LimitAlignment()),
    "copc": replace(_TOKEN, weight=_RAW, mask=TokenBand(), residual_band=(0.8, 1.2)),
}
