"""What most trainers do without norms: a padded batch with an attention mask through transformers' own attention."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from alternatives.objective import Objective, logprobs_and_entropies, padded
from vcpo.records import Trajectory


class Padded:
    """One forward and one backward pass. The model must use transformers' ``sdpa`` attention."""

    name = "padded"
    baseline = "group_mean"

    def __init__(self, model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> None:
        self._model = model
        self._objective = Objective(trajectories)
        self._batch = padded(trajectories, model.device)

    def gradient(self) -> None:
        """See ``Alternative``."""
        batch = self._batch
        logits_BRV = self._model(
            input_ids=batch.ids_BT,
            attention_mask=batch.mask_BT,
            logits_to_keep=batch.predictors_R,
            use_cache=False,
        ).logits
        logprobs_BR, _ = logprobs_and_entropies(logits_BRV, batch.targets_BR)
        logprobs_B = (logprobs_BR * batch.trained_BR).sum(dim=1)
        units_B = self._objective.units(self._objective.log_ratios(logprobs_B))
        coefficients_B = units_B * (self._objective.rewards_B - self._objective.mean_baseline())
        logprobs_B.backward(-coefficients_B.to(logprobs_B))
