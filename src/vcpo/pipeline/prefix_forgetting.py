"""How far the policy has moved away from what a response had written before the weights last changed under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from vcpo.learner.forward import PolicyForward
from vcpo.learner.head import run_head
from vcpo.learner.packing import default_microbatch, microbatches, pack
from vcpo.records import Group, Trajectory


class PrefixForgetting:
    """Scores groups under a model's current weights, without gradients."""

    def __init__(self, model: PreTrainedModel, temperature: float, max_tokens: int | None) -> None:
        """temperature: at which the responses were sampled; max_tokens: of one forward pass, ``None`` for a default."""
        self._device = next(iter(model.parameters())).device
        self._temperature = temperature
        self._forward = PolicyForward(model, self._device)
        hidden_size = model.config.get_text_config().hidden_size
        self._max_tokens = max_tokens or default_microbatch(hidden_size, self._device)

    @torch.no_grad()
    def __call__(self, groups: Sequence[Group]) -> list[float]:
        """Mean of |log pi - log mu| over the trained prefix tokens of each group; 0 for a group that has none."""
        prefixes = [(index, prefix_of(t)) for index, group in enumerate(groups) for t in group.trajectories]
        prefixes = [(index, prefix) for index, prefix in prefixes if prefix.mask_T.any()]
        sums, tokens = np.zeros(len(groups)), np.zeros(len(groups))
        lengths = [len(t.prompt_ids) + len(t.response_ids_T) for _, t in prefixes]
        for run in microbatches(lengths, self._max_tokens):
            batch = pack([prefixes[i][1] for i in run], self._device)
            rows_KD = self._forward.rows(batch)
            head = run_head(rows_KD, self._forward.head, batch.targets_K, batch.trained_B, self._temperature)
            logprobs_K = head.logprobs_K.double().cpu().numpy()
            for i, ours in zip(run, np.split(logprobs_K, np.cumsum(batch.trained_B)[:-1]), strict=True):
                index, prefix = prefixes[i]
                sums[index] += np.abs(ours - prefix.logprobs_T[prefix.mask_T]).sum()
                tokens[index] += len(ours)
        return [float(total / max(count, 1)) for total, count in zip(sums, tokens, strict=True)]


def prefix_of(trajectory: Trajectory) -> Trajectory:
    """The response up to the last change of weights under it: its tokens from versions before that of its last one."""
    versions_T = trajectory.versions_T
    end = int(np.searchsorted(versions_T, versions_T[-1])) if len(versions_T) else 0
    return replace(
        trajectory,
        response_ids_T=trajectory.response_ids_T[:end],
        mask_T=trajectory.mask_T[:end],
        logprobs_T=trajectory.logprobs_T[:end],
        versions_T=versions_T[:end],
    )
