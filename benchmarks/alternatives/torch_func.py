"""Per-sample gradients by function transforms: vmap over grad, in chunks where they would not fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from transformers import PreTrainedModel

from alternatives.objective import Objective, logprobs_and_entropies, padded
from vcpo.records import Trajectory

_GRADIENT_BYTES = 2 * 2**30  # per-sample gradients that exist at one time, unless one alone is larger


class CausalPlan:
    """Plain causal attention in one row (an ``AttentionPlan``): padding on the right is seen by padding only."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See ``AttentionPlan``."""
        grouped = query.shape[1] != key.shape[1]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return attended.transpose(1, 2)


class TorchFunc:
    """A padded batch with all its gradients, their norms, and their combination. The model must use ``vcpo``'s
    attention, because transformers' masks depend on data, which function transforms do not allow."""

    name = "torch_func"
    baseline = "opob"

    def __init__(self, model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> None:
        self._model = model
        self._objective = Objective(trajectories)
        self._batch = padded(trajectories, model.device)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._positions_1T = torch.arange(self._batch.ids_BT.shape[1], device=model.device)[None]
        single = sum(p.numel() * p.element_size() for p in self._parameters.values())
        self._chunk = max(1, _GRADIENT_BYTES // single)
        self._per_sample = vmap(grad(self._logprob, has_aux=True), in_dims=(None, 0, 0, 0))

    def gradient(self) -> Tensor:
        """See ``Alternative``."""
        batch, objective = self._batch, self._objective
        values = {name: p.detach() for name, p in self._parameters.items()}
        # of each parameter sum_i u_i R_i s_i and sum_i u_i s_i, so that a chunk need not wait for the baseline
        sums = {name: p.new_zeros(2, p.numel()) for name, p in values.items()}
        count = len(batch.ids_BT)
        logprobs_B, squared_norms_B = (torch.zeros(count, dtype=torch.float64) for _ in range(2))
        for begin in range(0, count, self._chunk):
            members = slice(begin, begin + self._chunk)
            chunk = (batch.ids_BT[members], batch.targets_BR[members], batch.trained_BR[members])
            gradients, (chunk_logprobs, _) = self._per_sample(values, *chunk)
            logprobs_B[members] = chunk_logprobs.double().cpu()
            units_B = objective.units(objective.log_ratios(logprobs_B))[members]
            factors_2C = torch.stack([units_B * objective.rewards_B[members], units_B])
            for name, per_sample in gradients.items():
                flat = per_sample.flatten(1)
                squared_norms_B[members] += torch.linalg.vector_norm(flat, dim=1).double().square().cpu()
                sums[name].addmm_(factors_2C.to(flat), flat)
            # otherwise they would be there beside those of the next chunk
            del gradients, per_sample, flat
        baseline = objective.optimal_baseline(objective.log_ratios(logprobs_B), squared_norms_B)
        for name, parameter in self._parameters.items():
            rewarded, unit = sums.pop(name)
            parameter.grad = (baseline * unit - rewarded).view_as(parameter)
        return squared_norms_B

    def _logprob(
        self, values: dict[str, Tensor], ids_T: Tensor, targets_R: Tensor, trained_R: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        call = {
            "input_ids": ids_T[None],
            "position_ids": self._positions_1T,
            "attention_plan": CausalPlan(),
            "logits_to_keep": self._batch.predictors_R,
            "use_cache": False,
        }
        logits_RV = functional_call(self._model, values, kwargs=call).logits[0]
        logprobs_R, entropies_R = logprobs_and_entropies(logits_RV, targets_R)
        logprob = (logprobs_R * trained_R).sum()
        return logprob, (logprob.detach(), entropies_R)
