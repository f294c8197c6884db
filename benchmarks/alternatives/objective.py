"""What every alternative shares: tokens to log-probabilities, log-ratios and norms to coefficients, a padded batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vcpo.methods.advantages import fixed_baselines, length_factors, optimal_baselines, reward_scales
from vcpo.methods.spec import METHODS
from vcpo.records import Trajectory

SPECS = {"opob": METHODS["vcpo"], "group_mean": METHODS["tis"]}
"""The methods that are measured; both have sequence-level weights and differ in the baseline."""


class Objective:
    """sum_i u_i (R_i - b) log pi(y_i) of one group, with the method's own formulas. All vectors (B,) float64, CPU."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._spec = SPECS["opob"]
        self.rewards_B = torch.tensor([t.grade.reward for t in trajectories if t.grade is not None]).double()
        self._set_B = torch.zeros(len(trajectories), dtype=torch.int64)
        self._sampled_B = torch.tensor([float(t.logprobs_T.sum(dtype="float64")) for t in trajectories]).double()
        lengths_B = torch.tensor([len(t.response_ids_T) for t in trajectories])
        self._factors_B = length_factors(self._spec, lengths_B)
        self._factors_B /= reward_scales(self._spec, self.rewards_B, self._set_B)

    def log_ratios(self, logprobs_B: Tensor) -> Tensor:
        """Sequence log-ratios from the sums of the learner's token log-probabilities."""
        return logprobs_B.detach().double().cpu() - self._sampled_B

    def units(self, log_ratios_B: Tensor) -> Tensor:
        """u_i: truncated importance weight, length normalisation and reward scale; needs no other trajectory."""
        return self._weights(log_ratios_B) * self._factors_B

    def optimal_baseline(self, log_ratios_B: Tensor, squared_norms_B: Tensor) -> float:
        """The off-policy optimal baseline of the group."""
        log_weights_B = self._weights(log_ratios_B).log()
        arguments = (self.rewards_B, log_ratios_B, log_weights_B, squared_norms_B.cpu(), self._factors_B, self._set_B)
        return float(optimal_baselines(self._spec, *arguments)[0])

    def _weights(self, log_ratios_B: Tensor) -> Tensor:
        return self._spec.weight(log_ratios_B, log_ratios_B, math.nan)

    def mean_baseline(self) -> float:
        """The mean reward of the group."""
        return float(fixed_baselines(SPECS["group_mean"], self.rewards_B, self._set_B)[0])


def logprobs_and_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and entropies without a graph; logits (..., V), targets (...)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    fixed = logprobs.detach()
    return logprobs.gather(-1, targets[..., None])[..., 0], -torch.linalg.vecdot(fixed.exp(), fixed)


def padded_logprobs(model: nn.Module, batch: PaddedBatch) -> Tensor:
    """(B,) sums of the response tokens' log-probabilities; the entropies are made as well, because the learner does."""
    logits_BRV = model(
        input_ids=batch.ids_BT,
        attention_mask=batch.mask_BT,
        logits_to_keep=batch.predictors_R,
        use_cache=False,
    ).logits
    logprobs_BR, _ = logprobs_and_entropies(logits_BRV, batch.targets_BR)
    return (logprobs_BR * batch.trained_BR).sum(dim=1)


@dataclass(frozen=True)
class PaddedBatch:
    """Trajectories with one prompt length, padded on the right. ``_T`` counts tokens, ``_R`` response tokens.

    predictors_R: positions whose outputs predict response tokens; the same for all.
    """

    ids_BT: Tensor
    mask_BT: Tensor
    targets_BR: Tensor
    trained_BR: Tensor
    predictors_R: Tensor


def padded(trajectories: Sequence[Trajectory], device: torch.device) -> PaddedBatch:
    """Pad to the longest trajectory."""
    prompt = len(trajectories[0].prompt_ids)
    width = prompt + max(len(t.response_ids_T) for t in trajectories)
    ids_BT = torch.zeros(len(trajectories), width, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for row, trajectory in enumerate(trajectories):
        total = prompt + len(trajectory.response_ids_T)
        ids_BT[row, :prompt] = torch.from_numpy(trajectory.prompt_ids)
        ids_BT[row, prompt:total] = torch.from_numpy(trajectory.response_ids_T)
        mask_BT[row, :total] = 1
    ids_BT, mask_BT = ids_BT.to(device), mask_BT.to(device)
    predictors_R = torch.arange(prompt - 1, width - 1, device=device)
    return PaddedBatch(ids_BT, mask_BT, ids_BT[:, prompt:], mask_BT[:, prompt:].float(), predictors_R)
