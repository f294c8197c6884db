"""The one definition of a collapsed run."""

from __future__ import annotations

from collections.abc import Sequence


def is_collapsed(eval_accuracies: Sequence[float]) -> bool:
    """Whether a run ended with less than half of the best accuracy it had had.

    eval_accuracies: of every evaluation in order, the one before training included, so that a run which lost half of
    what it started with counts even if it never improved. Only the end matters: a run that fell and recovered has not
    collapsed. With accuracies near the resolution of the evaluation (a few right answers) the verdict is noise.
    Raises ValueError without any evaluation.
    """
    if not eval_accuracies:
        raise ValueError("a run without evaluations cannot be judged")
    return eval_accuracies[-1] < 0.5 * max(eval_accuracies)
