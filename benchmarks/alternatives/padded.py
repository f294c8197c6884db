"""What most trainers do without norms: a padded batch with an attention mask through transformers' own attention."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from alternatives.objective import Objective, padded, padded_logprobs
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
        logprobs_B = padded_logprobs(self._model, self._batch)
        units_B = self._objective.units(self._objective.log_ratios(logprobs_B))
        coefficients_B = units_B * (self._objective.rewards_B - self._objective.mean_baseline())
        logprobs_B.backward(-coefficients_B.to(logprobs_B))
