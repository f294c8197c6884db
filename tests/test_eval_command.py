"""``vcpo eval``: what it evaluates, how it samples, what it writes."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from run_cases import tiny_config, tiny_recipe
from test_eval_metrics import slow_majority, slow_pass_at_k
from vcpo.config import parse_config
from vcpo.errors import UserError
from vcpo.pipeline.eval_subject import find_subject
from vcpo.pipeline.standalone_eval import evaluate_model
from vcpo.records import Problem
from vcpo.tasks.countdown import CountdownTask
from vcpo.tasks.gsm8k import GSM8KTask
from vcpo.tasks.protocol import AnsweringTask
from vcpo.tasks.registry import make_task

NOTHING = Problem("p", "?")
OVERRIDES = ["eval.num_problems=12", "eval.num_generations=5", "task.digits=1", "eval.temperature=3.0"]


@pytest.fixture(scope="module")
def written(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of 12 problems, five responses each."""
    out = tmp_path_factory.mktemp("eval")
    evaluate_model(find_subject(str(finished_run), None, OVERRIDES), out)
    return out


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]


def record_of(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "eval.json").read_text())
    return loaded


def test_the_estimates_follow_from_the_transcripts(written: Path) -> None:
    """Every number is computed again, from the responses that were written down and in the slow way."""
    found, lines = record_of(written)["estimates"], lines_of(written)
    assert len(lines) == 12
    assert 0 < found["accuracy"]["value"] < 1, "the test shows nothing without right and wrong answers"
    rows = [[response["correct"] for response in line["responses"]] for line in lines]
    for k in range(1, 6):
        slow = sum((slow_pass_at_k(row, k) for row in rows), Fraction(0)) / 12
        assert found[f"pass_at_{k}"]["value"] == pytest.approx(float(slow))
    answers = [[response["answer"] for response in line["responses"]] for line in lines]
    slow = sum((slow_majority(a, row) for a, row in zip(answers, rows, strict=True)), Fraction(0)) / 12
    assert found["maj_at_5"]["value"] == pytest.approx(float(slow))
    for line in lines:
        for response in line["responses"]:
            assert response["correct"] == (response["text"] == line["columns"]["answer"])
            assert response["answer"] == (response["text"] or None)
    for estimate in found.values():
        assert 0 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 1


def test_the_metrics_of_a_step_are_among_the_estimates(written: Path) -> None:
    record = record_of(written)
    shared = record["metrics"].keys() & record["estimates"].keys()
    assert shared == {"accuracy", "pass_at_2", "pass_at_4", "pass_at_5", "maj_at_5"}
    assert all(record["metrics"][name] == pytest.approx(record["estimates"][name]["value"]) for name in shared)


def test_the_record_says_what_was_evaluated_and_with_what(written: Path, finished_run: Path) -> None:
    record = record_of(written)
    model = {"kind": "run", "given": str(finished_run), "path": str(finished_run / "model"), "step": None}
    assert record["model"] == model
    assert record["seed"] == 0
    assert record["environment"]["packages"].keys() >= {"torch", "transformers", "vcpo"}
    assert record["command"]
    assert parse_config(record["config"]).eval.num_generations == 5
    seeds = [response["seed"] for line in lines_of(written) for response in line["responses"]]
    assert len(set(seeds)) == 60


def test_the_same_command_gives_the_same_responses(finished_run: Path, written: Path, tmp_path: Path) -> None:
    evaluate_model(find_subject(str(finished_run), None, OVERRIDES), tmp_path)
    assert lines_of(tmp_path) == lines_of(written)


def test_a_checkpoint_of_a_run_brings_the_runs_configuration(finished_run: Path) -> None:
    for given in (finished_run / "checkpoints" / "step-000003", finished_run / "checkpoints" / "step-000003" / "model"):
        subject = find_subject(str(given), None, ["eval.num_problems=2"])
        assert (subject.kind, subject.step) == ("checkpoint", 3)
        assert subject.config.model.path == str(finished_run / "checkpoints" / "step-000003" / "model")
        assert subject.config.task.params == {"digits": 4}
        assert evaluate_model(subject, None).metrics["problems"] == 2


