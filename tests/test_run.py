"""What a run leaves behind, and what another run can start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from run_cases import timeless_metrics, tiny_config, train_steps
from vcpo.config import load_config
from vcpo.errors import UserError
from vcpo.pipeline.checkpoint import find_damage, list_checkpoints
from vcpo.pipeline.run import train
from vcpo.pipeline.run_directory import RunDirectory


def test_the_run_directory_holds_what_was_run_and_what_came_out(finished_run: Path) -> None:
    effective = load_config(finished_run / "config.yaml")
    assert effective.training.max_steps == 6
    session = RunDirectory(finished_run).sessions()[-1]
    assert session["outcome"] == "finished"
    assert session["step"] == 6
    assert session["packages"]["torch"] == torch.__version__
    lines = timeless_metrics(finished_run)
    assert [(line["kind"], line["step"]) for line in lines if line["kind"] == "eval"] == [
        ("eval", 0),
        ("eval", 3),
        ("eval", 6),
    ]
    assert train_steps(finished_run) == [1, 2, 3, 4, 5, 6]
    assert [p.name for p in list_checkpoints(finished_run / "checkpoints")] == ["step-000003", "step-000006"]
    assert all(find_damage(p) is None for p in list_checkpoints(finished_run / "checkpoints"))
    assert sorted(p.name for p in (finished_run / "transcripts").iterdir()) == [
        f"step-00000{step}.md" for step in (2, 4, 6)
    ]
    assert list((finished_run / "tensorboard").glob("events*"))
    assert "<html" in (finished_run / "report.html").read_text()[:200]
    assert not [p for p in finished_run.rglob("*") if "tmp" in p.suffix]


def test_a_model_that_cannot_be_loaded_leaves_no_directory_and_spares_the_run_to_be_replaced(tmp_path: Path) -> None:
    broken = tiny_config(tmp_path / "run", "model=./no/such/model")
    with pytest.raises(UserError, match=r"model\.path './no/such/model' does not exist"):
        train(broken)
    assert not (tmp_path / "run").exists()
    train(tiny_config(tmp_path / "run", "training.max_steps=1"), make_report=False)
    with pytest.raises(UserError, match="does not exist"):
        train(broken, mode="overwrite")
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_a_trained_model_is_a_starting_point_for_another_run(finished_run: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", f"model={finished_run / 'model'}", "training.max_steps=1")
    train(config, make_report=False)
    first = timeless_metrics(tmp_path / "run")[0]
    assert first["log_ratio_max"] == pytest.approx(0.0, abs=1e-5)


def test_the_effective_configuration_runs_again_to_the_same_result(finished_run: Path, tmp_path: Path) -> None:
    again = load_config(finished_run / "config.yaml", [f"output_dir={json.dumps(str(tmp_path / 'again'))}"])
    assert timeless_metrics(train(again, make_report=False)) == timeless_metrics(finished_run)
