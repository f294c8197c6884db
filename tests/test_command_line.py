"""The command line: every mistake is one sentence and exit code 2, and every command does its work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from run_cases import tiny_recipe
from vcpo.cli import app
from vcpo.config import RunConfig, load_config, parse_config


def vcpo(*arguments: object) -> Result:
    """``vcpo ...`` in this process. An exception other than an exit is a defect and fails the test."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def refused(*arguments: object) -> str:
    """The one sentence with which a command is refused."""
    result = vcpo(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    start, _, sentence = result.stderr.partition("error: ")
    assert start == "", result.stderr
    assert len(sentence.splitlines()) == 1, result.stderr
    return sentence.strip()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny_recipe(tmp_path / "tiny.yaml")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("training.max_stepz=3", "unknown key training.max_stepz; did you mean 'training.max_steps'?"),
        ("task.digitz=3", "unknown key task.digitz"),
        ("training.max_steps=many", "training.max_steps = 'many' must be a valid integer"),
        ("training.max_steps=1.5", "training.max_steps = 1.5"),
        ("sampling.num_generations=1", "needs sampling.num_generations of 2 or more"),
        ("model.path=somewhere", "give exactly one of model.path"),
        ("method=vpco", "unknown method 'vpco'; did you mean 'vcpo'?"),
        ("runtime=cloud", "unknown runtime 'cloud'; allowed: "),
        ("training.max_steps", "must be written key.sub=value"),
        ("eval.top_p={", "the value is not valid YAML"),
    ],
)
@pytest.mark.parametrize("command", ["train", "config"])
def test_mistakes_of_the_configuration(recipe: Path, command: str, override: str, sentence: str) -> None:
    assert sentence in refused(command, recipe, override)
    assert not (recipe.parent / "run").exists()


def test_a_missing_recipe_names_its_neighbour(recipe: Path) -> None:
    assert f"did you mean {str(recipe)!r}?" in refused("train", recipe.with_name("tinny.yaml"))


def test_a_missing_model(recipe: Path) -> None:
    sentence = refused("train", recipe, "model={path: ./no-such-model}")
    assert "model.path './no-such-model' does not exist" in sentence
    assert not (recipe.parent / "run").exists()


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (None, "rows.jsonl' does not exist"),
        ([], "rows.jsonl has no rows"),
        ([{"prompt": "1=", "answer": "1"}, {"promt": "2=", "answer": "2"}],
         "rows.jsonl, row 2: column 'prompt' is missing; did you mean 'promt'?"),
        ([{"prompt": "1=", "answer": "1"}, {"prompt": "2="}], "rows.jsonl, row 2: column 'answer' is missing"),
        ([{"prompt": "1=", "answer": None}], "rows.jsonl, row 1: column 'answer' is null"),
    ],
)  # fmt: skip
def test_mistakes_of_the_data(recipe: Path, lines: list[dict[str, object]] | None, sentence: str) -> None:
    rows = recipe.with_name("rows.jsonl")
    if lines is not None:
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sentence in refused("train", recipe, "task=dataset", f"task.path={rows}")
    assert not (recipe.parent / "run").exists()


def test_a_directory_that_holds_a_run_is_refused(recipe: Path, finished_run: Path) -> None:
    sentence = refused("train", recipe, f"output_dir={finished_run}")
    assert "already holds a run: continue it with --resume, replace it with --overwrite" in sentence


def test_resume_and_overwrite_exclude_each_other(recipe: Path) -> None:
    assert refused("train", recipe, "--resume", "--overwrite") == "give --resume or --overwrite, not both"


def test_resume_of_nothing(recipe: Path) -> None:
    assert "holds no run to resume" in refused("train", recipe, "--resume")


def test_resume_of_another_configuration(finished_run: Path) -> None:
    sentence = refused("train", finished_run / "config.yaml", "seed=9", "--resume")
    assert "seed was 0 and is now 9" in sentence


@pytest.mark.parametrize("seeds", ["one", "3-", "-3", "1,,2", "5-1"])
def test_seeds_that_are_none(recipe: Path, tmp_path: Path, seeds: str) -> None:
    sentence = refused("compare", recipe, "--methods", "vcpo", f"--seeds={seeds}", "--out", tmp_path / "out")
    assert f"--seeds {seeds!r}" in sentence
    assert not (tmp_path / "out").exists()


