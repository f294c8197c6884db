"""The learning rate as a function of the step, before the effective sample size has its say."""

from __future__ import annotations

import math

from vcpo.config import TrainingSection


def scheduled_learning_rate(training: TrainingSection, version: int) -> float:
    """The learning rate of the optimizer step that follows ``version`` finished ones.

    Rises linearly over the first ``warmup_steps`` steps, of which the first already moves (it is learning_rate /
    warmup_steps) and the last has the full rate; then stays, or falls towards 0 at ``max_steps`` on a line or half a
    cosine.
    """
    if version < training.warmup_steps:
        return training.learning_rate * (version + 1) / training.warmup_steps
    if training.lr_scheduler_type == "constant":
        return training.learning_rate
    rest = max(training.max_steps - training.warmup_steps, 1)
    progress = min((version - training.warmup_steps) / rest, 1.0)
    if training.lr_scheduler_type == "linear":
        return training.learning_rate * (1 - progress)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