def test_a_run_without_a_final_model_is_evaluated_at_its_newest_intact_checkpoint(
    finished_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    shutil.rmtree(run / "model")
    (run / "checkpoints" / "step-000006" / "state.json").write_text("{}")
    notes: list[str] = []
    subject = find_subject(str(run), None, [], notes.append)
    assert (subject.kind, subject.step) == ("run", 3)
    assert notes[-1] == f"{run} has no final model yet: evaluating its checkpoint of step 3"


def test_a_damaged_checkpoint_is_refused(finished_run: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-000003"
    shutil.copytree(finished_run / "checkpoints" / "step-000003", checkpoint)
    (checkpoint / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"damaged: model/config.json does not match its checksum"):
        find_subject(str(checkpoint), None)


def test_sampling_is_the_papers_unless_a_run_or_a_recipe_says_otherwise(finished_run: Path, tmp_path: Path) -> None:
    def sampled(given: Path, recipe: Path | None = None, *overrides: str) -> tuple[float, float, int]:
        section = find_subject(str(given), recipe, overrides).config.eval
        return section.temperature, section.top_p, section.num_generations

    model = finished_run / "model"
    assert sampled(model, None, "task=sort") == (0.8, 0.7, 3)
    assert sampled(model, None, "task=sort", "eval.temperature=0.5", "eval.num_generations=8") == (0.5, 0.7, 8)
    recipe = tiny_recipe(tmp_path / "recipe.yaml", "eval.top_p=0.9")
    assert sampled(model, recipe) == (0.8, 0.9, 3)
    assert sampled(finished_run) == (1.0, 1.0, 1)  # as it evaluated itself, so that the numbers can be compared


def test_the_option_for_the_task_keeps_the_options_of_the_task(finished_run: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from vcpo.cli import app

    words = ["--task", "sort", "task.digits=2", "sampling.max_completion_length=6", "--problems", "2", "--n", "2"]
    result = CliRunner().invoke(app, ["eval", str(finished_run / "model"), *words, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert record_of(tmp_path)["config"]["task"] == {"name": "sort", "digits": 2}
    assert "mean@2" in result.stdout
    assert "pass@2" in result.stdout
    assert "maj@2" in result.stdout


def test_missing_data_is_a_sentence_before_the_model_is_looked_at(tmp_path: Path) -> None:
    overrides = ["task=gsm8k", f"task.path={tmp_path / 'none.jsonl'}"]
    with pytest.raises(UserError, match=r"none\.jsonl"):
        evaluate_model(find_subject(str(tmp_path / "no-model"), None, overrides), None)


def test_a_result_of_before_is_removed_first(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text("old")
    with pytest.raises(UserError):
        evaluate_model(find_subject(str(finished_run), None, ["model.path=/nowhere"]), tmp_path)
    assert not (tmp_path / "eval.json").exists()


def test_answers_of_the_built_in_tasks(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "?", "answer": "#### 18"}) + "\n")
    gsm8k = make_task("gsm8k", {"path": str(rows)})
    assert isinstance(gsm8k, GSM8KTask)
    assert isinstance(gsm8k, AnsweringTask)
    assert gsm8k.answer_of(NOTHING, "so \\boxed{36/2} dollars") == gsm8k.answer_of(NOTHING, "It is $18.00.") == "18"
    assert gsm8k.answer_of(NOTHING, "I do not know") is None
    countdown = make_task("countdown", {"style": "text"})
    assert isinstance(countdown, CountdownTask)
    assert countdown.answer_of(NOTHING, "hm <answer>( 1 + 2 )*3</answer>") == "(1+2)*3"
    assert countdown.answer_of(NOTHING, "<answer>1+</answer>") is None
    assert countdown.answer_of(NOTHING, "1+2") is None


class Unreadable:
    """A task whose ``answer_of`` fails on half of the responses, and one that has none."""

    SOURCE = """
from vcpo.tasks.sort import SortTask

class Failing(SortTask):
    def answer_of(self, problem, completion):
        if len(completion) % 2:
            raise RuntimeError("no")
        return completion

class Silent(SortTask):
    answer_of = None
"""


def test_an_answer_that_cannot_be_read_has_no_vote_and_is_counted(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(Unreadable.SOURCE)
    overrides = [f"task={tmp_path / 'own.py'}:Failing", "eval.num_problems=6", "eval.num_generations=4",
                 "eval.temperature=3.0"]  # fmt: skip
    result = evaluate_model(find_subject(str(finished_run), None, [*overrides, "task.digits=4"]), None)
    odd = sum(len(t.text) % 2 for group in result.groups for t in group.trajectories)
    assert result.metrics["answers_failed"] == odd > 0
    assert result.answers is not None
    for group, answers in zip(result.groups, result.answers, strict=True):
        assert answers == [None if len(t.text) % 2 else t.text for t in group.trajectories]


def test_a_recipe_of_a_run_loads_as_before(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.to_plain()))
    subject = find_subject("hub/name", recipe)
    assert subject.config.model.path == "hub/name"
    assert subject.config.task == config.task