def test_a_comparison_without_seeds_or_variants(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "has no compare.variants" in refused("compare", recipe, "--out", out)
    sentence = refused("compare", recipe, "compare.seeds=[]", "--methods", "vcpo", "--out", out)
    assert "compare.seeds" in sentence
    assert not out.exists()


def test_an_unknown_method_in_a_comparison(recipe: Path, tmp_path: Path) -> None:
    sentence = refused("compare", recipe, "--methods", "vcpo,vpco", "--out", tmp_path / "out")
    assert "unknown variant or method 'vpco'; did you mean 'vcpo'?" in sentence


def test_evaluating_a_run_without_weights(tmp_path: Path, finished_run: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((finished_run / "config.yaml").read_bytes())
    assert "has neither a final model nor an intact checkpoint yet" in refused("eval", tmp_path)


def test_evaluating_a_run_takes_no_recipe(recipe: Path, finished_run: Path) -> None:
    assert "brings its own configuration: leave out the recipe" in refused("eval", finished_run, recipe)


def test_evaluating_without_a_task(finished_run: Path) -> None:
    assert "task is required" in refused("eval", finished_run / "model")


def test_reporting_what_is_no_run(tmp_path: Path) -> None:
    assert "is not a run directory (it has no config.yaml)" in refused("report", tmp_path)
    assert "is not a run directory" in refused("report", tmp_path / "nowhere")


def test_places_that_cannot_be_written(recipe: Path, finished_run: Path) -> None:
    below_a_file = recipe / "below"
    for arguments in (
        ("train", recipe, f"output_dir={below_a_file}"),
        ("compare", recipe, "--methods=vcpo", "--seeds=1", "--out", below_a_file),
        ("eval", finished_run, "--out", below_a_file),
        ("report", finished_run, "--out", below_a_file),
    ):
        sentence = refused(*arguments)
        assert "cannot be written" in sentence
        assert str(recipe) in sentence


def test_fetching_into_an_existing_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path) in refused("model", "fetch-smollm2", tmp_path)


def test_a_mistake_is_answered_without_loading_torch(recipe: Path) -> None:
    code = (
        "import sys\nfrom vcpo.cli import app\n"
        "try:\n    app()\nfinally:\n    print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(recipe), "training.max_stepz=3"], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == "[]\n"
    assert done.stderr.splitlines() == [
        f"error: {recipe}: unknown key training.max_stepz; did you mean 'training.max_steps'?"
    ]


@pytest.mark.parametrize("overrides", [(), ("method=tis", "method.weight.cap=3", "runtime=local", "eval.eval_steps=7")])
def test_the_printed_configuration_loads_back(recipe: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    result = vcpo("config", recipe, *overrides)
    assert result.exit_code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.stdout)
    assert load_config(printed) == load_config(recipe, overrides)
    assert yaml.safe_load(result.stdout).keys() == RunConfig.model_fields.keys()


def test_training_resuming_and_overwriting(recipe: Path) -> None:
    run = recipe.parent / "run"
    assert vcpo("train", recipe, "training.max_steps=1").exit_code == 0
    assert (run / "report.html").is_file()
    first = (run / "environment.json").read_text()
    assert vcpo("train", recipe, "training.max_steps=2", "--resume", "--no-report").exit_code == 0
    sessions = json.loads((run / "environment.json").read_text())
    assert [s["outcome"] for s in sessions] == ["finished", "finished"]
    assert len(json.loads(first)) == 1
    assert [s["step"] for s in sessions] == [1, 2]
    assert vcpo("train", recipe, "training.max_steps=1", "--overwrite", "--no-report").exit_code == 0
    assert len(json.loads((run / "environment.json").read_text())) == 1
    assert not (run / "report.html").exists()


def test_evaluating_a_run(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "eval"
    result = vcpo("eval", finished_run, "--problems", 5, "--n", 2, "--out", out)
    assert result.exit_code == 0
    assert "accuracy" in result.stdout
    record = json.loads((out / "eval.json").read_text())
    assert record["metrics"]["problems"] == 5
    assert parse_config(record["config"]).model.path == str(finished_run / "model")
    lines = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    responses = [response for line in lines for response in line["responses"]]
    assert (len(lines), len(responses)) == (5, 10)
    assert record["metrics"]["accuracy"] == pytest.approx(sum(r["correct"] for r in responses) / 10)


def test_evaluating_a_model_on_a_task_by_name(finished_run: Path) -> None:
    arguments = ["task.digits=4", "sampling.max_completion_length=6", "--problems", 4]
    result = vcpo("eval", finished_run / "model", "--task", "sort", *arguments)
    assert result.exit_code == 0
    assert "accuracy" in result.stdout


def test_a_report_of_one_run_and_of_several(finished_run: Path, tmp_path: Path) -> None:
    for runs in ([finished_run], [finished_run, finished_run]):
        out = tmp_path / f"{len(runs)}.html"
        result = vcpo("report", *runs, "--out", out)
        assert result.exit_code == 0
        assert str(out) in result.stdout
        assert out.read_text().startswith("<!doctype html>") or "<html" in out.read_text()[:300]


def test_the_doctor_finds_this_environment_ready() -> None:
    result = vcpo("doctor")
    assert result.exit_code == 0
    assert "Ready to train." in result.stdout
