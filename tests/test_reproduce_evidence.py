"""The numbers on which claims are judged, against curves made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from vcpo.report.runs import load_runs
from vcpo.reproduce.evidence import collapse_step, fall_steps, measure


def test_the_collapse_is_the_evaluation_from_which_on_accuracy_stays_low() -> None:
    steps = [0, 10, 20, 30, 40]
    assert collapse_step(steps, [0.2, 0.6, 0.1, 0.5, 0.1]) == 40  # the first dip recovered
    assert collapse_step(steps, [0.2, 0.6, 0.2, 0.1, 0.0]) == 20
    assert collapse_step(steps, [0.2, 0.6, 0.1, 0.1, 0.5]) is None


def test_a_fall_is_timed_from_its_last_high_value() -> None:
    assert fall_steps([0.9, 0.6, 0.5, 0.3, 0.2, 0.05]) == 3
    assert fall_steps([0.9, 0.3, 0.2, 0.05, 0.6, 0.09]) == 1  # the quicker of two falls
    assert fall_steps([0.9, 0.3, 0.2]) is None
    assert fall_steps([0.05, 0.2, 0.05]) is None  # never was high


def run_directory(path: Path, accuracies: list[float], lag: int, **curves: list[float]) -> Path:
    path.mkdir()
    lines = [{"step": 4 * i, "kind": "eval", "time": 1.0, "accuracy": a} for i, a in enumerate(accuracies)]
    for step in range(1, 4 * len(accuracies) - 3):
        values = {key: curve[step - 1] for key, curve in curves.items()}
        lines.append({"step": step, "kind": "train", "time": 1.0, **values})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "runtime": {"max_staleness": lag},
        "sampling": {"num_generations": 2},
        "training": {"prompts_per_step": 4},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def test_signs_are_read_up_to_the_collapse_and_against_the_first_half_before_it(tmp_path: Path) -> None:
    # 8 steps, evaluated at 0, 4 and 8; the lag is full from step 3 on, so "before" is steps 3 to 5
    directory = run_directory(
        tmp_path / "run",
        [0.4, 0.6, 0.0],
        lag=2,
        ess=[1.0, 1.0, 0.8, 0.6, 0.4, 0.08, 0.05, 0.02],
        kl_k3=[0.0, 0.0, 1e-3, 1e-3, 1e-3, 1e-2, 0.1, 1.0],
        grad_norm=[9.0, 9.0, 1.0, 2.0, 3.0, 30.0, 1.0, 0.0],
        max_weight_share=[0.125] * 8,
        step_scale=[1.0] * 2 + [0.5] * 6,
    )
    (run,) = load_runs([directory])
    found = measure("tis", 1, run)
    assert (found.collapsed, found.collapse_step, found.lag, found.steps) == (True, 8, 2, 8)
    assert found.ess_low == pytest.approx(0.05)
    assert found.ess_fall_steps == 2  # 0.6 at step 4, 0.08 at step 6
    assert found.kl_rise == pytest.approx(3.0)
    assert found.grad_spike == pytest.approx(15.0)
    assert found.weight_share == pytest.approx(1.0)  # 1/8 of all weight is the even share of 8 trajectories
    assert found.step_scale == pytest.approx(0.5)
    assert (found.first_accuracy, found.best_accuracy, found.final_accuracy) == (0.4, 0.6, 0.0)
