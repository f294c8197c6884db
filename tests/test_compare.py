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
from vcpo.methods.spec import METHODS
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


def variants_in(path: Path, content: object) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def test_variants_from_a_file_stand_beside_those_of_the_recipe_and_methods(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, sync={"runtime.max_staleness": 0}, unused={})
    file = variants_in(
        tmp_path / "more.yaml",
        {
            "lr-1.2e-4": {"method": "tis", "training.learning_rate": 1.2e-4},
            "mine": {"method": {"name": "vcpo", "ess_on_policy": 0.5}},
        },
    )
    runs = plan(recipe, ["sync", str(file), "grpo"], None, {}, tmp_path / "out")
    assert [run.variant for run in runs] == ["sync", "lr-1.2e-4", "mine", "grpo"]
    assert (runs[1].config.method.name, runs[1].config.training.learning_rate) == ("tis", 1.2e-4)
    assert runs[2].config.method.spec.ess_on_policy == 0.5
    assert {run.config.task.name for run in runs} == {"sort"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"slow": 3}, "must map names of variants to overrides.*'slow' has 3"),
        ({7: {"seed": 1}}, "must map names of variants to overrides.*but 7 has"),
        ({"slow": {7: 1}}, "the override 7 must be a dotted key"),
        ({}, "names no variant"),
        ({"a/b": {}}, "variant name 'a/b' must consist of letters"),
        ({"sync": {"runtime.max_staleness": 1}}, "different overrides are called 'sync'"),
        ({"bad": {"method.ratio_capp": 2}}, "variant 'bad' of .*ratio_capp"),
    ],
)
def test_mistakes_in_a_file_of_variants(tmp_path: Path, content: object, sentence: str) -> None:
    recipe = recipe_in(tmp_path, sync={"runtime.max_staleness": 0})
    file = variants_in(tmp_path / "more.yaml", content)
    with pytest.raises(UserError, match=sentence):
        plan(recipe, ["sync", str(file)], None, {}, tmp_path / "out")
    with pytest.raises(UserError, match="does not exist"):
        plan(recipe, [str(tmp_path / "none.yaml")], None, {}, tmp_path / "out")


def test_every_named_method_can_be_compared_on_a_recipe(tmp_path: Path) -> None:
    runs = plan(recipe_in(tmp_path), list(METHODS), [1], {}, tmp_path / "out")
    assert [run.config.method.name for run in runs] == list(METHODS)
    assert len({run.directory for run in runs}) == len(METHODS)


def test_a_name_or_seed_given_twice_is_run_once(tmp_path: Path) -> None:
    runs = plan(recipe_in(tmp_path), ["tis", "tis"], [2, 1, 2], {}, tmp_path / "out")
    assert [(run.variant, run.seed) for run in runs] == [("tis", 2), ("tis", 1)]


def test_equal_configurations_share_a_run_whatever_they_are_called(tmp_path: Path) -> None:
    out = tmp_path / "out"
    recipe = recipe_in(
        tmp_path, fresh={"method": "tis", "runtime.max_staleness": 0}, stale={"runtime.max_staleness": 2}
    )
    first, second, other, _ = plan(recipe, ["fresh", "tis", "stale", "rloo"], [1], {}, out)
    assert first.directory == second.directory
    assert first.directory.name.startswith("fresh-seed1-")
    assert first.directory != other.directory

    # a run that was made under one name is found under another; a finished one before an unfinished one
    assert plan(recipe, ["tis"], [1], {}, out)[0].directory.name.startswith("tis-seed1-")
    first.directory.mkdir(parents=True)
    assert plan(recipe, ["tis"], [1], {}, out)[0].directory == first.directory
    own = first.directory.with_name(first.directory.name.replace("fresh", "tis"))
    own.mkdir()
    assert plan(recipe, ["tis"], [1], {}, out)[0].directory == own
    (first.directory / "environment.json").write_text(json.dumps([{"outcome": "finished"}]))
    assert plan(recipe, ["tis"], [1], {}, out)[0].directory == first.directory

    said: list[str] = []
    assert execute([first, second], jobs=1, note=said.append) == []
    assert said == [
        "tis seed 1 has the configuration of fresh: one run serves both",
        "1 runs, 1 finished before, 1 at a time",
    ]


def test_a_run_that_cannot_be_written_does_not_stop_the_others(tmp_path: Path) -> None:
    runs = plan(recipe_in(tmp_path), ["tis", "rloo"], [1], {}, tmp_path / "out")
    for run in runs:
        run.directory.parent.mkdir(parents=True, exist_ok=True)
        # a directory in the place of the run's recipe
        run.directory.with_name(f"{run.directory.name}.yaml").mkdir()
    failed = execute(runs, jobs=1, note=lambda _: None)
    assert [run.variant for run, _ in failed] == ["tis", "rloo"]
    assert all(words.startswith("it could not be run: ") for _, words in failed)


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
    variants = json.loads((out / "results.json").read_text())["variants"]
    assert [(v["variant"], v["seeds"], v["failed_seeds"]) for v in variants] == [("tis", [3], []), ("broken", [], [3])]
    assert (out / "comparison.png").stat().st_size > 10_000

    said: list[str] = []
    assert execute(plan(recipe, ["tis"], [3], {}, out), jobs=1, note=said.append) == []
    assert said == ["1 runs, 1 finished before, 1 at a time"]


def test_a_users_own_method_is_compared_by_its_name_in_the_file(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("from vcpo.methods.spec import METHODS\nSPEC = METHODS['grpo']\n")
    runs = plan(recipe_in(tmp_path), [f"{own}:SPEC"], [1], {}, tmp_path / "out")
    assert [run.variant for run in runs] == ["SPEC"]
    assert runs[0].config.method.spec.ratio_level == "none"
