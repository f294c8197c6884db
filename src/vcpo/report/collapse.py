"""The one definition of a collapsed run."""

from __future__ import annotations

from collections.abc import Sequence

# below it, a best accuracy is a few lucky answers, and losing half of it means nothing
LEAST_BEST_ACCURACY = 0.05


def is_collapsed(eval_accuracies: Sequence[float]) -> bool | None:
    """Whether a run ended with less than half of the best accuracy it had had; ``None`` if it cannot be judged.

    eval_accuracies: of every evaluation in order, the one before training included, so that a run which lost half of
    what it started with counts even if it never improved. With fewer than two there is nothing to compare. A run whose
    best is below 5% had nothing to lose: it never learned, which its accuracy says, and has not collapsed. Only the
    end matters: a run that fell and recovered has not collapsed either.
    """
    if len(eval_accuracies) < 2:
        return None
    best = max(eval_accuracies)
    return best >= LEAST_BEST_ACCURACY and eval_accuracies[-1] < 0.5 * best
