"""Opacus' ghost norms: per-sample norms from a first backward pass, the weighted gradient from a second one.

Opacus refuses tied parameters under ghost norms and knows neither transformers' RMSNorm classes nor Conv1D, so that
it is measured on a GPT-NeoX model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from alternatives.objective import Objective, padded, padded_logprobs
from vcpo.records import Trajectory


class OpacusGhost:
    """A padded batch and two backward passes, as Opacus' own loss wrapper makes them, with our coefficients instead of
    clipping factors. The model must use ``sdpa`` attention."""

    name = "opacus"
    baseline = "opob"

    def __init__(self, model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        # Opacus follows training layers only; there is no dropout in them
        self._module = GradSampleModuleFastGradientClipping(model.train(), loss_reduction="sum")
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._objective = Objective(trajectories)
        self._batch = padded(trajectories, model.device)

    def gradient(self) -> Tensor:
        """See ``Alternative``."""
        objective = self._objective
        self._module.enable_hooks()
        logprobs_B = padded_logprobs(self._module, self._batch)
        logprobs_B.sum().backward(retain_graph=True)
        squared_norms_B: Tensor = self._module.get_norm_sample().double().square().cpu()
        for parameter in self._parameters:
            parameter.grad = None
        log_ratios_B = objective.log_ratios(logprobs_B)
        baseline = objective.optimal_baseline(log_ratios_B, squared_norms_B)
        coefficients_B = objective.units(log_ratios_B) * (objective.rewards_B - baseline)
        self._module.disable_hooks()
        logprobs_B.backward(-coefficients_B.to(logprobs_B))
        return squared_norms_B
