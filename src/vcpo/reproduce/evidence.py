"""What a run shows, as the few numbers on which claims are judged. Only these are kept, so verdicts can be recomputed.

A collapsed run is looked at up to its collapse, any other to its end. "Before" is the median over the first half of
that stretch, counted from the step at which the lag is first what was asked for, so that warm-up with fresh rollouts
is no part of it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vcpo.observe.summary import finite_values
from vcpo.report.collapse import is_collapsed
from vcpo.report.ranking import late_accuracy
from vcpo.report.runs import RunData, series

FALL_FROM, FALL_TO = 0.5, 0.1  # the effective sample sizes between which a fall is timed
_SMOOTH = 3  # steps of the running mean of which the smallest effective sample size is taken
_LAST = 10  # steps whose mean or median is "final"


@dataclass(frozen=True)
class RunEvidence:
    """One run; ``None`` where it cannot be said.

    steps: optimizer steps done. lag: ``runtime.max_staleness``. late_accuracy: see ``vcpo.report.ranking``. collapsed:
    see ``vcpo.report.collapse``. collapse_step: the first evaluation from which on accuracy stays below half the best.
    ess_low: the smallest mean of three neighbouring steps. ess_median: of the steps with the full lag. ess_fall_steps:
    the fewest steps in which the effective sample size fell from 0.5 or more to below 0.1. kl_rise: decades by which KL
    rose above its level before. grad_spike: the largest gradient norm, up to the collapse, as a multiple of its level
    before. grad_end: the median of the last ten as a multiple of the same. weight_share: mean of the largest
    trajectory's share of all importance weight, as a multiple of the even share 1/B. truncated: mean share of ratios
    that get a smaller weight than they are. masked: of tokens that get none. step_scale: mean factor on the learning
    rate. train_time: median seconds of an update. seconds: wall time of the run.
    """

    variant: str
    seed: int
    steps: int
    lag: int
    first_accuracy: float
    late_accuracy: float
    final_accuracy: float
    best_accuracy: float
    collapsed: bool
    collapse_step: int | None
    ess_low: float | None
    ess_median: float | None
    ess_fall_steps: int | None
    final_ess: float | None
    kl_rise: float | None
    grad_spike: float | None
    grad_end: float | None
    weight_share: float | None
    truncated: float | None
    masked: float | None
    step_scale: float | None
    skipped_steps: int
    train_time: float | None
    seconds: float | None

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it, in full precision: verdicts are computed again from it."""
        return dataclasses.asdict(self)


def measure(variant: str, seed: int, run: RunData) -> RunEvidence:
    """The evidence of a finished run. Raises ValueError for a run without evaluations."""
    eval_steps, accuracies = series(run.eval, "accuracy")
    steps = run.summary.steps
    collapse = collapse_step(eval_steps, accuracies)
    lag = int(run.config["runtime"].get("max_staleness", 0))
    until = steps if collapse is None else collapse
    seen = [line for line in run.train if line["step"] <= until]
    lagged = [line for line in seen if line["step"] > min(lag, until // 2)]
    before = lagged[: max(1, len(lagged) // 2)]
    ess = finite_values(seen, "ess")
    last = run.train[-_LAST:]
    shares = [line["max_weight_share"] for line in lagged if math.isfinite(line.get("max_weight_share", math.nan))]
    group = run.config["sampling"]["num_generations"] * run.config["training"]["prompts_per_step"]
    return RunEvidence(
        variant=variant,
        seed=seed,
        steps=steps,
        lag=lag,
        first_accuracy=accuracies[0],
        late_accuracy=late_accuracy(accuracies),
        final_accuracy=accuracies[-1],
        best_accuracy=max(accuracies),
        collapsed=bool(is_collapsed(accuracies)),
        collapse_step=collapse,
        ess_low=_smallest_mean(ess),
        ess_median=_median(lagged, "ess"),
        ess_fall_steps=fall_steps(ess),
        final_ess=_mean(finite_values(last, "ess")),
        kl_rise=_decades(_median(before, "kl_k3"), finite_values(lagged, "kl_k3")),
        grad_spike=_ratio(max(finite_values(lagged, "grad_norm"), default=None), _median(before, "grad_norm")),
        grad_end=_ratio(_median(last, "grad_norm"), _median(before, "grad_norm")),
        weight_share=group * statistics.fmean(shares) if shares else None,
        truncated=_mean(finite_values(lagged, "truncated_share")),
        masked=_mean(finite_values(lagged, "masked_share")),
        step_scale=_mean(finite_values(lagged, "step_scale")),
        skipped_steps=run.summary.skipped,
        train_time=_median(run.train, "time_train"),
        seconds=run.summary.seconds,
    )


def collapse_step(steps: Sequence[int], accuracies: Sequence[float]) -> int | None:
    """The evaluation from which on accuracy stays below half of its best; ``None`` for a run that has not collapsed."""
    if not is_collapsed(accuracies):
        return None
    half = 0.5 * max(accuracies)
    fallen = len(accuracies) - 1
    while accuracies[fallen - 1] < half:
        fallen -= 1
    return steps[fallen]


def fall_steps(ess: Sequence[float], start: float = FALL_FROM, end: float = FALL_TO) -> int | None:
    """The fewest steps in which the values go from ``start`` or more to below ``end``; ``None`` if they never do."""
    fewest, high = None, None
    for step, value in enumerate(ess):
        if value >= start:
            high = step
        elif value < end and high is not None and (fewest is None or step - high < fewest):
            fewest = step - high
    return fewest


def _smallest_mean(values: Sequence[float]) -> float | None:
    windows = [values[i : i + _SMOOTH] for i in range(max(1, len(values) - _SMOOTH + 1))]
    return min((statistics.fmean(window) for window in windows if window), default=None)


def _median(lines: Sequence[dict[str, Any]], key: str) -> float | None:
    values = finite_values(lines, key)
    return statistics.median(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _ratio(value: float | None, level: float | None) -> float | None:
    return None if value is None or not level else value / level


def _decades(level: float | None, values: Sequence[float]) -> float | None:
    # a synchronous run's KL is rounding noise around zero
    if level is None or level < 1e-9 or not values:
        return None
    return math.log10(max(*values, level) / level)
