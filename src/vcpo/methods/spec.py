"""A method as a choice of parts, and the named methods. Imports without torch: a configuration is checked fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RatioLevel = Literal["none", "token", "sequence", "geometric"]
Baseline = Literal["none", "group_mean", "leave_one_out", "opob"]
OpobWeighting = Literal["paper", "applied", "reference"]
Scope = Literal["group", "minibatch"]
Scale = Literal["group", "none"]
Aggregation = Literal["trajectory_mean", "token_mean", "trajectory_sum"]
StepSize = Literal["constant", "sqrt_ess", "linear_ess"]


@dataclass(frozen=True)
class MethodSpec:
    """One update rule.

    ratio_level: the importance ratio pi/mu that weights the gradient: ``none`` (as if on-policy), one per ``token``,
        one per ``sequence`` (the product), or the ``geometric`` mean over a sequence's tokens.
    ratio_cap: truncation c of the weight, min(w, c); ``None`` leaves it unbounded.
    baseline: what is subtracted from the reward. ``opob`` is the minimum-variance off-policy baseline.
    opob_weighting: which squared quantity weights the rewards in ``opob`` (docs/methods.md).
    opob_scope: whether ``opob`` is computed per prompt group or once for the minibatch.
    scale_rewards: divide by the population standard deviation of the group's rewards, or not.
    loss_aggregation: ``trajectory_mean`` averages tokens within a trajectory, then trajectories; ``token_mean``
        averages over all tokens of the minibatch; ``trajectory_sum`` sums tokens, then averages trajectories.
    step_size: how this step's learning rate follows the effective sample size rho: lr * sqrt(rho / rho_on),
        lr * rho / rho_on (never above lr), or constant.
    ess_on_policy: rho_on, the effective sample size of an on-policy batch on this setup, in (0, 1].
    """

    ratio_level: RatioLevel = "sequence"
    ratio_cap: float | None = 8.0
    baseline: Baseline = "group_mean"
    opob_weighting: OpobWeighting = "paper"
    opob_scope: Scope = "group"
    scale_rewards: Scale = "group"
    loss_aggregation: Aggregation = "trajectory_mean"
    step_size: StepSize = "constant"
    ess_on_policy: float = 1.0

    @property
    def needs_norms(self) -> bool:
        """Whether the update needs per-trajectory gradient norms."""
        return self.baseline == "opob"


METHODS: dict[str, MethodSpec] = {
    "vcpo": MethodSpec(baseline="opob", step_size="sqrt_ess"),
    "tis": MethodSpec(),
    "tis_token": MethodSpec(ratio_level="token"),
    "grpo": MethodSpec(ratio_level="none", ratio_cap=None),
    "rloo": MethodSpec(ratio_level="none", ratio_cap=None, baseline="leave_one_out", scale_rewards="none"),
    "reinforce": MethodSpec(ratio_level="none", ratio_cap=None, baseline="none", scale_rewards="none"),
}
