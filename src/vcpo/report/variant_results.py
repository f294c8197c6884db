"""What one run and the seeds of one variant came to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcpo.observe.summary import finite_values
from vcpo.report.bootstrap import Interval, wilson_share
from vcpo.report.collapse import is_collapsed
from vcpo.report.ranking import Standing, late_accuracy
from vcpo.report.runs import RunData

_LAST_STEPS = 10


@dataclass(frozen=True)
class RunResult:
    """One run of the comparison; ``None`` where it was not measured.

    final_accuracy, best_accuracy: over its evaluations. late_accuracy: what variants are ranked by (``late_accuracy``).
    collapsed: see ``is_collapsed``. final_ess: mean over the last 10 steps. mean_lag: over all steps, in steps.
    skipped_steps: steps without an update because of non-finite numbers. seconds: wall time.
    """

    variant: str
    seed: int
    run_dir: str
    first_accuracy: float | None
    late_accuracy: float | None
    final_accuracy: float | None
    best_accuracy: float | None
    collapsed: bool | None
    final_ess: float | None
    mean_lag: float | None
    skipped_steps: int
    seconds: float | None


@dataclass(frozen=True)
class VariantResult:
    """What the seeds of one variant came to; ``None`` where it was not measured.

    standing: rank, mean late accuracy and difference to the best variant, with their intervals. failed_seeds: runs
    that ended with an error; they are in none of the other numbers. final_accuracy_sd: sample standard deviation, from
    two seeds on. judged: runs with enough evaluations to tell whether they collapsed. collapsed: how many of them did.
    stable_share: share of the judged runs that did not, with Wilson's interval.
    """

    variant: str
    standing: Standing
    seeds: list[int]
    failed_seeds: list[int]
    final_accuracy_mean: float | None
    final_accuracy_sd: float | None
    best_accuracy_mean: float | None
    judged: int
    collapsed: int
    stable_share: float | None
    stable_interval: Interval | None
    final_ess_mean: float | None
    seconds_mean: float | None


def run_result(variant: str, seed: int, run_dir: Path, run: RunData) -> RunResult:
    """The numbers of a run that has been loaded."""
    summary = run.summary
    ess = finite_values(run.train[-_LAST_STEPS:], "ess")
    lags = finite_values(run.train, "lag_mean")
    accuracies = summary.eval_accuracies
    return RunResult(
        variant=variant,
        seed=seed,
        run_dir=str(run_dir),
        first_accuracy=summary.first_accuracy,
        late_accuracy=late_accuracy(accuracies) if accuracies else None,
        final_accuracy=summary.final_accuracy,
        best_accuracy=summary.best_accuracy,
        collapsed=is_collapsed(accuracies),
        final_ess=statistics.fmean(ess) if ess else None,
        mean_lag=statistics.fmean(lags) if lags else None,
        skipped_steps=summary.skipped,
        seconds=summary.seconds,
    )


def variant_result(standing: Standing, runs: Sequence[RunResult], failed_seeds: Sequence[int]) -> VariantResult:
    """Means over the runs of the variant whose standing is given; there may be none, if all have failed."""
    finals = [run.final_accuracy for run in runs if run.final_accuracy is not None]
    judged = sum(run.collapsed is not None for run in runs)
    collapsed = sum(run.collapsed is True for run in runs)
    return VariantResult(
        variant=standing.variant,
        standing=standing,
        seeds=[run.seed for run in runs],
        failed_seeds=list(failed_seeds),
        final_accuracy_mean=_mean(finals),
        final_accuracy_sd=statistics.stdev(finals) if len(finals) > 1 else None,
        best_accuracy_mean=_mean([run.best_accuracy for run in runs]),
        judged=judged,
        collapsed=collapsed,
        stable_share=1 - collapsed / judged if judged else None,
        stable_interval=wilson_share(judged - collapsed, judged),
        final_ess_mean=_mean([run.final_ess for run in runs]),
        seconds_mean=_mean([run.seconds for run in runs]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
