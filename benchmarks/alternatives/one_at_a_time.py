"""The reference code's way: one trajectory at a time, and two more gradient buffers until the baseline is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from alternatives.objective import Objective, logprobs_and_entropies
from vcpo.records import Trajectory


@dataclass(frozen=True)
class Sums:
    """What is left after the last trajectory.

    rewarded, unit: one tensor per parameter: G_R = sum_i u_i R_i s_i and G_1 = sum_i u_i s_i, s_i being the gradient of
        trajectory i; the gradient is G_R - b G_1 for any baseline b.
    """

    rewarded: list[Tensor]
    unit: list[Tensor]
    log_ratios_B: Tensor
    squared_norms_B: Tensor


class OneAtATime:
    """No padding, and no more than one trajectory's activations. The model must use ``sdpa`` attention."""

    name = "one_at_a_time"
    baseline = "opob"

    def __init__(self, model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> None:
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.objective = Objective(trajectories)
        self._ids = [torch.tensor([[*t.prompt_ids, *t.response_ids_T]], device=model.device) for t in trajectories]
        self._prompts = [len(t.prompt_ids) for t in trajectories]

    def gradient(self) -> Tensor:
        """See ``Alternative``."""
        sums = self.accumulate()
        baseline = self.objective.optimal_baseline(sums.log_ratios_B, sums.squared_norms_B)
        torch._foreach_add_(sums.rewarded, sums.unit, alpha=-baseline)
        torch._foreach_neg_(sums.rewarded)
        for parameter, gradient in zip(self._parameters, sums.rewarded, strict=True):
            parameter.grad = gradient
        return sums.squared_norms_B

    def accumulate(self) -> Sums:
        """Run every trajectory and add its gradient to both buffers."""
        rewarded, unit = ([torch.zeros_like(p) for p in self._parameters] for _ in range(2))
        log_ratios_B, squared_norms_B = (torch.zeros(len(self._ids), dtype=torch.float64) for _ in range(2))
        for index in range(len(self._ids)):
            logprob = self._logprob(index)
            logprobs_B = torch.zeros_like(log_ratios_B)
            logprobs_B[index] = logprob.detach().double()
            log_ratios_B[index] = self.objective.log_ratios(logprobs_B)[index]
            logprob.backward()
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            norms = torch.stack(torch._foreach_norm(gradients))
            squared_norms_B[index] = norms.double().square().sum().cpu()
            factor = float(self.objective.units(log_ratios_B)[index])
            if self.objective.rewards_B[index] != 0:
                torch._foreach_add_(rewarded, gradients, alpha=factor * float(self.objective.rewards_B[index]))
            torch._foreach_add_(unit, gradients, alpha=factor)
            # otherwise the next backward pass would need a fourth buffer
            del gradients
            for parameter in self._parameters:
                parameter.grad = None
        return Sums(rewarded, unit, log_ratios_B, squared_norms_B)

    def _logprob(self, index: int) -> Tensor:
        ids, prompt = self._ids[index], self._prompts[index]
        kept = ids.shape[1] - prompt + 1
        logits_RV = self._model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0, :-1]
        logprobs_R, _ = logprobs_and_entropies(logits_RV, ids[0, prompt:])
        return logprobs_R.sum()
