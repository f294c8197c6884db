"""Comparisons: planned in full before anything runs, resumable, and honest about runs that fail."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from run_cases import tiny_data
from vcpo.cli import app
from vcpo.errors import UserError
from vcpo.pipeline.compare import execute, plan


def recipe_in(path: Path, **variants: dict[str, object]) -> Path:
    data = tiny_data(path / "single", "training.max_steps=2", "eval.eval_steps=2", "eval.num_problems=4")
    data["compare"] = {"variants": variants, "seeds": [3]}
    recipe = path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(data))
    return recipe


def test_the_plan_crosses_variants_and_seeds_in_directories_of_their_own(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, sync={"runtime.max_staleness": 0}, stale={"runtime.max_staleness": 2})
    runs = plan(recipe, ["stale", "grpo"], [1, 2], {"training.max_steps": 5}, tmp_path / "out")
    assert [(r.variant, r.seed) for r in runs] == [("stale", 1), ("stale", 2), ("grpo", 1), ("grpo", 2)]
    assert len({r.directory for r in runs}) == 4
    stale, grpo = runs[0].config, runs[2].config
    assert (stale.runtime.max_staleness, stale.method.name, stale.training.max_steps) == (2, "vcpo", 5)
    assert (grpo.runtime.max_staleness, grpo.method.name) == (0, "grpo")
    # the same plan finds the same directories, a changed one others
    assert runs == plan(recipe, ["stale", "grpo"], [1, 2], {"training.max_steps": 5}, tmp_path / "out")
    changed = plan(recipe, ["stale"], [1], {"training.max_steps": 6}, tmp_path / "out")
    assert changed[0].directory != runs[0].directory


def test_mistakes_are_found_before_any_run_and_name_the_variant(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, bad={"training.max_stepz": 3})
    with pytest.raises(UserError, match=r"variant 'bad' of .*unknown key training\.max_stepz"):
        plan(recipe, [], [1], {}, tmp_path)
    with pytest.raises(UserError, match="unknown variant or method 'vpco'; did you mean 'vcpo'"):
        plan(recipe, ["vpco"], [1], {}, tmp_path)
    with pytest.raises(UserError, match=r"has no compare\.variants"):
        plan(recipe_in(tmp_path), [], [1], {}, tmp_path)


@pytest.mark.slow
def test_a_failed_run_is_reported_the_others_finish_and_nothing_runs_twice(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def reward(completions, **columns):\n    raise LookupError('no such judge')\n")
    recipe = recipe_in(tmp_path, tis={"method": "tis"}, broken={"reward.reward_funcs": [f"{broken}:reward"]})
    out = tmp_path / "out"
    command = ["compare", str(recipe), "--jobs", "2", "--out", str(out)]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 2
    assert "broken seed 3 FAILED" in first.output
    assert "no such judge" in first.output
    assert "1 of 2 runs failed" in first.output
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["seed"]) for row in rows] == [("tis", "3")]
    assert json.loads((out / "results.json").read_text())["variants"][0]["variant"] == "tis"
    assert (out / "comparison.png").stat().st_size > 10_000

    said: list[str] = []
    assert execute(plan(recipe, ["tis"], [3], {}, out), jobs=1, note=said.append) == []
    assert said == ["1 runs, 1 finished before, 1 at a time"]
