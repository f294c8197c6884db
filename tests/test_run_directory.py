"""A run directory holds one run, and a run is not lost to another one by mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vcpo.config import RunConfig, parse_config
from vcpo.errors import UserError
from vcpo.pipeline.run_directory import RunDirectory


def config_for(path: Path, **changes: Any) -> RunConfig:
    return parse_config({"output_dir": str(path), "model": {"init": {}}, "task": "sort", **changes})


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    RunDirectory.open(config_for(tmp_path / "run"), "new")
    with pytest.raises(UserError, match="already holds a run: continue it with --resume, replace it with --overwrite"):
        RunDirectory.open(config_for(tmp_path / "run"), "new")


def test_overwrite_empties_a_run_but_never_other_files(tmp_path: Path) -> None:
    run = RunDirectory.open(config_for(tmp_path / "run"), "new")
    (run.path / "metrics.jsonl").write_text("old")
    RunDirectory.open(config_for(tmp_path / "run"), "overwrite")
    assert not (run.path / "metrics.jsonl").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("important")
    with pytest.raises(UserError, match="files that are no run"):
        RunDirectory.open(config_for(tmp_path / "mine"), "overwrite")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_overwrite_spares_what_only_looks_like_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other" / "config.yaml").write_text("site: blog\n")
    with pytest.raises(UserError, match="files that are no run"):
        RunDirectory.open(config_for(tmp_path / "other"), "overwrite")
    assert (tmp_path / "other" / "checkpoints").exists()
    run = RunDirectory.open(config_for(tmp_path / "run"), "new")
    monkeypatch.chdir(run.path)
    with pytest.raises(UserError, match="files that are no run"):
        RunDirectory.open(config_for(run.path), "overwrite")


def test_resume_needs_a_run_with_the_same_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run to resume"):
        RunDirectory.open(config_for(tmp_path / "run"), "resume")
    RunDirectory.open(config_for(tmp_path / "run"), "new")
    RunDirectory.open(config_for(tmp_path / "run", checkpoint={"save_steps": 7}), "resume")
    with pytest.raises(UserError, match=r"training\.learning_rate was 1e-06 and is now 0\.1"):
        RunDirectory.open(config_for(tmp_path / "run", training={"learning_rate": 0.1}), "resume")


def test_the_sessions_of_a_run_are_recorded_with_their_outcome(tmp_path: Path) -> None:
    run = RunDirectory.open(config_for(tmp_path / "run"), "new")
    run.record_start(None)
    assert not run.is_finished
    run.record_end("interrupted", step=3)
    run.record_start(3)
    run.record_end("finished", step=9)
    assert run.is_finished
    assert [(s["outcome"], s["step"], s["resumed_at_step"]) for s in run.sessions()] == [
        ("interrupted", 3, None),
        ("finished", 9, 3),
    ]
    assert run.sessions()[0]["packages"]["torch"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunDirectory.open(config_for(tmp_path / "run"), "new")
