"""Whether a variant computes what one trajectory at a time computes."""

from __future__ import annotations

import torch
from alternatives.one_at_a_time import OneAtATime
from torch import Tensor
from transformers import PreTrainedModel

GRADIENT_TOLERANCE = 1e-3
NORM_TOLERANCE = 1e-3

# deviations of a parameter count relative to its own gradient, but not to less than this part of the whole one's:
# some gradients are 0 but for rounding (the bias of keys that are not rotated)
_FLOOR = 1e-2


class Reference:
    """The gradients of both baselines, and the norms, from one pass over the trajectories one at a time."""

    def __init__(self, model: PreTrainedModel, alternative: OneAtATime) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        sums = alternative.accumulate()
        objective = alternative.objective
        self.squared_norms_B = sums.squared_norms_B
        baselines = {
            "opob": objective.optimal_baseline(sums.log_ratios_B, sums.squared_norms_B),
            "group_mean": objective.mean_baseline(),
        }
        # of minus the objective
        self._gradients: dict[str, tuple[Tensor, ...]] = {
            name: torch._foreach_sub(torch._foreach_mul(sums.unit, baseline), sums.rewarded)
            for name, baseline in baselines.items()
        }

    def gradient_deviation(self, baseline: str) -> float:
        """The largest relative deviation of a parameter's ``grad`` from the reference."""
        expected = self._gradients[baseline]
        norms = torch.stack(torch._foreach_norm(expected)).double()
        floor = _FLOOR * float(torch.linalg.vector_norm(norms))
        worst = 0.0
        for parameter, gradient, norm in zip(self._parameters, expected, norms.tolist(), strict=True):
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            difference = float(torch.linalg.vector_norm(found - gradient))
            worst = max(worst, difference / max(norm, floor))
        return worst

    def norm_deviation(self, squared_norms_B: Tensor) -> float:
        """The largest relative deviation of a trajectory's gradient norm."""
        expected, found = self.squared_norms_B.sqrt(), squared_norms_B.double().cpu().sqrt()
        return float(((found - expected).abs() / expected).max())
