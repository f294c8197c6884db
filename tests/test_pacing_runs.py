"""Whole runs in which groups are dropped: metrics, interruption and what is left for the resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from run_cases import InterruptAfter, tiny_config, train_steps
from vcpo.observe.metrics import read_metrics
from vcpo.pipeline.run import train

pytestmark = pytest.mark.slow


def numbers_at(run: Path, step: int) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())
    return loaded


@pytest.mark.parametrize(
    "pacing",
    ["{name: drop_stale, max_ahead: 6}", "{name: pace, max_ahead: 6, target_occupancy: 1.0, smoothing: 1.0}"],
    ids=["drop_stale", "pace"],
)
def test_every_prompt_is_trained_or_dropped_once_across_an_interruption(tmp_path: Path, pacing: str) -> None:
    config = tiny_config(
        tmp_path / "run",
        "runtime=local",
        "runtime.max_staleness=1",
        f"runtime.pacing={pacing}",
        "training.max_steps=12",
    )
    with pytest.raises(KeyboardInterrupt):
        train(config, make_report=False, progress=InterruptAfter(5))
    before = numbers_at(tmp_path / "run", 5)
    dropped = sum(before["rollouts"]["pool"]["dropped"].values())
    assert before["next_group"] + len(before["done"]) == 5 * 2 + dropped
    run = train(config, mode="resume", make_report=False)
    after = numbers_at(run, 12)
    dropped = sum(after["rollouts"]["pool"]["dropped"].values())
    # at the end nothing is open: what was started is what was trained or dropped
    assert (after["next_group"], after["position"], after["done"]) == (24 + dropped, 24 + dropped, [])
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
    assert train_steps(run) == list(range(1, 13))
    assert all(line["lag_max"] <= 1 for line in lines)
    counts = [line["dropped_groups"] for line in lines]
    assert counts == sorted(counts)
    assert counts[-1] == dropped


def test_bounded_pacing_says_that_it_drops_nothing(tmp_path: Path) -> None:
    run = train(tiny_config(tmp_path / "run", "runtime=local", "runtime.max_staleness=2"), make_report=False)
    lines = read_metrics(run / "metrics.jsonl")
    assert all(line["dropped_groups"] == 0 for line in lines)
    assert all("staleness_limit" not in line for line in lines)
    assert numbers_at(run, 6)["position"] == 12
