"""How one step's learning rate follows the effective sample size."""

from __future__ import annotations

import math

from vcpo.methods.spec import StepSize


def step_scale(rule: StepSize, ess: float, ess_on_policy: float) -> float:
    """The factor in [0, 1] on this step's learning rate (arXiv 2602.17616, eq. 5).

    ess: rho of the whole minibatch, in [1/B, 1]; ess_on_policy: rho_on, the same of an on-policy batch.
    ``sqrt_ess``: sqrt(min(1, rho / rho_on)); ``linear_ess``: min(1, rho / rho_on); ``constant``: 1.
    NaN gives NaN, under every rule: an unknown ESS must never become a full step.
    """
    if math.isnan(ess):
        return math.nan
    share = min(1.0, ess / ess_on_policy)
    if rule == "sqrt_ess":
        return math.sqrt(share)
    if rule == "linear_ess":
        return share
    return 1.0
