"""Evidence made by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from vcpo.reproduce.evidence import RunEvidence

_HEALTHY = RunEvidence(
    variant="vcpo", seed=1, steps=100, lag=16, first_accuracy=0.15, late_accuracy=0.5, final_accuracy=0.5,
    best_accuracy=0.55, collapsed=False, collapse_step=None, ess_low=0.2, ess_median=0.5, ess_fall_steps=None,
    final_ess=0.5, kl_rise=0.5, grad_spike=2.0, grad_end=1.0, weight_share=4.0, truncated=0.02, masked=0.0,
    step_scale=0.7, skipped_steps=0, train_time=0.1, seconds=20.0,
)  # fmt: skip


def evidence(variant: str, seed: int, **changes: Any) -> RunEvidence:
    """A healthy run at lag 16, but for the changes."""
    return dataclasses.replace(_HEALTHY, variant=variant, seed=seed, **changes)


def seeds(variant: str, late: list[float], collapsed: int = 0, **changes: Any) -> list[RunEvidence]:
    """Runs with seeds 1, 2, ...; the first ``collapsed`` of them have collapsed."""
    return [
        evidence(variant, seed, late_accuracy=value, collapsed=seed <= collapsed, **changes)
        for seed, value in enumerate(late, 1)
    ]


def read_results(path: Path) -> dict[str, list[RunEvidence]]:
    """The evidence that ``write_figure`` kept, from which its tables and verdicts can be made again."""
    results: dict[str, list[RunEvidence]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        results.setdefault(row["variant"], []).append(RunEvidence(**row))
    return results
