"""What a run came to: the handful of numbers that its summary table and its report show."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcpo.observe.formatting import count, fixed, percent
from vcpo.observe.formatting import seconds as duration
from vcpo.observe.metrics import FILE_NAME, read_metrics

_LAST_STEPS = 10  # single steps are noisy; "final" training numbers are means over this many


@dataclass(frozen=True)
class RunSummary:
    """Numbers of one run; ``None`` where the run has not measured it.

    steps: optimizer steps done. skipped: steps without an update because of non-finite numbers.
    eval_accuracies: of every evaluation, in order of steps. reward: mean over the last 10 steps.
    ess: median over all steps. lag_mean, lag_max: policy lag of the trained trajectories over all steps.
    tokens_per_second: trained tokens, median over steps, so that waiting for the samplers to start does not count.
    seconds: time from start to end, of every start and resume; until a run has ended, the span of its metrics.
    """

    steps: int
    skipped: int
    eval_accuracies: list[float]
    reward: float | None
    ess: float | None
    lag_mean: float | None
    lag_max: float | None
    tokens_per_second: float | None
    seconds: float | None

    @property
    def final_accuracy(self) -> float | None:
        """Accuracy of the last evaluation."""
        return self.eval_accuracies[-1] if self.eval_accuracies else None

    @property
    def first_accuracy(self) -> float | None:
        """Accuracy of the first evaluation, before training in a run that evaluates at both ends."""
        return self.eval_accuracies[0] if self.eval_accuracies else None

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of any evaluation."""
        return max(self.eval_accuracies, default=None)


def summarize(run_dir: Path) -> RunSummary:
    """Summarize a finished or running run from its files. Raises UserError when it has no readable metrics."""
    return summarize_lines(read_metrics(run_dir / FILE_NAME), read_sessions(run_dir))


def summarize_lines(lines: Sequence[dict[str, Any]], sessions: Sequence[dict[str, Any]] = ()) -> RunSummary:
    """Summarize what ``read_metrics`` and ``read_sessions`` gave."""
    train = [line for line in lines if line["kind"] == "train"]
    rewards = finite_values(train[-_LAST_STEPS:], "reward")
    ess, lags = finite_values(train, "ess"), finite_values(train, "lag_mean")
    speeds = finite_values(train, "tokens_per_second")
    return RunSummary(
        steps=max((line["step"] for line in train), default=0),
        skipped=int(sum(finite_values(train, "skipped"))),
        eval_accuracies=finite_values([line for line in lines if line["kind"] == "eval"], "accuracy"),
        reward=statistics.fmean(rewards) if rewards else None,
        ess=statistics.median(ess) if ess else None,
        lag_mean=statistics.fmean(lags) if lags else None,
        lag_max=max(finite_values(train, "lag_max"), default=None),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=_seconds(lines, sessions),
    )


def summary_rows(run: RunSummary) -> list[tuple[str, str]]:
    """Names and values of a run's summary table, as shown in the terminal and in the report."""
    accuracy = percent(run.final_accuracy)
    if len(run.eval_accuracies) > 1:
        accuracy += f" (at first {percent(run.first_accuracy)}, best {percent(run.best_accuracy)})"
    return [
        ("eval accuracy", accuracy),
        ("training reward", f"{fixed(run.reward)} (mean of the last steps)"),
        ("effective sample size", f"{fixed(run.ess)} (median)"),
        ("policy lag", f"{count(run.lag_mean)} mean, {count(run.lag_max)} max"),
        ("tokens/s", f"{count(run.tokens_per_second)} (median)"),
        ("time", duration(run.seconds)),
        ("steps", f"{run.steps} ({run.skipped} skipped)"),
    ]


def finite_values(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
    """The values of one metric where it is present and finite."""
    return [line[key] for line in lines if key in line and math.isfinite(line[key])]


def read_sessions(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run's starts (environment.json); empty when there are none to read."""
    try:
        loaded = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    records = loaded if isinstance(loaded, list) else [loaded]
    return [record for record in records if isinstance(record, dict)]


def _seconds(lines: Sequence[dict[str, Any]], sessions: Sequence[dict[str, Any]]) -> float | None:
    spans = [
        s["ended"] - s["started"]
        for s in sessions
        if isinstance(s.get("started"), int | float) and isinstance(s.get("ended"), int | float)
    ]
    if spans and len(spans) == len(sessions):
        return float(sum(spans))
    times = [line["time"] for line in lines if "time" in line]
    return max(times) - min(times) if len(times) > 1 else None
