"""Evaluation: the same problems and draws every time, and numbers that mean what their names say."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from run_cases import tiny_config
from vcpo.config import RunConfig
from vcpo.errors import UserError
from vcpo.models.loading import end_token_ids, load_model
from vcpo.pipeline.evaluate import EvalResult, Evaluator
from vcpo.pipeline.grading import Grader, InProcessGrading
from vcpo.records import Grade, Problem
from vcpo.tasks.registry import make_task


def evaluate(config: RunConfig, grader: Grader | None = None) -> EvalResult:
    task = make_task(config.task.name, config.task.params)
    model, tokenizer = load_model(config.model, config.seed)
    ends = end_token_ids(model, tokenizer)
    evaluator = Evaluator(
        task, InProcessGrading(grader or Grader(task, None)), tokenizer, config.eval, config.sampling, ends, config.seed
    )
    first, second = evaluator.run(model), evaluator.run(model)
    assert [texts(g) for g in first.groups] == [texts(g) for g in second.groups]
    return first


def texts(group: object) -> list[str]:
    return [t.text for t in group.trajectories]  # type: ignore[attr-defined]


class EvenFirstDigit:
    """Right if the response starts with an even digit, which an untrained model does often; None if it is empty."""

    def grade(self, problems: list[Problem], completions: list[str]) -> list[Grade]:
        return [
            Grade(float(c[0] in "02468"), correct=c[0] in "02468") if c else Grade(None, correct=False)
            for c in completions
        ]


def test_accuracy_and_its_standard_error_are_over_problems() -> None:
    config = tiny_config(Path("unused"), "eval.num_problems=12", "eval.num_generations=3")
    result = evaluate(config, Grader(EvenFirstDigit(), None))  # type: ignore[arg-type]
    shares = [sum(t.text[:1] in list("02468") for t in g.trajectories) / 3 for g in result.groups]
    assert len(shares) == 12
    assert 0 < statistics.fmean(shares) < 1
    assert result.metrics["accuracy"] == pytest.approx(statistics.fmean(shares))
    assert result.metrics["accuracy_stderr"] == pytest.approx(statistics.stdev(shares) / 12**0.5)
    rewards = [t.grade.reward for g in result.groups for t in g.trajectories if t.grade]
    scored = [r for r in rewards if r is not None]
    assert result.metrics["unscored"] == len(rewards) - len(scored)
    assert result.metrics["reward"] == pytest.approx(statistics.fmean(scored))


def test_every_response_of_a_problem_is_drawn_anew() -> None:
    result = evaluate(tiny_config(Path("unused"), "eval.num_problems=4", "eval.num_generations=5"))
    assert all(len(set(texts(g))) > 1 for g in result.groups)


def test_prompts_over_the_limit_are_counted_and_refused_when_none_is_left() -> None:
    with pytest.raises(UserError, match=r"no evaluation problem with a prompt of at most 4 tokens \(6 are longer\)"):
        evaluate(tiny_config(Path("unused"), "eval.num_problems=6", "sampling.max_prompt_length=4"))
